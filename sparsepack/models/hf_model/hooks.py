"""Watch or change the hidden vector at each site of Hugging Face decoder blocks, and what goes on inside their
experts, through transformers' own interface."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite
from sparsepack.models.activations import clamped_swiglu
from sparsepack.models.family import MLP_MID, MLP_SITES, Family
from sparsepack.models.parts import Experts

ONE_BY_ONE = "eager"
"""transformers' implementation of experts that takes any width, and adds what they give in the order of `_forward`."""

STEP_LIMITS = "time_step_limit"
"""Between which numbers state-space models have their steps: a field of configurations, and of stock modules."""

_NAME = "sparsepack_watched"


@dataclass(frozen=True)
class ExpertsWatch:
    """Functions that watch the experts of a block. With T tokens, of which each has `used` of the experts:

    routed -- is shown which ones: int64 [T, used]
    middle -- is shown what enters their down matrices [T, used, width], and returns what to use in its place, or None
              to leave it as it is
    product -- is shown each product that is made (`ExpertProduct`)
    shared -- the module of an expert that every token has, which is so many more as it is as wide as one: what enters
              its down matrix is shown after theirs
    norm   -- the module that norms what this gives before the others are asked; None: there is none
    """

    routed: Callable[[torch.Tensor], None] | None = None
    middle: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    product: "ExpertProduct | None" = None
    shared: nn.Module | None = None
    norm: nn.Module | None = None


ExpertProduct = Callable[[str, int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""The function takes (site, expert, tokens, x, y): that expert's matrix at that site makes y [n, rows] of x [n,
columns], which are of the tokens int64 [n], each once. The shared expert, as wide as it is, has the number after the
others'. It returns what to use in place of y, or None to leave it as it is. What an expert weighs comes after it."""


_watches: "WeakKeyDictionary[nn.Module, list[ExpertsWatch]]" = WeakKeyDictionary()
_owed: "WeakKeyDictionary[nn.Module, torch.Tensor]" = WeakKeyDictionary()
"""The stock block asks the shared expert first, and adds what it gave after what the others give: these compute both,
so that what enters their down matrices is shown together, and fill in here what was owed."""
_given: "WeakKeyDictionary[nn.Module, torch.Tensor]" = WeakKeyDictionary()
"""The same where the stock block asks the shared expert last: what it will give."""


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
    shared = [late for _, watch in watches for late in (watch.shared, watch.norm) if late is not None]
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
            _given.pop(late, None)
            if forward is not None:
                late.forward = forward


def _put_off(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    if module in _given:
        return _given.pop(module).reshape(hidden.shape)
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
    # transformers' number of no expert is that behind the last one.
    hit = [e for e in torch.bincount(chosen.flatten()).nonzero().flatten().tolist() if e < len(module.down_proj)]
    places = {expert: torch.where(chosen == expert) for expert in hit}

    def shown(site: str, expert: int, token: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for product in (watch.product for watch in watches if watch.product is not None):
            changed = product(site, expert, token, x, y)
            y = y if changed is None else changed
        return y

    def gate(both: torch.Tensor) -> torch.Tensor:
        if module.has_bias:
            return clamped_swiglu(*both.chunk(2, dim=-1))
        made: torch.Tensor = module._apply_gate(both) if module.has_gate else module.act_fn(both)
        return made

    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else None
    into, mid = MLP_SITES
    matrices = module.gate_up_proj if module.has_gate else module.up_proj
    for expert, (token, slot) in places.items():
        x = hidden[token]
        both = shown(into, expert, token, x, functional.linear(x, matrices[expert]))
        middle[token, slot] = gate(both if biases is None else both + biases[0][expert])
    late: Any = next((watch.shared for watch in watches if watch.shared is not None), None)
    everyone, count = torch.arange(len(hidden), device=hidden.device), len(module.down_proj)
    if late is not None:
        both = late.up_proj(hidden)
        if module.has_gate:
            both = torch.cat([late.gate_proj(hidden), both], -1)
        both = shown(into, count, everyone, hidden, both)
        first, *up = both.chunk(1 + module.has_gate, dim=-1)
        of_shared = math.prod(up, start=late.act_fn(first))
        middle = torch.cat([middle, of_shared.unflatten(1, (-1, middle.shape[-1]))], 1)
    for watch in watches:
        changed = None if watch.middle is None else watch.middle(middle)
        middle = middle if changed is None else changed
    if late is not None:
        x = middle[:, chosen.shape[1] :].flatten(1)
        of_all = shown(mid, count, everyone, x, late.down_proj(x))
        norm: Any = next((watch.norm for watch in watches if watch.norm is not None), None)
        if norm is not None:
            _owed.pop(late, None)
            late, of_all = norm, type(norm).forward(norm, of_all)
        if late in _owed:
            _owed.pop(late).view(of_all.shape).copy_(of_all)
        else:
            _given[late] = of_all
    output = torch.zeros_like(hidden)
    for expert, (token, slot) in places.items():
        x = middle[token, slot]
        y = shown(mid, expert, token, x, functional.linear(x, module.down_proj[expert]))
        y = y if biases is None else y + biases[1][expert]
        output.index_add_(0, token, (y * weights[token, slot, None]).to(output.dtype))
    return output


def order_parameters(blocks: Iterable[nn.Module], family: Family) -> None:
    """Let stock blocks that hold parameters in another order have them, and compute with them, as those of other
    families: experts (`Experts.alternate`), and gated delta nets (`DeltaNetNames.grouped`). What these parameters held
    is lost. Steps of state-space models get the limits, and their norms the groups, that the family has."""
    experts, state = family.experts, family.delta_net
    limits = family.only.get(STEP_LIMITS)
    for block in blocks:
        if experts is not None and experts.alternate:
            module: Any = block.get_submodule(experts.module)
            for name in (Experts.GATE_UP, Experts.DOWN):
                value = getattr(module, name)
                setattr(module, name, nn.Parameter(value.mT.contiguous(), requires_grad=value.requires_grad))
            module.forward = partial(_forward, module)
        if state is not None and state.grouped and hasattr(block, state.module):
            _order_delta_net(getattr(block, state.module))
        if limits is not None and family.mamba is not None:
            mixer: Any = block.get_submodule(family.mamba.module)
            if hasattr(mixer, STEP_LIMITS):  # transformers 5.23 has time_step_min there, which training had not
                setattr(mixer, STEP_LIMITS, tuple(limits))
        if family.mamba is not None and family.mamba.norms:
            state_space: Any = getattr(block, family.mamba.module, None)
            norm = getattr(state_space, "norm", None)
            # Granite's of transformers 5.17 norms all groups together, which mamba_ssm and later versions do not.
            if norm is not None and not hasattr(norm, "group_size"):
                norm.forward = partial(_norm_groups, norm, state_space.n_groups)


def _norm_groups(norm: Any, groups: int, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The RMSNorm of each group of channels of x times the SiLU of the gate."""
    gated = torch.unflatten(x.float() * functional.silu(gate.float()), -1, (groups, -1))
    normed = functional.rms_norm(gated, gated.shape[-1:], eps=norm.variance_epsilon).flatten(-2)
    weighted: torch.Tensor = norm.weight * normed.to(x.dtype)
    return weighted


def _order_delta_net(module: Any) -> None:
    """Give a stock delta net whose heads stand side by side four projections in place of two; those two then join what
    these make, as the module's own code takes it apart again."""
    hidden, like = module.hidden_size, module.in_proj_qkvz.weight
    rows = {"qkv": 2 * module.key_dim + module.value_dim, "z": module.value_dim}
    rows |= {"b": module.num_v_heads, "a": module.num_v_heads}
    for name, count in rows.items():
        linear = nn.Linear(hidden, count, bias=False, device=like.device, dtype=like.dtype)
        setattr(module, f"in_proj_{name}", linear.requires_grad_(like.requires_grad))
    heads = module.num_k_heads

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.unflatten(part, -1, (heads, -1)) for part in parts], -1).flatten(-2)

    def qkvz(x: torch.Tensor) -> torch.Tensor:
        of_heads = module.in_proj_qkv(x).split([module.key_dim, module.key_dim, module.value_dim], -1)
        return joined([*of_heads, module.in_proj_z(x)])

    del module.in_proj_qkvz, module.in_proj_ba
    module.in_proj_qkvz = qkvz
    module.in_proj_ba = lambda x: joined([module.in_proj_b(x), module.in_proj_a(x)])


SiteFunction = Callable[[int, str, torch.Tensor], torch.Tensor | None]
"""The function takes (layer, site, x [B, S, columns]) and returns the vector to use in place of x, or None to leave x
as it is. Of experts, x is at mlp_in what all of them are given, and at mlp_mid [B, S, experts, columns]: what enters
the down matrices of those that a token has, the parts of a shared one after those that were chosen."""


def check_finite(values: torch.Tensor, where: str) -> None:
    """Raise `CheckpointError` for values that a model computed and that are NaN or infinite."""
    if not all_finite(values):
        raise CheckpointError(
            f"{where}: the model's values are NaN or infinite here; expected the weights of a trained model: copy or "
            "export them again, or try --dtype float32"
        )


@contextmanager
def site_hooks(blocks: Sequence[tuple[int, nn.Module]], family: Family, function: SiteFunction) -> Iterator[None]:
    """Call `function` once for every site of the given (layer, block) pairs in each forward pass.

    The projections of a site share their input, so the function runs on the first and its answer serves the rest. Some
    stock blocks join rows and positions before their MLP; the function sees them apart at every site. On a CPU it sees
    no vector with values that are none: `CheckpointError` then (a GPU would have to be waited for).
    """
    handles, watches = [], []
    for layer, block in blocks:
        shape: list[int] = []  # B and S of each pass
        handles.append(_shape_hook(layer, block, family, shape))
        named = family.of_block(block)
        experts = named.experts_of(layer)
        for site in named.projections_of(layer):
            memory: dict[str, Any] = {}
            for position, name in enumerate(named.readers(layer, site)):
                hook = _hook(layer, site, function, memory, shape, position == 0)
                handles.append(block.get_submodule(name).register_forward_pre_hook(hook))
        if experts is not None:
            watch = ExpertsWatch(middle=_middle(layer, function, shape), **_late(block, experts))
            watches.append((block.get_submodule(experts.module), watch))
    try:
        with watched_experts(watches):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def stream_hooks(block: nn.Module, family: Family, function: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `function` with the residual stream as it enters each norm of a block through which sites read it; never,
    for a family that does not say who reads it."""
    named = family.of_block(block)
    names = [] if family.residual is None else [named.norms[norm] for norm in family.residual.readers.values()]
    handles = [
        block.get_submodule(name).register_forward_pre_hook(lambda _, inputs: function(inputs[0])) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def expert_hooks(block: nn.Module, family: Family, function: ExpertProduct, layer: int = 0) -> Iterator[None]:
    """Call `function` with each product of a block's experts; never, for a block without experts."""
    experts = family.of_block(block).experts_of(layer)
    if experts is None:
        yield
        return
    watch = ExpertsWatch(product=function, **_late(block, experts))
    with watched_experts([(block.get_submodule(experts.module), watch)]):
        yield


def _late(block: nn.Module, experts: Experts) -> dict[str, nn.Module]:
    """The modules of a block that wait for its experts, as an `ExpertsWatch` names them."""
    shared = experts.shared
    names = {} if shared is None else {"shared": shared.module, "norm": shared.norm}
    return {field: block.get_submodule(name) for field, name in names.items() if name}


@contextmanager
def routing_hooks(
    block: nn.Module, family: Family, function: Callable[[torch.Tensor], None], layer: int = 0
) -> Iterator[None]:
    """Call `function` with the experts that each token of a block has, int64 [B, S, used]; never, for a block without
    experts."""
    experts = family.of_block(block).experts_of(layer)
    if experts is None:
        yield
        return
    shape: list[int] = []
    handle = _shape_hook(layer, block, family, shape)
    watch = ExpertsWatch(routed=lambda chosen: function(chosen.reshape(*shape, chosen.shape[-1])))
    try:
        with watched_experts([(block.get_submodule(experts.module), watch)]):
            yield
    finally:
        handle.remove()


def _shape_hook(layer: int, block: nn.Module, family: Family, shape: list[int]) -> RemovableHandle:
    """Keep B and S of what enters a block in `shape`: as its first site shows them, which a block with a row is given
    before any code joins rows and positions; else as the block itself is given it."""
    if family.has_row and not family.mlp_kinds:
        first = block.get_submodule(next(iter(family.of_block(block).projections_of(layer).values()))[0])
        return first.register_forward_pre_hook(lambda _, inputs: shape.__setitem__(slice(None), inputs[0].shape[:-1]))

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape[:] = (args[0] if args else kwargs["hidden_states"]).shape[:-1]

    return block.register_forward_pre_hook(keep, with_kwargs=True)


def _middle(layer: int, function: SiteFunction, shape: list[int]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def middle(x: torch.Tensor) -> torch.Tensor | None:
        if x.device.type == "cpu":
            check_finite(x, f"block {layer}, {MLP_MID}")
        answer = function(layer, MLP_MID, x.reshape(*shape, *x.shape[1:]))
        return None if answer is None else answer.reshape(x.shape)

    return middle


def _hook(
    layer: int,
    site: str,
    function: SiteFunction,
    memory: dict[str, Any],
    shape: list[int],
    first: bool,
) -> Any:
    def pre_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        x = inputs[0]
        if first:
            if x.device.type == "cpu":
                check_finite(x, f"block {layer}, {site}")
            answer = function(layer, site, x.reshape(*shape, x.shape[-1]))
            memory["answer"] = answer
        answer = memory["answer"]
        return None if answer is None else (answer.reshape(x.shape), *inputs[1:])

    return pre_forward
