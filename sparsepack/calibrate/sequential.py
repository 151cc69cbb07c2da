"""Take thresholds block by block, site by site, with everything upstream already sparse.

Each block is run once per site: the sites before it sparse, the score at this site counted, the run cut short there.
Only the second half of every window is sparse and counted, its first half is dense context: what decoding after a
dense prefill sees (design, protocol `decode`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from sparsepack.calibrate import histogram
from sparsepack.calibrate.collector import SiteInput, kernels_on
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import SiteFunction, site_hooks
from sparsepack.models.sites import CURVE_SHARES, Rules, SiteKey, SiteRule, sparsify

Chooser = Callable[[int, BlockStream], Mapping[str, SiteRule]]
"""A chooser takes (layer, stream with that block loaded) and returns each site's rule, but for its threshold; choosers
are called in order of execution. A run that goes on calls the chooser for the blocks that are not finished."""


def rules_of_block(
    stream: BlockStream,
    layer: int,
    batches: Sequence[torch.Tensor],
    choices: Mapping[str, SiteRule],
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> dict[SiteKey, SiteRule]:
    """The rules of the loaded block's sites by what enters it, so that each realises its target sparsity.

    batches    -- [B, S, H] each, this worker's
    all_reduce -- adds the counts of all workers, whole numbers: all of them take the same thresholds
    """
    rules: dict[SiteKey, SiteRule] = {}
    for site, choice in choices.items():
        if choice.sparsity == 0:
            rules[layer, site] = SiteRule()
            continue
        counts = _score_counts(stream, (layer, site), batches, choice, rules)
        rules[layer, site] = at_quantile(choice, all_reduce(counts))
    return rules


def at_quantile(choice: SiteRule, counts: torch.Tensor) -> SiteRule:
    """The rule with the threshold at which scores counted so realise its target, and its curve for who edits that."""
    threshold = histogram.quantile(counts, choice.sparsity)
    curve = tuple(float(f"{histogram.quantile(counts, share):.5g}") for share in CURVE_SHARES)
    return replace(choice, threshold=threshold, realised=histogram.share_at_most(counts, threshold), curve=curve)


def _score_counts(
    stream: BlockStream,
    key: SiteKey,
    batches: Sequence[torch.Tensor],
    choice: SiteRule,
    rules: Rules,
) -> torch.Tensor:
    """Histogram of the score at one site of the loaded block, the sites before it sparse by `rules`."""
    counts = torch.zeros(histogram.BINS, dtype=torch.int64, device=stream.device)

    def count(x: torch.Tensor) -> None:
        counts.add_(score_counts(second_half(x), choice))

    inputs_of_site(stream, key, batches, rules, count)
    return counts.cpu()


def inputs_of_site(
    stream: BlockStream,
    key: SiteKey,
    batches: Sequence[torch.Tensor],
    rules: Rules,
    see: Callable[[torch.Tensor], None],
) -> None:
    """Show `see` the inputs [B, S, columns] of one site of the loaded block, batch by batch: the sites before it sparse
    by `rules`, its own inputs as they come."""
    layer, site = key

    def observe(_: int, at: str, x: torch.Tensor) -> torch.Tensor:
        if at != site:
            return sparsify_second_half(x, rules.get((layer, at)))
        see(x)
        raise _Reached

    with site_hooks([(layer, stream.block)], stream.source.family, observe):
        for part in batches:
            with suppress(_Reached):
                stream(part)


def score(x: torch.Tensor, choice: SiteRule) -> torch.Tensor:
    """|x_j - offset_j| * c_j in float32: [..., columns]."""
    shifted = x.float() if choice.offset is None else x.float() - choice.offset.to(x.device)
    return shifted.abs() if choice.channel_weights is None else shifted.abs() * choice.channel_weights.to(x.device)


def score_counts(x: torch.Tensor, choice: SiteRule) -> torch.Tensor:
    """The histogram of `score`, int64 [histogram.BINS], on the device of x."""
    weights = choice.channel_weights
    if choice.offset is None and kernels_on(x.device):
        norms = torch.ones(x.shape[-1], device=x.device) if weights is None else weights.to(x.device).float()
        return SiteInput(x, norms).counted.scores[0 if weights is None else 1]
    return histogram.count(score(x, choice))


def second_half(x: torch.Tensor) -> torch.Tensor:
    """The positions that run sparse: x [B, S, ...] -> [B, S - S // 2, ...]."""
    return x[:, x.shape[1] // 2 :]


def sparsify_second_half(x: torch.Tensor, rule: SiteRule | None) -> torch.Tensor:
    """x [B, S, columns] with its second half sparsified; levels leave out parts of weights, not of x."""
    if rule is None or rule.dense or rule.of_levels:
        return x
    return torch.cat([x[:, : x.shape[1] // 2], sparsify(second_half(x), rule.to(x.device))], 1)


@contextmanager
def sparse_second_half(stream: BlockStream, layer: int, rules: Rules) -> Iterator[None]:
    """Within the context the loaded block runs the second half of every window by `rules`."""
    function: SiteFunction = lambda at, site, x: sparsify_second_half(x, rules.get((at, site)))  # noqa: E731
    with site_hooks([(layer, stream.block)], stream.source.family, function):
        yield


class _Reached(Exception):
    """Cuts a forward pass short at the site that was asked for."""
