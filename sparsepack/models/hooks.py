"""Watch or change the hidden vector at each site of stock decoder blocks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparsepack.models.families import Family

SiteFunction = Callable[[int, str, torch.Tensor], torch.Tensor | None]
"""(layer, site, x [B, S, columns]) -> the vector to use in its place, or None to leave it."""


@contextmanager
def site_hooks(blocks: Sequence[tuple[int, nn.Module]], family: Family, function: SiteFunction) -> Iterator[None]:
    """Call `function` once for every site of the given (layer, block) pairs in each forward pass.

    The projections of a site share their input, so the function runs on the first and its answer serves the rest.
    """
    handles = []
    for layer, block in blocks:
        for site, names in family.projections.items():
            memory: dict[str, Any] = {}
            for position, name in enumerate(names):
                hook = _hook(layer, site, function, memory, first=position == 0)
                handles.append(block.get_submodule(name).register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: int, site: str, function: SiteFunction, memory: dict[str, Any], first: bool) -> Any:
    def pre_forward(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if first:
            memory["answer"] = function(layer, site, inputs[0])
        answer = memory["answer"]
        return None if answer is None else (answer, *inputs[1:])

    return pre_forward
