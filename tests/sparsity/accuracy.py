"""Measure a thresholds table on windows of text, as evaluation does."""

from typing import Any

import torch

from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.tokenizer.windows import rolling_windows


def windows_of(checkpoint: Checkpoint, text: Any, context: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of `count` windows, evenly spread over the text."""
    inputs, targets = rolling_windows(checkpoint.tokenizer, text, context)
    chosen = torch.linspace(0, len(inputs) - 1, count).long()
    return inputs[chosen], targets[chosen]


def realised(
    subject: Subject, windows: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, dict[tuple[int, str], float]]:
    """Sparsity over all sites by parameters, and per site, under `decode`."""
    scorer, shares = subject.scorer(), subject.parameter_shares()
    score_windows(scorer, *windows, "decode", batch=2)
    sites = scorer.realised()
    return sum(value * shares[key] for key, value in sites.items()), sites


def divergence(checkpoint: Checkpoint, table: Thresholds, windows: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Mean KL divergence from the dense model under `decode`, nats per token."""
    sparse, dense = open_subject(checkpoint.name, table), open_subject(checkpoint.name)
    scores = score_windows(sparse.scorer(), *windows, "decode", dense.scorer(), batch=4)
    return float(scores.kl.sum() / scores.targets / len(scores.kl))
