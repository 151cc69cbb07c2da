"""TEAL's block-wise greedy allocation (arXiv 2408.14690, section 4.3, algorithm 1), over sites.

Every block gets the same target. Within it, sparsity is handed out in small steps, each weighted by parameters and
given to the site where it hurts the block's output least. TEAL weights k and v of every model as an eighth of q;
here weights are the real parameter counts, and q, k, v (gate, up) share one site as SpQt runs them.

How far a sparse model's predictions are from the dense model's, with gradients, in little memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from sparsepack.calibrate import histogram
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.sequential import Chooser, score, second_half
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.uniform import rules_of_criterion
from sparsepack.models.activations import soft_capped
from sparsepack.models.family import Family
from sparsepack.models.hf_config import multipliers
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.halves import Change, changed_pass, dense_pass, trained_pass
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.sites import SiteKey, SiteRule
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.workers.exchange import Each

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
    half, head, cap = ids.shape[1] // 2, model.get_output_embeddings(), multipliers(model.config).logit_cap
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
    found = mean_divergence(
        model.get_output_embeddings(), teacher.dense(ids), states, multipliers(model.config).logit_cap
    )
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


STEP = 0.025
"""One greedy step makes this share of the block's weights sparse."""
_WINDOWS, _TOKENS = 2, 512
HIGHEST = 0.95
"""A site has at most this sparsity, unless the target itself is higher."""


def greedy_sparsities(
    stream: BlockStream,
    layer: int,
    hidden: torch.Tensor,
    weights: Mapping[SiteKey, float],
    sparsity: float,
    base: Mapping[str, SiteRule],
    each: Each,
) -> dict[str, float]:
    """Sparsity of each site of the loaded block, `sparsity` on average by parameters.

    hidden  -- [N, S, H], what enters the block (upstream sparse)
    weights -- shares of the parameters, of the sites that may be sparse
    base    -- channel weights of the criterion, by site
    each    -- tries the steps
    """
    sites = [site for site in base if (layer, site) in weights]
    total = sum(weights[layer, site] for site in sites)
    highest = max(HIGHEST, sparsity)
    reference = run_at(stream, layer, hidden, dict.fromkeys(base, 0.0), base)
    given = dict.fromkeys(base, 0.0)
    spent = 0.0
    while spent < sparsity - 1e-9:
        step = min(STEP, sparsity - spent)
        trials = [
            (site, {**given, site: min(given[site] + step * total / weights[layer, site], highest)})
            for site in sites
            if given[site] < highest
        ]

        def error(trial: tuple[str, dict[str, float]]) -> float:
            return float(second_half(run_at(stream, layer, hidden, trial[1], base) - reference).norm())

        errors = each(trials, error)
        _, _, given = min((lost, *trial) for lost, trial in zip(errors, trials, strict=True))
        spent = sum(given[site] * weights[layer, site] for site in sites) / total
    return given


def run_at(
    stream: BlockStream,
    layer: int,
    hidden: torch.Tensor,
    sparsities: Mapping[str, float],
    base: Mapping[str, SiteRule],
) -> torch.Tensor:
    """The loaded block's output [N, S, H] with thresholds taken from this very input, upstream sites sparse."""

    def function(_: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        if sparsities[site] == 0:
            return None
        scores = score(second_half(x), base[site])
        threshold = histogram.quantile(histogram.count(scores).cpu(), sparsities[site])
        sparse = torch.where(scores > threshold, second_half(x), 0)
        return torch.cat([x[:, : x.shape[1] // 2], sparse], 1)

    with site_hooks([(layer, stream.block)], stream.source.family, function):
        return stream(hidden)


def chooser(
    calibration: Calibration,
    options: AllocationOptions,
    weights: Mapping[SiteKey, float],
    each: Each,
    carried: dict[str, torch.Tensor],
) -> Chooser:
    """Block after block, the greedy allocation of the sites in `weights`. Hidden states of a few short windows are
    carried along."""
    ids = spread_windows(calibration.windows, _WINDOWS)[:, :_TOKENS]

    def choose(layer: int, stream: BlockStream) -> dict[str, SiteRule]:
        base = rules_of_criterion(stream, layer, options.criterion)
        hidden = carried["hidden"] if "hidden" in carried else stream.embed(ids)
        given = dict.fromkeys(base, 0.0)
        if any((layer, site) in weights for site in base):
            given = greedy_sparsities(stream, layer, hidden, weights, options.sparsity, base, each)
        upstream = given if options.upstream == "sparse" else dict.fromkeys(base, 0.0)
        carried["hidden"] = run_at(stream, layer, hidden, upstream, base)
        return {site: replace(base[site], sparsity=given[site]) for site in base}

    return choose
