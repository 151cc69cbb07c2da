"""The operations of Double Sparsity in plain torch, and the cache that they make: the oracle (4.2, algorithm 1).

    label_append     heavy channels of new keys   -> the label cache
    label_scores     queries x labels             -> a score for each token and KV head
    select_tokens    scores, budget               -> which tokens are read
    attend_selected  queries, keys, values, these -> the output

The query heads that share a KV head read the same tokens: those that their mean query ranks best, as calibration takes
the mean of a group. Scores have the bits of every other backend's: an integer times a scale, rounded to bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.formats.blocks.labels import encode_labels, label_numbers, quantise_queries
from sparsepack.models.activations import soft_capped
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.attention import DenseKvCache, visible, with_sinks

QUERIES_AT_ONCE = 256
"""This many queries attend in one call: each has a score for every token."""


def heavy(x: Tensor, channels: Tensor) -> Tensor:
    """The heavy channels of x [kv_heads, ..., D]: [kv_heads, ..., r]. channels: int64 [kv_heads, r]."""
    at = channels.view(len(channels), *[1] * (x.dim() - 2), -1)
    return x.gather(-1, at.expand(*x.shape[:-1], -1))


def label_queries(queries: Tensor, channels: Tensor) -> Tensor:
    """What labels are multiplied with: the mean query of each group, its heavy channels in 8 bits.

    queries -- float32 [heads, S, D]

    Returns int8 [kv_heads, S, R].
    """
    grouped = queries.view(len(channels), -1, *queries.shape[1:])
    total = grouped[:, 0].clone()
    for head in grouped.unbind(1)[1:]:  # in order, as kernels add; the mean of a group is its sum by another scale
        total += head
    return quantise_queries(heavy(total, channels))


def label_scores(queries: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """How tokens rank, by their labels.

    queries       -- int8 [kv_heads, S, R], from `label_queries`
    codes, scales -- uint8 [kv_heads, T, R / 2] and float16 [kv_heads, T], from `encode_labels`

    Returns bfloat16 [kv_heads, S, T]. Sums are integers that float32 holds exactly.
    """
    sums = torch.matmul(queries.float(), label_numbers(codes).float().transpose(1, 2))
    return (sums * scales.float()[:, None]).bfloat16()


def select_tokens(scores: Tensor, first: int, policy: TokenPolicy, window: int = 0, oldest: int = 0) -> Tensor:
    """Which tokens each position reads: the policy's sinks and recent ones, and those that score best, the earlier ones
    of equal score first; exactly `policy.budget` of those that it sees.

    scores -- bfloat16 [kv_heads, S, T] of positions first .. first + S - 1 and tokens oldest .. first + S - 1
    window -- tokens that a position sees at most, its own included; 0: all
    oldest -- the first token that is there: 0, or where a cache forgets what no window reaches, a later one

    Returns bool [kv_heads, S, T].
    """
    length = scores.shape[1]
    seen = visible(first, length, oldest, window, scores.device)
    counts = seen.sum(-1)
    budgets = torch.tensor([policy.budget(n) for n in counts.tolist()], device=scores.device)
    token = torch.arange(oldest, first + length, device=scores.device)
    position = torch.arange(first, first + length, device=scores.device)[:, None]
    always = seen & ((token < policy.sinks) | (token > position - policy.recent))
    ranks = scores.float().masked_fill(~seen, -torch.inf).masked_fill(always, torch.inf)
    most = int(budgets.max())
    best = ranks.topk(most, dim=-1).values
    lowest = best.gather(-1, (budgets - 1).expand(len(scores), -1)[..., None])  # that is read
    above = ranks > lowest
    ties = (ranks == lowest) & seen
    left = budgets[:, None] - above.sum(-1, keepdim=True)
    return above | ties & (ties.cumsum(-1) <= left)


def attend_selected(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    selected: Tensor,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the tokens that are read.

    queries      -- float32 [heads, S, D]
    keys, values -- float32 [kv_heads, T, D]
    selected     -- bool [kv_heads, S, T], at least one token for each position
    scale, cap, sinks -- of scores, as `reference.attention.attention` takes them

    Returns float32 [S, heads * D].
    """
    heads, length, head_dim = queries.shape
    grouped = queries.reshape(len(keys), -1, head_dim)  # [kv_heads, group * S, D]: keys are not copied for each head
    scores = soft_capped(torch.matmul(grouped, keys.transpose(1, 2)) * (scale or head_dim**-0.5), cap)
    scores = scores.view(len(keys), -1, *selected.shape[1:])  # [kv_heads, group, S, T]
    scores = scores.masked_fill(~selected[:, None], -torch.inf)
    weights = with_sinks(scores.flatten(0, 1), sinks).view_as(scores)
    attn_output = torch.matmul(weights.flatten(1, 2), values).view(heads, length, head_dim)
    return attn_output.transpose(0, 1).reshape(length, -1)


@dataclass(frozen=True)
class Labels:
    """The labels of cached keys.

    codes, scales -- of T tokens, as `encode_labels` gives them: [kv_heads, T, ..] and [kv_heads, T]
    channels      -- int64 [kv_heads, r]: the heavy channels that are labelled
    """

    codes: Tensor
    scales: Tensor
    channels: Tensor


def attend_sparse(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    labels: Labels,
    policy: TokenPolicy,
    first: int,
    window: int = 0,
    oldest: int = 0,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """What decoded positions make of the tokens that their labels rank best: the three operations, for some queries at
    a time.

    queries       -- float32 [heads, S, D], of positions first .. first + S - 1
    keys, values  -- [kv_heads, T, D], any floating type, of tokens oldest .. first + S - 1
    labels        -- of these keys
    window        -- as for `select_tokens`
    scale, cap, sinks -- as for `attend_selected`

    Returns float32 [S, heads * D].
    """
    outputs = []
    for part in torch.split(queries, QUERIES_AT_ONCE, dim=1):
        last = first + part.shape[1]
        codes, scales, seen_keys, seen_values = (
            of[:, : last - oldest] for of in (labels.codes, labels.scales, keys, values)
        )
        scores = label_scores(label_queries(part, labels.channels), codes, scales)
        selected = select_tokens(scores, first, policy, window, oldest)
        outputs.append(attend_selected(part, seen_keys.float(), seen_values.float(), selected, scale, cap, sinks))
        first = last
    return torch.cat(outputs)


class DoubleSparsityKvCache(DenseKvCache):
    """See `runtime.kv_cache.KvCache`. Decoded positions read the tokens that the shape's policy allows, prefilled ones
    every token; both label their keys.

    Layout of labels, per layer: codes uint8 [sequences, kv_heads, context, R / 2], scales float16 [sequences, kv_heads,
    context]; layers without heavy channels have none and stay dense.
    """

    def __init__(self, shape: AttentionShape, type: str, device: torch.device | str) -> None:
        super().__init__(shape, type, device)
        self._labels = [self._empty(layer, device) for layer in shape.layers]

    def append(self, layer: int, qkv: Tensor, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        labels, channels = self._labels[layer], self._shape.layers[layer].channels
        if labels is not None and channels is not None:
            new = slice(self._lengths[sequence], self._lengths[sequence] + len(qkv))
            for kept, found in zip(
                labels, encode_labels(heavy(self._keys[layer][sequence, :, new], channels)), strict=True
            ):
                kept[sequence, :, new] = found
        return queries

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        labels, channels, policy = self._labels[layer], self._shape.layers[layer].channels, self._shape.policy
        if not sparse or labels is None or channels is None or policy is None:
            return super().attend(layer, queries, sequence)
        first, of_layer = self._lengths[sequence], self._shape.layers[layer]
        here = slice(first + queries.shape[1])
        keys, values = (of[layer][sequence, :, here] for of in (self._keys, self._values))
        codes, scales = (of[sequence, :, here] for of in labels)
        labelled, (scale, cap) = Labels(codes, scales, channels), (self._shape.scale, self._shape.cap)
        window, sinks = of_layer.window, of_layer.sinks
        return attend_sparse(queries, keys, values, labelled, policy, first, window, scale=scale, cap=cap, sinks=sinks)

    def copy(self, source: int, to: int, length: int) -> None:
        super().copy(source, to, length)
        for kept in (kept for labels in self._labels if labels is not None for kept in labels):
            kept[to, :, :length] = kept[source, :, :length]

    def _empty(self, layer: LayerAttention, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
        if layer.channels is None:
            return None
        shape = self._shape
        none = torch.zeros(shape.kv_heads, 0, layer.channels.shape[1], device=device)
        codes, scales = encode_labels(none)
        extent = (shape.sequences, shape.kv_heads, shape.context)
        return codes.new_zeros(*extent, codes.shape[-1]), scales.new_zeros(extent)
