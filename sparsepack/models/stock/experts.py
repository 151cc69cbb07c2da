"""Watch or change what goes on inside the experts of a stock model, through transformers' own interface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

ONE_BY_ONE = "eager"
"""transformers' implementation of experts that takes any width, and adds what they give in the order of `_forward`."""

_NAME = "sparsepack_watched"


@dataclass(frozen=True)
class ExpertsWatch:
    """Functions that watch the experts of a block. With T tokens, of which each has `used` of the experts:

    routed -- is shown which ones: int64 [T, used]
    middle -- is shown what enters their down matrices [T, used, width], and returns what to use in its place, or None
              to leave it as it is
    shared -- the module of an expert that every token has, which is so many more as it is as wide as one: what enters
              its down matrix is shown after theirs
    """

    routed: Callable[[torch.Tensor], None] | None = None
    middle: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    shared: nn.Module | None = None


_watches: "WeakKeyDictionary[nn.Module, list[ExpertsWatch]]" = WeakKeyDictionary()
_owed: "WeakKeyDictionary[nn.Module, torch.Tensor]" = WeakKeyDictionary()
"""The stock block asks the shared expert first, and adds what it gave after what the others give: these compute both,
so that what enters their down matrices is shown together, and fill in here what was owed."""


@contextmanager
def watched_experts(watches: Sequence[tuple[nn.Module, ExpertsWatch]]) -> Iterator[None]:
    """Within the context the experts' modules are watched, by those who watched them before, too, and before these."""
    if not watches:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    configs: list[Any] = [module.config for module, _ in watches]
    before = [config._experts_implementation for config in configs]
    shared = [watch.shared for _, watch in watches if watch.shared is not None]
    forwards = [vars(module).get("forward") for module in shared]
    for (module, watch), config in zip(watches, configs, strict=True):
        _watches.setdefault(module, []).append(watch)
        config._experts_implementation = _NAME
    for late in shared:
        late.forward = partial(_put_off, late)
    try:
        yield
    finally:
        for (module, _), config, name in reversed([*zip(watches, configs, before, strict=True)]):
            _watches[module].pop()
            config._experts_implementation = name
        for late, forward in zip(shared, forwards, strict=True):
            del late.forward
            if forward is not None:
                late.forward = forward


def _put_off(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    _owed[module] = torch.empty_like(hidden)
    return _owed[module]


def _forward(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What `forward` of the module computes, in its own order, with a stop where all down matrices have their inputs.

    hidden [T, hidden]; chosen int64 and weights [T, used] -> [T, hidden]
    """
    watches = _watches.get(module, [])
    for watch in watches:
        if watch.routed is not None:
            watch.routed(chosen)
    middle = hidden.new_zeros(*chosen.shape, module.down_proj.shape[-1])
    hit = torch.bincount(chosen.flatten()).nonzero().flatten().tolist()
    places = {expert: torch.where(chosen == expert) for expert in hit}
    for expert, (token, slot) in places.items():
        gate, up = functional.linear(hidden[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
        middle[token, slot] = module.act_fn(gate) * up
    late: Any = next((watch.shared for watch in watches if watch.shared is not None), None)
    if late is not None:
        of_shared = late.act_fn(late.gate_proj(hidden)) * late.up_proj(hidden)
        middle = torch.cat([middle, of_shared.unflatten(1, (-1, middle.shape[-1]))], 1)
    for watch in watches:
        changed = None if watch.middle is None else watch.middle(middle)
        middle = middle if changed is None else changed
    if late is not None:
        _owed.pop(late).copy_(late.down_proj(middle[:, chosen.shape[1] :].flatten(1)))
    output = torch.zeros_like(hidden)
    for expert, (token, slot) in places.items():
        made = functional.linear(middle[token, slot], module.down_proj[expert]) * weights[token, slot, None]
        output.index_add_(0, token, made.to(output.dtype))
    return output
