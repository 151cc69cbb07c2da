"""What the one pass over text collects: a row of `COLLECTORS` each.

SCORES     histograms of the score |x_j| * c_j over tokens and channels, for every criterion: thresholds come from them
MOMENTS    sums of x_j**2 over tokens
ATTENTION  sums over tokens of |q|, q**2, |k| and k**2, after rotary embedding and q/k norms, and over pairs of
           |q_c k_c|, for Double Sparsity's heavy channels (4.1)
MISSED     what attention misses that reads the best of the tokens alone: the share of its weight that the others have
NEURONS    how many tokens each neuron of the MLP is active for: which neurons are worth a slot near the processor
EXPERTS    how many tokens each expert was given by the router: whether a text has reached them all
RESIDUAL   sums over tokens of x x^T, with x = h / rms(h), which is what a norm makes of the residual stream h before
           its weights: a basis of the stream is found from them (`pca`)
OUTPUTS    sums over tokens, and over the query heads that share a KV head, of y y^T, with y what a head gives before o:
           a basis of the values is found from them (`pca`)

Pairs: a score is a sum over channels, q_i . k_j = sum_c q_ic k_jc, and a heavy channel is one whose terms are large.
Counted are the pairs that attention compares: j is i or before it, within the sliding window of a layer that has one.
Not only the pairs j = i, as in the paper's code: a token's score of itself is the one that nobody needs. For each i the
sum over j is |q_ic| times a running sum of |k_jc|, so the pairs are never formed. The query heads that share a KV head
are combined by `GROUPS`.

Missed: layers whose attention is spread over all tokens must stay dense (4.1, 4.2). Measured are the exact best tokens,
those that labels only estimate: one list for each KV head, by the mean query of its group, as decoding selects them.
The first positions are among the tokens that are read or missed. Some positions of each window are enough, evenly
spaced in its second half: it costs a few of the window's rows of scores, where attention itself has all of them.

Neurons: one is active for a token where the activation and the gate leave something to multiply its down column with:
what enters the last matrix of the MLP is not zero there. For ReLU and its kin that is a part of the neurons; SiLU and
GELU leave nearly nothing exactly zero, and their counts say so.

Residual: the sum is over both norms of a block. So many numbers are not kept for each block of a large model:
consecutive blocks share a sum, in as many runs of blocks as `MOST_BYTES` hold, and the last block of a run has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.calibrate import histogram
from sparsepack.calibrate.collector import Collector, SiteInput, kernels_on, parts_on, wide_product
from sparsepack.models.family import SITES


def _count_scores(site: SiteInput) -> tuple[Tensor, ...]:
    return site.counted.scores.unbind()


SCORES = Collector(
    "site", ("histogram.magnitude", "histogram.column-norm"), torch.int64, (histogram.BINS,), _count_scores
)
"""Each histogram is int64 [histogram.BINS]; the names end in those of the criteria."""


def _count_moments(site: SiteInput) -> tuple[Tensor, ...]:
    return (site.counted.squares,)


MOMENTS = Collector("site", ("second_moment",), torch.float64, (0,), _count_moments)
"""The second moments are float64 [columns]."""


_PIECE = 64

GROUPS = "mean"
"""A KV head has the mean of what is known of the query heads that share the KV head."""


def of_groups(queries: Tensor, kv_heads: int, dim: int = 0) -> Tensor:
    """The mean over the query heads of each group: dimension `dim`, heads long, becomes kv_heads long.

    Query head h belongs to KV head h // (heads / kv_heads).
    """
    return torch.unflatten(queries, dim, (kv_heads, -1)).mean(dim + 1)


def product_sums(query: Tensor, key: Tensor, window: int) -> Tensor:
    """The sums of products of queries [B, heads, S, D] and keys [B, kv_heads, S, D], on any device: float64
    [kv_heads, D].

    window -- how many tokens a query sees at most, itself included; 0: all before it
    """
    asked = of_groups(query.float().abs(), key.shape[1], dim=1)  # [B, kv_heads, S, D]
    up_to = _running(key.float().abs())
    if 0 < window < key.shape[2]:
        up_to = torch.cat([up_to[:, :, :window], up_to[:, :, window:] - up_to[:, :, :-window]], 2)
    return up_to.mul_(asked).sum((0, 2))


def _running(amounts: Tensor) -> Tensor:
    """Sums over the tokens up to each, itself included: [B, heads, S, D] -> float64 of that shape.

    Pieces of a window are summed by themselves, then one after the other: a GPU takes each step of a sum for a channel
    by itself.
    """
    length = amounts.shape[2]
    pieces = torch.unflatten(nn.functional.pad(amounts, (0, 0, 0, -length % _PIECE)), 2, (-1, _PIECE))
    within = pieces.cumsum(3, dtype=torch.float64)
    before = nn.functional.pad(within[:, :, :-1, -1].cumsum(2), (0, 0, 1, 0))
    running: Tensor = (within + before[:, :, :, None]).flatten(2, 3)[:, :, :length]
    return running


_FARTHEST = 2**31 - 1
"""Kernels take distances between values in 32 bits."""


def _count_attention(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    too_far = max(*query.stride(), *key.stride()) > _FARTHEST
    if too_far or not kernels_on(query.device):
        return (*sums_by_torch(query, key), product_sums(query, key, window))
    from sparsepack.runtime.cuda.calibration import sum_heads

    *sums, products = sum_heads(query, key)
    return (*sums, product_sums(query, key, window) if 0 < window < key.shape[2] else products)


def sums_by_torch(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """The sums over tokens, on any device: float64 [heads, D], twice, and [kv_heads, D], twice."""
    amounts = (amount for value in (query.float(), key.float()) for amount in (value.abs(), value.square()))
    return tuple(amount.sum((0, 2), dtype=torch.float64) for amount in amounts)


ATTENTION = Collector(
    "attention",
    ("query_abs", "query_square", "key_abs", "key_square", "product_abs"),
    torch.float64,
    (0, 0),
    _count_attention,
)
"""The sums are float64, [heads, D] for the query, and [kv_heads, D] for the key and for pairs."""


SHARES = (4, 8, 16, 32)
"""The figures are for reading the best 1/4 of the tokens that a position sees, rounded up, 1/8, and so on."""

POSITIONS = 32
"""A window is measured at this many positions, if its second half has so many."""


def _count_missed(query: Tensor, key: Tensor, window: int) -> tuple[Tensor, ...]:
    at = _positions(query.shape[2], query.device)
    token = torch.arange(key.shape[2], device=query.device)
    seen = (token <= at[:, None]) & (token > at[:, None] - (window or len(token)))
    counts = seen.sum(1)
    last_read = torch.stack([-(-counts // share) for share in SHARES], 1) - 1  # [P, shares]
    groups = torch.unflatten(query[:, :, at], 1, (key.shape[1], -1)).flatten(0, 1)  # [B * kv_heads, group, P, D]
    missed = _missed(groups, key.flatten(0, 1), seen, last_read)
    positions = torch.full((len(SHARES),), len(query) * len(at), dtype=torch.float64, device=query.device)
    return missed / key.shape[1], positions


def _positions(length: int, device: torch.device) -> Tensor:
    """Which positions of a window are looked at: int64 [P]."""
    first = length // 2
    return torch.linspace(first, length - 1, min(POSITIONS, length - first), device=device).round().long()


def _missed(groups: Tensor, keys: Tensor, seen: Tensor, last_read: Tensor) -> Tensor:
    """For queries [N, group, P, D] and keys [N, S, D] of N KV heads: the weight that each share misses, mean over the
    group, summed over heads and positions: float64 [shares].

    seen -- bool [P, S]; last_read -- int64 [P, shares], the rank of the last token that is read
    """
    products = wide_product(groups.flatten(1, 2), keys.mT) * keys.shape[2] ** -0.5
    scores = torch.unflatten(products, 1, groups.shape[1:3]).masked_fill_(~seen, -torch.inf)  # [N, group, P, S]
    # The mean of the scores is the score of the mean query.
    best_first = scores.mean(1).argsort(-1, descending=True)
    weights = scores.softmax(-1).mean(1)
    found = weights.gather(-1, best_first).cumsum(-1, dtype=torch.float64)
    missed = 1 - found.gather(-1, last_read.expand(len(found), -1, -1))
    return missed.clamp(0, 1).sum((0, 1))


MISSED = Collector("window", ("missed", "missed_positions"), torch.float64, (len(SHARES),), _count_missed)
"""The sums are float64 [shares]: of the attention weight that is missed, over positions, and of the number of
positions."""


def _count_neurons(site: SiteInput) -> tuple[Tensor, ...]:
    counted = site.counted
    assert counted.active is not None
    assert counted.each is not None
    tokens = torch.full((1,), site.tokens, device=site.x.device)
    return counted.active, tokens, counted.each.long().square().sum()[None]


NEURONS = Collector("neurons", ("active", "tokens", "squares"), torch.int64, (0,), _count_neurons)
"""The counts are int64: [intermediate], the tokens for which each neuron was active; [1], the tokens counted; [1], the
sum over tokens of the square of how many neurons were active."""


def _count_experts(chosen: Tensor, experts: int) -> tuple[Tensor, ...]:
    used = chosen.shape[-1]
    flat = chosen.flatten()  # bincount would wait for a GPU
    given = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return given, torch.full((1,), chosen.numel() // used, device=chosen.device)


EXPERTS = Collector("experts", ("given", "routed_tokens"), torch.int64, (0,), _count_experts)
"""The counts are int64: [experts], the tokens that each expert was given; [1], the tokens counted."""


MOST_BYTES = 1 << 30
"""The sums of a whole model take at most this many bytes, unless a single one takes more."""

_BLOCKS, _LEAST = 4, 2048
"""A product is made in so many blocks of rows, on a GPU each of so many at least: less does not fill it."""


def run_count(layers: int, hidden: int) -> int:
    """How many runs of blocks have a sum of their own."""
    return max(1, min(layers, MOST_BYTES // (8 * hidden**2)))


def ends_run(layer: int, layers: int, runs: int) -> bool:
    """Whether a block is the last of its run; runs differ by one block at most."""
    return (layer + 1) * runs // layers != layer * runs // layers


def _count_residual(stream: Tensor, eps: float) -> tuple[Tensor, ...]:
    if stream.device.type == "cuda" and stream.dtype.itemsize == 2:
        x = _normed(stream, eps).flatten(0, -2)
    else:
        h = stream.flatten(0, -2).float()
        x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    product = _gram(x)
    return (product.cpu() if product.device.type == "mps" else product,)


def _normed(stream: Tensor, eps: float) -> Tensor:
    """A GPU's stream [B, S, hidden] over its root mean square, rounded as the model's norms round it."""
    parts = parts_on(stream.device)
    made = None if parts is None else parts.norm_rows(stream, eps, None)
    return nn.functional.rms_norm(stream, stream.shape[-1:], eps=eps) if made is None else made


def _gram(x: Tensor) -> Tensor:
    """x^T x of [N, hidden], float32: the part on and above the diagonal of blocks, the rest being the same."""
    hidden = x.shape[1]
    blocks = max(1, min(_BLOCKS, hidden // _LEAST)) if x.is_cuda else _BLOCKS
    made, width = x.new_empty(hidden, hidden, dtype=torch.float32), -(-hidden // blocks)
    for first in range(0, hidden, width):
        rows = wide_product(x[:, first : first + width].t(), x[:, first:])
        made[first : first + width, first:] = rows
        made[first:, first : first + width] = rows.t()
    return made


RESIDUAL = Collector("residual", ("product",), torch.float64, (0, 0), _count_residual, signed=True, of_runs=True)
"""The sums are float64 [hidden, hidden]."""


def _count_outputs(outputs: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    windows = torch.unflatten(outputs, -1, (-1, head_dim))  # [B, S, heads, D]
    each = [wide_product(of.permute(1, 2, 0), of.transpose(0, 1)) for of in windows]  # [heads, D, D]
    product = torch.unflatten(torch.stack(each), 1, (kv_heads, -1)).sum((0, 2))
    return ((product.cpu() if product.device.type == "mps" else product).double(),)


OUTPUTS = Collector("outputs", ("output_product",), torch.float64, (0, 0, 0), _count_outputs, signed=True, later=True)
"""The sums are float64 [kv_heads, D, D]."""


COLLECTORS = (SCORES, MOMENTS, ATTENTION, MISSED, NEURONS, EXPERTS, RESIDUAL, OUTPUTS)

Statistics = dict[str, Tensor]
"""The statistics of one decoder block stand under PLACE.NAME: `mlp_in.second_moment`."""

PLACES = {
    "attention": "attention",
    "window": "attention",
    "neurons": "neurons",
    "experts": "experts",
    "residual": "residual",
    "outputs": "attention",
}
"""The PLACE of what is not counted at a site."""


def _rows(sites: Iterable[str]) -> dict[str, Collector]:
    """The row of each PLACE.NAME of a block with such sites."""
    return {
        f"{place}.{name}": row
        for row in COLLECTORS
        for place in (sites if row.at == "site" else (PLACES[row.at],))
        for name in row.names
    }


def _row(name: str) -> Collector:
    """The row of a PLACE.NAME; KeyError where there is none."""
    return _rows({name.partition(".")[0]} - {*PLACES.values()})[name]


def count(into: Statistics, at: str, place: str, *seen: Any) -> None:
    """Count what has come to a place of the kind `at`: see `Collector`."""
    for collector in COLLECTORS:
        if collector.at == at:
            for name, value in zip(collector.names, collector.count(*seen), strict=True):
                key = f"{place}.{name}"
                if key not in into:  # the first part then launches what every later one does, as one who records needs
                    into[key] = torch.zeros(value.shape, dtype=collector.dtype, device=value.device)
                into[key] = collector.add(into[key], value)


def add_to(into: Statistics, found: Mapping[str, Tensor]) -> None:
    """Add what was counted elsewhere, by PLACE.NAME. Nothing of it is kept: its tensors may be used again."""
    for name, value in found.items():
        into[name] = _row(name).add(into[name], value) if name in into else value.clone()


def added(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two runs as those of one run over both texts."""
    return {name: _row(name).add(value.clone(), other[name]) for name, value in one.items()}


def named(layer: int, statistics: Statistics) -> dict[str, Tensor]:
    """A block's statistics by the names that they have in a file."""
    return {f"layers.{layer}.{name}": value for name, value in statistics.items()}


def of_block(
    layer: int, tensors: Mapping[str, Tensor], attends: bool = True, sites: Sequence[str] | None = None
) -> Statistics:
    """The inverse of `named`, from a file that may hold other blocks too; KeyError where something is missing that
    every block has.

    attends -- whether the block has attention
    sites   -- of a block of a family without a row, which has these alone for certain; None: one with a row
    """
    all_rows = _rows(SITES if sites is None else sites)
    rows = {name: row for name, row in all_rows.items() if attends or PLACES.get(row.at) != "attention"}
    names = {name: f"layers.{layer}.{name}" for name in rows}
    if sites is not None:
        return {name: tensors[key] for name, key in names.items() if key in tensors or rows[name].at == "site"}
    other = (
        NEURONS if f"layers.{layer}.experts.{EXPERTS.names[0]}" in tensors else EXPERTS
    )  # an MLP is one or the other
    missable = {name for name, row in rows.items() if row.of_runs or row.later or row is other}
    return {name: tensors[key] for name, key in names.items() if key in tensors or name not in missable}


def check(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor from a file is what is collected by that PLACE.NAME."""
    row = _row(name)
    rank = len(row.shape)
    fits = value.dtype == row.dtype and value.ndim == rank
    fits = fits and all(size == wanted for size, wanted in zip(value.shape, row.shape, strict=True) if wanted)
    size = value.abs() if row.signed else value
    if not fits or not value.numel() or not bool(((size >= 0) & (size < float("inf"))).all()):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)} or holds what is no count")
