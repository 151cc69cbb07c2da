"""How far a sparse model's predictions are from the dense model's, with gradients, in little memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from sparsepack.models.architecture import logit_cap
from sparsepack.models.family import Family
from sparsepack.models.soft_caps import soft_capped
from sparsepack.models.stock.halves import Change, changed_pass, dense_pass, trained_pass

LOGITS = 1 << 26
"""No more logits than this, 256 MiB in float32, are computed at a time; about eight tensors of this size exist
then."""


@dataclass(frozen=True)
class Teacher:
    """The dense model that a model with trained weights is to follow. Both have one output matrix.

    dense  -- takes windows [B, S] and gives what enters the output matrix, [B, S, H], without gradients
    prompt -- how much the divergence of the dense first halves counts beside that of the sparse second halves
    """

    dense: Callable[[torch.Tensor], torch.Tensor]
    prompt: float


def divergence(
    model: Any, family: Family, ids: torch.Tensor, sparse: Change, teacher: Teacher | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean KL(dense || sparse) over the second halves of windows `ids` [B, S], and the sparsity there; both
    differentiable.

    sparse  -- gives each site's sparse vector, and the site's share of the sparsity
    teacher -- the dense model, where the model's weights are trained, too: keys and values of the first halves are then
               the trained model's own, and the divergence there is added
    """
    half, head, cap = ids.shape[1] // 2, model.get_output_embeddings(), logit_cap(model.config)
    prompt: torch.Tensor | float = 0.0
    if teacher is None:
        dense, context = dense_pass(model, ids)
    else:
        dense = teacher.dense(ids)
        first, context = trained_pass(model, family, ids[:, :half])
        prompt = teacher.prompt * mean_divergence(head, dense[:, :half], first, cap)
    second, shares = changed_pass(model, family, ids, context, sparse)
    return mean_divergence(head, dense[:, half:], second, cap) + prompt, torch.stack(shares).sum()


def dense_divergence(
    model: Any, family: Family, ids: torch.Tensor, teacher: Teacher
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean KL(teacher || model) over windows `ids` [B, S] of which nothing is skipped, differentiable; and a sparsity
    of 0."""
    states, _ = trained_pass(model, family, ids)
    found = mean_divergence(model.get_output_embeddings(), teacher.dense(ids), states, logit_cap(model.config))
    return found, torch.zeros_like(found)


def mean_divergence(head: torch.nn.Linear, dense: torch.Tensor, sparse: torch.Tensor, cap: float) -> torch.Tensor:
    """Mean KL(dense || sparse) over positions, from what enters the output matrix: [B, S, H] each. cap: of logits, as
    `soft_capped` takes it.

    Logits are computed for a part of the positions at a time, and again in the backward pass.
    """
    positions = max(1, LOGITS // head.out_features)
    parts = zip(*(torch.split(states.flatten(0, 1), positions) for states in (dense, sparse)), strict=True)
    each = [recomputed(_divergences, head, *part, cap, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(each).mean()


def _divergences(head: torch.nn.Linear, dense: torch.Tensor, sparse: torch.Tensor, cap: float) -> torch.Tensor:
    """KL(dense || sparse) of each position: [N, H] each -> [N]."""
    log_p, log_q = (functional.log_softmax(soft_capped(head(states), cap).float(), -1) for states in (dense, sparse))
    return (log_p.exp() * (log_p - log_q)).sum(-1)
