"""How far a model is from the one that it should follow: of what is decoded, and of prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.architecture import logit_cap
from sparsepack.models.family import Family
from sparsepack.models.records.distilled import Figures
from sparsepack.models.stock.halves import Change, changed_pass, dense_pass
from sparsepack.sparsity.divergence import mean_divergence


@torch.no_grad()
def dense_states(model: Any, windows: Tensor) -> tuple[Tensor, ...]:
    """What enters a model's output matrix at each of the windows [N, S], with nothing skipped: [1, S, H] on the CPU."""
    return tuple(dense_pass(model, ids[None])[0].cpu() for ids in windows)


@torch.no_grad()
def measure(model: Any, family: Family, windows: Tensor, sparse: Change | None, wanted: Sequence[Tensor]) -> Figures:
    """Measure a model on windows [N, S]: the second half of each sparse behind a dense first half.

    sparse -- None: nothing is skipped
    wanted -- the `dense_states` of the model that it should follow
    """
    head, half, cap = model.get_output_embeddings(), windows.shape[1] // 2, logit_cap(model.config)
    sums = torch.zeros(3, dtype=torch.float64)
    for ids, dense in zip(windows, wanted, strict=True):
        states, context = dense_pass(model, ids[None])
        second, skipped = states[:, half:], states.new_zeros(())
        if sparse is not None:
            second, shares = changed_pass(model, family, ids[None], context, sparse)
            skipped = torch.stack(shares).sum()
        dense = dense.to(states)
        decoded = mean_divergence(head, dense[:, half:], second, cap)
        prompt = mean_divergence(head, dense[:, :half], states[:, :half], cap)
        sums += torch.stack([decoded, prompt, skipped.to(decoded)]).double().cpu()
    return Figures(*(sums / len(windows)).tolist())
