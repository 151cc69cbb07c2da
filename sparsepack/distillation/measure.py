"""How far a model is from the one that it should follow: of what is decoded, and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.families import Family
from sparsepack.models.records.distilled import Figures
from sparsepack.models.stock.halves import Change, changed_pass, dense_pass
from sparsepack.sparsity.divergence import mean_divergence


@dataclass(frozen=True)
class Measured:
    """The figures of a model, and of each window what enters its output matrix where nothing is skipped: [1, S, H] on
    the CPU."""

    figures: Figures
    dense: tuple[Tensor, ...]


@torch.no_grad()
def measure(
    model: Any, family: Family, windows: Tensor, sparse: Change, teacher: Sequence[Tensor] | None = None
) -> Measured:
    """Measure a model on windows [N, S]: the second half of each sparse behind a dense first half.

    teacher -- the `dense` of the model that it should follow; None: its own
    """
    head, half = model.get_output_embeddings(), windows.shape[1] // 2
    dense, sums = [], torch.zeros(3, dtype=torch.float64)
    for number, ids in enumerate(windows):
        states, context = dense_pass(model, ids[None])
        second, shares = changed_pass(model, family, ids[None], context, sparse)
        wanted = states if teacher is None else teacher[number].to(states)
        found = (
            mean_divergence(head, wanted[:, half:], second),
            mean_divergence(head, wanted[:, :half], states[:, :half]),
            torch.stack(shares).sum(),
        )
        sums += torch.stack(found).double().cpu()
        dense.append(states.cpu())
    decoded, prompt, skipped = (sums / len(windows)).tolist()
    return Measured(Figures(decoded, prompt, skipped), tuple(dense))
