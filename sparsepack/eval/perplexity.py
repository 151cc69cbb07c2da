"""Rolling perplexity, and divergence from the source model, under a named protocol (design, "Which tokens are sparse").

`dense`: every position dense. `all`: every position sparse. `decode`: the first half of each window is dense context,
the second half runs sparse and only it is scored.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from sparsepack.eval.protocols import WindowScorer, scored_from
from sparsepack.eval.standard_error import exp_mean, mean
from sparsepack.progress import progress

CHUNK = 256
"""Positions whose logits exist at one time."""


@dataclass(frozen=True)
class WindowScores:
    """Sums over the scored targets of each window, float64 [windows]; the last three only beside a reference."""

    nll: torch.Tensor
    targets: int
    kl: torch.Tensor | None
    same_top: torch.Tensor | None
    reference_nll: torch.Tensor | None


def score_windows(
    scorer: WindowScorer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    protocol: str,
    reference: WindowScorer | None = None,
    batch: int = 1,
    second_half: bool = False,
) -> WindowScores:
    """Negative log-likelihood of `targets` [N, S] given `inputs` [N, S], and KL(reference || scored), both in nats."""
    width = inputs.shape[1]
    first = scored_from(protocol, width, second_half)
    start = {"dense": width, "all": 0, "decode": first}[protocol]
    sums: dict[str, list[torch.Tensor]] = {"nll": [], "kl": [], "same_top": [], "reference_nll": []}
    with progress(f"perplexity ({protocol})", len(inputs)) as advance:
        for ids, wanted in zip(torch.split(inputs, batch), torch.split(targets, batch), strict=True):
            sparse_from = torch.full((len(ids),), start)
            hidden = scorer.hidden(ids, None, sparse_from)[:, first:]
            plain = None
            if reference is not None:
                plain = reference.hidden(ids, None, torch.full((len(ids),), width))[:, first:]
            _score_batch(scorer, reference, hidden, plain, wanted[:, first:].to(scorer.device), sums)
            advance(len(ids))
    joined = {name: torch.cat(values) if values else None for name, values in sums.items()}
    nll = joined["nll"]
    assert nll is not None
    return WindowScores(nll, width - first, joined["kl"], joined["same_top"], joined["reference_nll"])


@torch.inference_mode()
def _score_batch(
    scorer: WindowScorer,
    reference: WindowScorer | None,
    hidden: torch.Tensor,
    plain: torch.Tensor | None,
    wanted: torch.Tensor,
    sums: dict[str, list[torch.Tensor]],
) -> None:
    totals = {name: torch.zeros(len(hidden), dtype=torch.float64) for name in sums}
    for at in range(0, hidden.shape[1], CHUNK):
        piece = slice(at, at + CHUNK)
        log_q = torch.log_softmax(scorer.output(hidden[:, piece]).float(), -1)
        totals["nll"] -= _picked(log_q, wanted[:, piece])
        if reference is None or plain is None:
            continue
        log_p = torch.log_softmax(reference.output(plain[:, piece]).float(), -1)
        totals["kl"] += (log_p.exp() * (log_p - log_q)).sum((1, 2)).double().cpu()
        totals["same_top"] += (log_p.argmax(-1) == log_q.argmax(-1)).sum(1).double().cpu()
        totals["reference_nll"] -= _picked(log_p, wanted[:, piece])
    for name, total in totals.items():
        if name == "nll" or reference is not None:
            sums[name].append(total)


def _picked(log_q: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return log_q.gather(-1, wanted[..., None]).sum((1, 2)).double().cpu()


def summarise(scores: WindowScores, scored_bytes: int) -> dict[str, Any]:
    """The figures of a run: each with its standard error over windows; perplexity is exp of the mean NLL.

    `scored_bytes` is the UTF-8 length of the scored targets.
    """
    nll = scores.nll / scores.targets
    result: dict[str, Any] = {
        "windows": len(nll),
        "targets": scores.targets * len(nll),
        "perplexity": exp_mean(nll),
        "bits_per_byte": float(scores.nll.sum()) / math.log(2) / scored_bytes,
    }
    if scores.kl is not None and scores.same_top is not None and scores.reference_nll is not None:
        reference = scores.reference_nll / scores.targets
        result |= {
            "kl_divergence": mean(scores.kl / scores.targets),
            "top_token_agreement": mean(scores.same_top / scores.targets),
            "source_perplexity": exp_mean(reference)["value"],
            "perplexity_ratio": exp_mean(nll - reference),  # paired: the windows' difficulty cancels
        }
    return result
