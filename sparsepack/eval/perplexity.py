"""Rolling perplexity, and divergence from the source model, under a named protocol (design, "Which tokens are sparse").

`dense`: every position dense. `all`: every position sparse. `decode`: the first half of each window is dense context,
the second half runs sparse and only it is scored.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparsepack.eval.protocols import Done, WindowScorer, scored_from
from sparsepack.eval.results import exp_mean, mean
from sparsepack.eval.scorer import RunningSoftmax, wide
from sparsepack.models.hf_model.hooks import check_finite
from sparsepack.progress import Shorter, progress
from sparsepack.workers.shard import ALONE, Shard

POSITIONS, WORDS = 1024, 4096
"""The logits that exist at one time are of so many positions and so many tokens of the vocabulary."""


@dataclass(frozen=True)
class WindowScores:
    """Sums over the scored targets of each window, float64 [windows]; the last three only beside a reference."""

    nll: torch.Tensor
    targets: int
    kl: torch.Tensor | None = None
    same_top: torch.Tensor | None = None
    reference_nll: torch.Tensor | None = None


def score_windows(
    scorer: WindowScorer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    protocol: str,
    reference: WindowScorer | None = None,
    batch: int = 1,
    second_half: bool = False,
    shard: Shard = ALONE,
) -> WindowScores:
    """Negative log-likelihood of `targets` [N, S] given `inputs` [N, S], and KL(reference || scored), both in nats.

    shard -- this worker's of several, who score them together: each runs some batches, and all return the scores of all
             windows

    The two models take turns: each runs a group of windows, then their logits are compared. Only hidden states of both
    are in memory together. Whatever runs together is of one batch, so that the scores have the same bits for every
    number of workers. Raises `WorkersError` for more workers than batches, and `WorkerLost`.
    """
    shard = shard.split(len(inputs), batch)
    shard.check("--windows")
    shorter = Shorter("--windows", len(inputs))
    inputs, targets = shard.own(inputs), shard.own(targets)
    width = inputs.shape[1]
    first = scored_from(protocol, width, second_half)
    start = _sparse_from(protocol, width)
    scorers = [scorer] if reference is None else [scorer, reference]
    rows = rows_together(scorers, width, batch)
    found: list[dict[str, torch.Tensor]] = []
    with progress(f"perplexity ({protocol})", len(inputs), shorter=shorter) as advance:
        done = _whole(advance, sum(each.steps for each in scorers))
        for ids, expected in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            hidden = []
            for each, sparse_from in zip(scorers, (start, width), strict=False):
                starts, scored = torch.full((len(ids),), sparse_from), torch.full((len(ids),), first)
                states = each.hidden(ids, None, starts, batch, done, scored)
                hidden.append(states[:, first:].flatten(0, 1))
                del states
            found.append(_score_windows(scorers, hidden, expected[:, first:], batch))
    joined = {name: shard.all_gather_rows(torch.cat([sums[name] for sums in found])) for name in found[0]}
    for name, of in (("nll", "the model"), ("reference_nll", "its source")):
        if name in joined:
            check_finite(joined[name], f"perplexity of {of}")
    return WindowScores(targets=width - first, **joined)


def score_protocols(
    scorer: WindowScorer,
    reference: WindowScorer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    protocols: Sequence[str],
) -> dict[str, WindowScores]:
    """Return the scores of the second halves of windows, int64 [N, S], under each protocol, as `score_windows` has
    them with `second_half` one window at a time; the reference runs once for all protocols."""
    width = inputs.shape[1]
    first = width // 2
    starts = torch.tensor([_sparse_from(protocol, width) for protocol in protocols])
    rows = max(1, rows_together([scorer, reference], width, 1) // (len(protocols) + 1))
    found: list[list[dict[str, torch.Tensor]]] = [[] for _ in protocols]
    steps = len(protocols) * scorer.steps + reference.steps
    with progress("scoring held-out windows", len(inputs)) as advance:
        done = _whole(advance, steps)
        for ids, expected in zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True):
            of_each = ids.repeat(len(protocols), 1)
            scored = scorer.hidden(of_each, None, starts.repeat_interleave(len(ids)), 1, done)[:, first:]
            dense = reference.hidden(ids, None, torch.full((len(ids),), width), 1, done)[:, first:].flatten(0, 1)
            for sums, states in zip(found, torch.split(scored, len(ids)), strict=True):
                hidden = [states.flatten(0, 1), dense]
                sums.append(_score_windows([scorer, reference], hidden, expected[:, first:], 1))
    return {
        protocol: WindowScores(
            targets=width - first, **{name: torch.cat([part[name] for part in sums]) for name in sums[0]}
        )
        for protocol, sums in zip(protocols, found, strict=True)
    }


def _sparse_from(protocol: str, width: int) -> int:
    """The first sparse position of a window of `width`."""
    return {"dense": width, "all": 0, "decode": scored_from("decode", width)}[protocol]


def rows_together(scorers: Sequence[WindowScorer], width: int, batch: int) -> int:
    """How many windows of `width` tokens wait together for all scorers: whole batches."""
    return max(1, min(each.rows_at_once(width, batch) for each in scorers) // batch) * batch


def _whole(advance: Callable[[int], None], steps: int) -> Done:
    """Advance by a row whenever so many of them have taken a step as make all `steps` of one."""
    taken = reported = 0

    def done(rows: int) -> None:
        nonlocal taken, reported
        taken += rows
        if taken // steps > reported:
            advance(taken // steps - reported)
            reported = taken // steps

    return done


def _score_windows(
    scorers: list[WindowScorer], hidden: list[torch.Tensor], targets: torch.Tensor, batch: int
) -> dict[str, torch.Tensor]:
    """The sums of each window by the names of `WindowScores`, float64 [windows]. targets: targets [windows, positions]
    that are scored; hidden: of these positions, [windows * positions, ...]"""
    scores = _score_rows(scorers, hidden, targets.flatten(), batch * targets.shape[1])
    # Each row is summed by itself: how many there are beside it decides no bit.
    return {name: torch.stack([row.sum() for row in value.view(targets.shape)]) for name, value in scores.items()}


@torch.inference_mode()
def _score_rows(
    scorers: list[WindowScorer], hidden: list[torch.Tensor], targets: torch.Tensor, together: int
) -> dict[str, torch.Tensor]:
    """The scores of N positions, from each scorer's `hidden` [N, ...]: by the names of `WindowScores`, float64 [N].

    together -- positions of one batch: logits of two batches are not made in one product

    The vocabulary is the outer loop: each part of an output matrix is made once.
    """
    parts = [*_parts(len(targets), together)]
    softmax = [RunningSoftmax(targets) for _ in scorers]
    apart = torch.zeros(len(targets), dtype=torch.float64)  # sum of exp(reference logit) * (reference - scored logit)
    for word in range(0, scorers[0].vocabulary, WORDS):
        heads = [scorer.head(slice(word, word + WORDS)) for scorer in scorers]
        for part in parts:
            logits = [head(states[part]).float() for head, states in zip(heads, hidden, strict=True)]
            before = softmax[-1].largest[part].clone()
            grown = [each.take(part, word, these) for each, these in zip(softmax, logits, strict=True)][-1]
            if len(scorers) == 2:
                apart[part] *= torch.exp(before - softmax[1].largest[part])
                apart[part] += (wide(grown) * (wide(logits[1]) - wide(logits[0]))).sum(-1).cpu()
    found = {"nll": softmax[0].nll()}
    if len(scorers) == 2:
        ours, theirs = softmax
        found["kl"] = apart / theirs.total - (theirs.log_sum() - ours.log_sum())
        found["same_top"] = (ours.top == theirs.top).double()
        found["reference_nll"] = theirs.nll()
    return found


def _parts(positions: int, together: int) -> Iterator[slice]:
    """Cut positions into parts of one batch each, and of `POSITIONS` at most."""
    for batch in range(0, positions, together):
        end = min(batch + together, positions)
        for at in range(batch, end, POSITIONS):
            yield slice(at, min(at + POSITIONS, end))


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
