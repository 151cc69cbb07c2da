"""What enters the matrices of a block while its windows run, as far as a method must know it.

The matrices of a site share their inputs, and so do those of all experts at mlp_in. What enters the down matrices of
different experts has nothing in common, channel by channel: each has inputs of its own, and so has a shared expert.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparsepack.models.architecture import expert_numbers
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_MID, Family
from sparsepack.progress import say
from sparsepack.reconstruction.inputs import Inputs, Sums

_SHARED = "shared"


def inputs_name(family: Family, site: str, projection: str, number: int = 0) -> str:
    """The name of what enters a matrix of a site: that of expert `number` where the projection is one of experts."""
    if family.experts is None or site != MLP_MID:
        return site
    return f"{site}/{number if projection in family.experts.parameters else _SHARED}"


def empty_sums(checkpoint: Checkpoint, site: str, layer: int, products: bool, device: torch.device) -> dict[str, Sums]:
    """Sums of what enters the matrices of a site, by the names that `inputs_name` gives."""
    columns, experts = checkpoint.stacked_shape(site, layer)[1], expert_numbers(checkpoint.config)
    if experts is None or site != MLP_MID:
        return {site: Sums(columns, products, device)}
    widths = {str(number): columns for number in range(experts.count)}
    widths |= {_SHARED: experts.shared * columns} if experts.shared else {}
    return {f"{site}/{name}": Sums(width, products, device) for name, width in widths.items()}


def entering(family: Family, site: str, x: Tensor, chosen: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """What enters each matrix of a site, by the names that `inputs_name` gives, from what a site's function is shown.

    chosen -- the experts that each token has been given: int64 [B, S, used]; None in a family without experts
    """
    if chosen is None or site != MLP_MID:
        yield site, x
        return
    used = chosen.shape[-1]
    for expert in sorted(set(chosen.flatten().tolist())):
        yield f"{site}/{expert}", x[:, :, :used][chosen == expert]
    if x.shape[2] > used:
        yield f"{site}/{_SHARED}", x[:, :, used:].flatten(2)


def inputs_of(sums: Mapping[str, Sums], damping: float, layer: int) -> dict[str, Inputs]:
    """The means of what was counted. Experts that no token reached are named on stderr: their inputs count as equally
    large, and as independent of each other."""
    unknown = [name for name, each in sums.items() if not each.tokens]
    if unknown:
        numbers = ", ".join(name.partition("/")[2] for name in unknown[:8])
        say(
            f"note: block {layer}: no token reached {len(unknown)} of its experts ({numbers}"
            f"{', ...' if len(unknown) > 8 else ''}); what stays of their down matrices is chosen by size"
        )
    return {name: each.inputs(damping) if each.tokens else each.unknown(damping) for name, each in sums.items()}
