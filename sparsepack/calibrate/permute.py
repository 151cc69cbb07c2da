"""Orders of inputs in which a pattern loses less, of inputs whose order is nobody else's business.

Two kinds of inputs are made within a block and used there alone: the neurons of the MLP, between the rows of gate and
up and the columns of down; and the channels of a value head, between the rows of v and the columns of o. Either matrix
taken in the same new order, the block computes what it did. All query heads that share a value head share its order.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsepack.models.family import Family
from sparsepack.models.pattern import Pattern, grouped

SAMPLED_ROWS = 1024
"""Orders are compared on this many rows of a matrix."""
ROUNDS = 300
"""The largest number of rounds of swaps. Every group meets another group in each of them."""
PATIENCE = 8
"""After this many rounds without a swap no more are tried."""
AT_ONCE = 1 << 24
"""A temporary holds this many values."""


def better_order(values: Tensor, pattern: Pattern, seed: int = 0) -> Tensor | None:
    """An order of the columns in which `pattern` loses less of the values; None where none was found.

    values: at least 0, float32 [rows, columns]. Returns int64 [columns]: which column comes where.

    Columns are dealt out by their sums, so that each group gets weak ones to lose; then groups meet at random, and two
    columns change places where that helps most. The same order every time.
    """
    columns = values.shape[1]
    sample = values[:: -(-len(values) // SAMPLED_ROWS)]
    order = _swapped(_dealt(sample.sum(0), pattern), sample, pattern, torch.Generator().manual_seed(seed))
    return order if lost(values[:, order], pattern) < lost(values, pattern) and columns > pattern.of else None


def lost(values: Tensor, pattern: Pattern) -> float:
    """What a pattern loses of values [rows, columns] where each group keeps its largest."""
    groups = grouped(values, pattern)
    return float(groups.topk(pattern.of - pattern.keep, dim=-1, largest=False).values.sum(dtype=torch.float64))


def _dealt(sums: Tensor, pattern: Pattern) -> Tensor:
    """Columns by their sums, dealt out to the groups one after the other: int64 [columns]."""
    columns = len(sums)
    positions = torch.arange(columns, device=sums.device)
    by_position_in_group = (positions % pattern.of * pattern.groups(columns) + positions // pattern.of).argsort()
    order = torch.empty_like(positions)
    order[by_position_in_group] = sums.argsort(descending=True)
    return order


def _swapped(order: Tensor, values: Tensor, pattern: Pattern, generator: torch.Generator) -> Tensor:
    columns, count = len(order), pattern.groups(len(order))
    # Behind a shorter last group come columns of zeros, which stay there.
    by_column = torch.cat([values.t(), values.new_zeros(count * pattern.of - columns, len(values))])
    order = torch.cat([order, torch.arange(columns, len(by_column), device=order.device)])
    groups = order.view(count, pattern.of).clone()
    pairs = max(AT_ONCE // (pattern.of**2 * len(values)), 1)
    without = 0
    for _ in range(ROUNDS if count > 1 else 0):
        met = torch.randperm(count, generator=generator)[: count // 2 * 2].view(2, -1).to(order.device)
        found = [_swap(groups, by_column, part, pattern, columns) for part in torch.split(met, pairs, dim=1)]
        without = 0 if any(found) else without + 1
        if without == PATIENCE:
            break
    return groups.flatten()[:columns]


def _swap(groups: Tensor, by_column: Tensor, met: Tensor, pattern: Pattern, columns: int) -> bool:
    """Let the groups that meet swap the two columns whose swap helps most, in place; whether any did.

    groups: int64 [groups, of], columns by group; met: [2, pairs].
    """
    one, other = (_Group(by_column[groups[side]], pattern) for side in met)
    gain = one.lost[:, None, None] + other.lost[:, None, None] - one.with_one_of(other) - other.with_one_of(one).mT
    fixed = groups[met] >= columns
    gain.masked_fill_(fixed[0][:, :, None] | fixed[1][:, None, :], 0)
    best, which = gain.flatten(1).max(1)
    helps = best > 1e-6 * (one.lost + other.lost)
    pair = helps.nonzero().flatten()
    here, there = which[pair] // pattern.of, which[pair] % pattern.of
    first, second = (met[0][pair], here), (met[1][pair], there)
    groups[first], groups[second] = groups[second], groups[first].clone()
    return bool(len(pair))


class _Group:
    """Groups of columns, and what they lose with one of them replaced. values: [groups, of, rows]."""

    def __init__(self, values: Tensor, pattern: Pattern) -> None:
        drop = pattern.of - pattern.keep
        smallest = values.topk(drop + 1, dim=1, largest=False, sorted=True).values
        sums, last, next_one = smallest[:, :drop].sum(1), smallest[:, drop - 1, None], smallest[:, drop, None]
        among = values <= last  # the smallest ones, which are lost
        self.values, self.lost = values, sums.sum(-1)
        # Without column i: what the `drop` - 1 smallest amount to, and the one after them.
        self._others = (sums[:, None] - torch.where(among, values, last)).sum(-1)
        self._limit = torch.where(among, next_one, last)

    def with_one_of(self, other: "_Group") -> Tensor:
        """What is lost with column j of another group in place of column i: [groups, i, j]."""
        replaced = torch.minimum(self._limit[:, :, None], other.values[:, None]).sum(-1)
        return self._others[:, :, None] + replaced


def permuted_block(
    tensors: Mapping[str, Tensor], family: Family, neurons: Tensor | None, channels: Tensor | None, heads: int
) -> dict[str, Tensor]:
    """A block's tensors with its neurons and value channels in another order; it computes the same.

    tensors  -- by their names within the block
    neurons  -- int64 [intermediate]: which one comes where
    channels -- int64 [kv_heads, head_dim], likewise within each value head
    heads    -- query heads
    """
    moved = dict(tensors)
    if neurons is not None:
        for name in family.projections["mlp_in"]:
            fused = len(moved[f"{name}.weight"]) // len(neurons)  # gate and up in one matrix, or one of them
            _take(moved, name, torch.cat([neurons + part * len(neurons) for part in range(fused)]), rows=True)
        for name in family.projections["mlp_mid"]:
            _take(moved, name, neurons, rows=False)
        if (norm := family.norms.get("mlp_sub_norm")) is not None:
            _take(moved, norm, neurons, rows=True)
    if channels is not None:
        kv_heads, width = channels.shape
        first = torch.arange(kv_heads, device=channels.device)[:, None] * width
        name, values = family.projections["attn_in"][-1], (first + channels).flatten()
        before = len(moved[f"{name}.weight"]) - len(values)  # rows of q and k, where one matrix has all
        ahead = torch.arange(before, device=channels.device)
        _take(moved, name, torch.cat([ahead, before + values]), rows=True)
        for name in family.projections["attn_out"]:
            _take(moved, name, of_query_heads(channels, heads), rows=False)
        if (norm := family.norms.get("attn_sub_norm")) is not None:
            _take(moved, norm, of_query_heads(channels, heads), rows=True)
    return moved


def of_query_heads(channels: Tensor, heads: int) -> Tensor:
    """Orders within value heads [kv_heads, head_dim] as one of o's inputs: int64 [heads * head_dim]."""
    spread = channels.repeat_interleave(heads // len(channels), dim=0)
    return (torch.arange(heads, device=channels.device)[:, None] * channels.shape[1] + spread).flatten()


def _take(tensors: dict[str, Tensor], projection: str, order: Tensor, rows: bool) -> None:
    weight = tensors[f"{projection}.weight"]
    tensors[f"{projection}.weight"] = weight[order] if rows else weight[:, order]
    if rows and f"{projection}.bias" in tensors:
        tensors[f"{projection}.bias"] = tensors[f"{projection}.bias"][order]
