"""Watch or change what goes on inside the experts of a stock model, through transformers' own interface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """

    routed: Callable[[torch.Tensor], None] | None = None
    middle: Callable[[torch.Tensor], torch.Tensor | None] | None = None


_watches: "WeakKeyDictionary[nn.Module, list[ExpertsWatch]]" = WeakKeyDictionary()


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
    for (module, watch), config in zip(watches, configs, strict=True):
        _watches.setdefault(module, []).append(watch)
        config._experts_implementation = _NAME
    try:
        yield
    finally:
        for (module, _), config, name in reversed([*zip(watches, configs, before, strict=True)]):
            _watches[module].pop()
            config._experts_implementation = name


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
    for watch in watches:
        changed = None if watch.middle is None else watch.middle(middle)
        middle = middle if changed is None else changed
    output = torch.zeros_like(hidden)
    for expert, (token, slot) in places.items():
        made = functional.linear(middle[token, slot], module.down_proj[expert]) * weights[token, slot, None]
        output.index_add_(0, token, made.to(output.dtype))
    return output
