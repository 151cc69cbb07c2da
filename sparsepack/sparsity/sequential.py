"""Take thresholds block by block, site by site, with everything upstream already sparse.

Each block is run once per site: the sites before it sparse, the score at this site counted, the run cut short there.
Only the second half of every window is sparse and counted, its first half is dense context: what decoding after a
dense prefill sees (design, protocol `decode`). After each block its rows and the hidden states are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from sparsepack.calibrate.collectors import histogram
from sparsepack.files.resume import Unfinished
from sparsepack.models.blocks import BlockStream
from sparsepack.models.families import SITES
from sparsepack.models.hooks import SiteFunction, site_hooks
from sparsepack.models.rule import SitePolicy, sparsify
from sparsepack.progress import progress
from sparsepack.sparsity.allocation import SiteChoice, SiteKey
from sparsepack.sparsity.thresholds import SiteThreshold

Chooser = Callable[[int, BlockStream], Mapping[str, SiteChoice]]
"""(layer, stream with that block loaded) -> what each site of the block gets; called in order of execution.

A run that goes on calls it for the blocks that are not finished.
"""

_VECTORS = ("channel_weights", "offset")


def sequential_thresholds(
    stream: BlockStream, windows: torch.Tensor, choose: Chooser, batch: int, unfinished: Unfinished
) -> list[SiteThreshold]:
    """Thresholds of all sites so that each realises its choice's sparsity on `windows` [N, S]."""
    layers, batches = stream.checkpoint.layers, -(-len(windows) // batch)
    rows, hidden = finished_rows(unfinished), unfinished.hidden()
    if hidden is None:
        hidden = stream.embed(windows)
    done = len(rows) // len(SITES)
    with progress("thresholds", layers * batches, done * batches) as advance:
        for layer in range(done, layers):
            stream.load(layer)
            found = _block_thresholds(stream, layer, hidden, choose(layer, stream), batch)
            rows += found
            policies = {(row.layer, row.site): row.policy() for row in found}
            outputs = []
            with sparse_second_half(stream, layer, policies):
                for part in torch.split(hidden, batch):
                    outputs.append(stream(part).cpu())
                    advance()
            hidden = torch.cat(outputs)
            unfinished.save_block(layer, row_tensors(found), hidden)
    return rows


def row_tensors(rows: Sequence[SiteThreshold]) -> dict[str, torch.Tensor]:
    """A block's rows as an unfinished run keeps them: numbers in float64, vectors where a row has them."""
    tensors = {}
    for row in rows:
        numbers = (row.sparsity, row.threshold, row.realised)
        tensors[f"{row.site}.numbers"] = torch.tensor(numbers, dtype=torch.float64)
        for name in _VECTORS:
            vector = getattr(row, name)
            if vector is not None:
                tensors[f"{row.site}.{name}"] = vector
    return tensors


def finished_rows(unfinished: Unfinished) -> list[SiteThreshold]:
    """The rows of all finished blocks, one for each site."""
    rows = []
    for layer, tensors in enumerate(unfinished.blocks()):
        for site in SITES:
            sparsity, threshold, realised = tensors[f"{site}.numbers"].tolist()
            vectors = (tensors.get(f"{site}.{name}") for name in _VECTORS)
            rows.append(SiteThreshold(layer, site, sparsity, threshold, realised, *vectors))
    return rows


def _block_thresholds(
    stream: BlockStream, layer: int, hidden: torch.Tensor, choices: Mapping[str, SiteChoice], batch: int
) -> list[SiteThreshold]:
    rows: list[SiteThreshold] = []
    for site in SITES:
        choice = choices[site]
        if choice.sparsity == 0:
            rows.append(SiteThreshold(layer, site, 0.0, 0.0, 0.0))
            continue
        policies = {(row.layer, row.site): row.policy() for row in rows}
        counts = _score_counts(stream, (layer, site), torch.split(hidden, batch), choice, policies)
        threshold = histogram.quantile(counts, choice.sparsity)
        realised = histogram.share_at_most(counts, threshold)
        vectors = (choice.channel_weights, choice.offset)
        rows.append(SiteThreshold(layer, site, choice.sparsity, threshold, realised, *vectors))
    return rows


def _score_counts(
    stream: BlockStream,
    key: SiteKey,
    batches: Sequence[torch.Tensor],
    choice: SiteChoice,
    policies: Mapping[SiteKey, SitePolicy | None],
) -> torch.Tensor:
    """Histogram of the score at one site of the loaded block, the sites before it sparse by `policies`."""
    layer, site = key
    counts = torch.zeros(histogram.BINS, dtype=torch.int64)

    def observe(_: int, at: str, x: torch.Tensor) -> torch.Tensor:
        if at != site:
            return halved(x, policies.get((layer, at)))
        counts.add_(histogram.count(score(second_half(x), choice)).cpu())
        raise _Reached

    with site_hooks([(layer, stream.block)], stream.checkpoint.family, observe):
        for part in batches:
            with suppress(_Reached):
                stream(part)
    return counts


def score(x: torch.Tensor, choice: SiteChoice) -> torch.Tensor:
    """|x_j - offset_j| * c_j in float32: [..., columns]."""
    shifted = x.float() if choice.offset is None else x.float() - choice.offset.to(x.device)
    return shifted.abs() if choice.channel_weights is None else shifted.abs() * choice.channel_weights.to(x.device)


def second_half(x: torch.Tensor) -> torch.Tensor:
    """The positions that run sparse: x [B, S, ...] -> [B, S - S // 2, ...]."""
    return x[:, x.shape[1] // 2 :]


def halved(x: torch.Tensor, policy: SitePolicy | None) -> torch.Tensor:
    """x [B, S, columns] with its second half sparsified."""
    if policy is None:
        return x
    return torch.cat([x[:, : x.shape[1] // 2], sparsify(second_half(x), policy.to(x.device))], 1)


@contextmanager
def sparse_second_half(
    stream: BlockStream, layer: int, policies: Mapping[SiteKey, SitePolicy | None]
) -> Iterator[None]:
    """Within the context the loaded block runs the second half of every window by `policies`."""
    function: SiteFunction = lambda at, site, x: halved(x, policies.get((at, site)))  # noqa: E731
    with site_hooks([(layer, stream.block)], stream.checkpoint.family, function):
        yield


class _Reached(Exception):
    """Cuts a forward pass short at the site that was asked for."""
