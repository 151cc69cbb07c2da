"""Watch or change the hidden vector at each site of stock decoder blocks.

Run parts of hidden states by what was recorded of a run: Python launches nothing then.

Gradients that have the same bits each time they are taken, on a GPU, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite
from sparsepack.models.family import MLP_MID, MLP_SITES, SITES, Family
from sparsepack.models.stock.experts import ExpertsWatch, watched_experts

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Such a function records what a function puts on a GPU, without running it there. It gives what repeats that, on what
stands in the same tensors then, and the tensor in which the result is."""

_LEAST = 3
"""Recording is worth while for so many parts."""


def run_recorded(
    parts: Sequence[Tensor], run: Callable[[Tensor], Tensor], record: Record, advance: Callable[[], object]
) -> None:
    """Put `run` of each part in its place; `advance` is called after each.

    The first part is run as it is, which loads kernels and makes what later runs add to. Then one run is recorded and
    repeated for each part of the same shape. Whatever watches the run is called in these two alone: what it counts must
    be added to tensors that stay the same.
    """
    repeat: Callable[[], None] | None = None
    for number, part in enumerate(parts):
        if number == 0 or part.shape != parts[0].shape or len(parts) < _LEAST:
            part.copy_(run(part))
        else:
            if repeat is None:
                entering = part.clone()  # values of a real run: a first run of it on a CPU looks for NaN
                repeat, leaving = record(partial(run, entering))
            entering.copy_(part)
            repeat()
            part.copy_(leaving)
        advance()


def repeatable(device: str) -> AbstractContextManager[None]:
    """Within the context attention's backward pass adds in an order of its own on a GPU.

    The other kernels that PyTorch has there add in the order in which groups of threads happen to end, so that a
    training is another one each time it is run. This one keeps all scores of a block; it takes no longer on windows of
    usual length, of which only the second half has gradients.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.startswith("cuda") else nullcontext()


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
        shape: list[int] = []  # B and S, as the first site of a block shows them in each pass
        for site, names in family.projections.items():
            memory: dict[str, Any] = {}
            modules = names
            if family.experts is not None and site in MLP_SITES:
                modules = (family.experts.module,) if site != MLP_MID else ()
            for position, name in enumerate(modules):
                hook = _hook(layer, site, function, memory, shape, first=position == 0)
                handles.append(block.get_submodule(name).register_forward_pre_hook(hook))
        if family.experts is not None:
            shared = family.experts.shared
            watch = ExpertsWatch(
                middle=_middle(layer, function, shape),
                shared=None if shared is None else block.get_submodule(shared.module),
            )
            watches.append((block.get_submodule(family.experts.module), watch))
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
    names = [] if family.residual is None else [family.norms[norm] for norm in family.residual.readers.values()]
    handles = [
        block.get_submodule(name).register_forward_pre_hook(lambda _, inputs: function(inputs[0])) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def routing_hooks(block: nn.Module, family: Family, function: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `function` with the experts that each token of a block has, int64 [B, S, used]; never, for a family without
    experts."""
    if family.experts is None:
        yield
        return
    shape: list[int] = []
    first = block.get_submodule(family.projections[SITES[0]][0])
    handle = first.register_forward_pre_hook(lambda _, inputs: shape.__setitem__(slice(None), inputs[0].shape[:-1]))
    watch = ExpertsWatch(routed=lambda chosen: function(chosen.reshape(*shape, chosen.shape[-1])))
    try:
        with watched_experts([(block.get_submodule(family.experts.module), watch)]):
            yield
    finally:
        handle.remove()


def _middle(layer: int, function: SiteFunction, shape: list[int]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def middle(x: torch.Tensor) -> torch.Tensor | None:
        if x.device.type == "cpu":
            check_finite(x, f"block {layer}, {MLP_MID}")
        answer = function(layer, MLP_MID, x.reshape(*shape, *x.shape[1:]))
        return None if answer is None else answer.reshape(x.shape)

    return middle


def _hook(layer: int, site: str, function: SiteFunction, memory: dict[str, Any], shape: list[int], first: bool) -> Any:
    def pre_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        x = inputs[0]
        if first:
            if site == SITES[0]:
                shape[:] = x.shape[:-1]
            if x.device.type == "cpu":
                check_finite(x, f"block {layer}, {site}")
            answer = function(layer, site, x.reshape(*shape, x.shape[-1]))
            memory["answer"] = None if answer is None else answer.reshape(x.shape)
        answer = memory["answer"]
        return None if answer is None else (answer, *inputs[1:])

    return pre_forward
