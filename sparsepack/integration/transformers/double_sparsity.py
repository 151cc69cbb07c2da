"""`attn_implementation="sparsepack_double"`: stock transformers models decode by Double Sparsity.

It is the path on which accuracy is measured, with the operations of the oracle and their bits: labels are made anew of
the cached keys in every call, so that nothing is kept between calls, and nothing is faster than dense attention.

A call with one query for each text is decoding and sparse. A call with several is a prompt and dense, unless
`sparse_rows` says from where on it is not. Texts of a batch may be padded, on either side.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from sparsepack.errors import UserError
from sparsepack.formats.blocks.labels import encode_labels
from sparsepack.models.families import FAMILIES, family_of
from sparsepack.models.hf_model.attention import dense_attention
from sparsepack.models.hf_model.model import backbone_of
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference.double_sparsity import QUERIES_AT_ONCE, Labels, attend_sparse, heavy

NAME = "sparsepack_double"
_LAYER = "sparsepack_double"
"""An attention module carries its `_Layer` under this attribute."""
_SPARSE_FROM: ContextVar[Tensor | None] = ContextVar("sparse_from", default=None)


@dataclass(frozen=True)
class _Layer:
    """Which tokens a layer reads; all where it has no channels."""

    policy: TokenPolicy
    channels: Tensor | None


@dataclass(frozen=True)
class _Text:
    """The places of the tokens of one text of a batch in a call.

    first   -- position of its first query; positions count the tokens of the text, without padding
    queries -- rows of queries that are the text's
    keys    -- columns of keys that are the text's; None: all up to the last query's
    oldest  -- position of the first of these keys
    """

    first: int
    queries: range
    keys: Tensor | None
    oldest: int = 0


def attach(model: Any, attention: SparseAttention) -> None:
    """Give a stock causal language model, or its backbone, sparse attention, and let it use it.

    `model.set_attn_implementation("sdpa")` makes it dense again. Raises `UserError` for a model of another kind, or
    whose layers or heads the channels do not fit.
    """
    config = model.config
    family_of(config.model_type, type(model).__name__)
    blocks = backbone_of(model).layers
    if len(attention.channels) != len(blocks):
        raise UserError(
            f"sparse attention of {len(attention.channels)} layers for a model of {len(blocks)}; expected one that was "
            "calibrated on this model"
        )
    for layer, block in enumerate(blocks):
        attach_layer(block, attention, layer)
    model.set_attn_implementation(NAME)


def attach_layer(block: Any, attention: SparseAttention, layer: int) -> None:
    """`attach` for decoder block `layer` alone, of a model that uses the implementation already."""
    module, channels = block.self_attn, attention.channels[layer]
    family = FAMILIES[module.config.model_type]
    kv_heads, head_dim = family.setting(module.config, "num_key_value_heads"), module.head_dim
    if channels is not None:
        fit = channels.dim() == 2 and len(channels) == kv_heads and 0 < channels.shape[1] <= head_dim
        if not fit or not 0 <= int(channels.min()) <= int(channels.max()) < head_dim:
            raise UserError(
                f"layer {layer}: heavy channels {list(channels.shape)} do not fit {kv_heads} KV heads of {head_dim} "
                "channels; expected those that were calibrated on this model"
            )
    setattr(module, _LAYER, _Layer(attention.policy, channels))


@contextmanager
def sparse_rows(sparse_from: Tensor) -> Iterator[None]:
    """Within the context, row b of a batch is sparse from its position sparse_from[b] on, int64 [B], and dense before:
    columns of the input of a call, padding included."""
    token = _SPARSE_FROM.set(sparse_from)
    try:
        yield
    finally:
        _SPARSE_FROM.reset(token)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls; see `AttentionInterface`.

    query          -- [B, heads, S, D], normed and rotated
    key, value     -- [B, kv_heads, T, D], those of the cache included
    attention_mask -- bool [B, 1, S, T] as `sdpa_mask` makes it; None: causal, or a single query sees all

    Returns [B, S, heads, D]; rows that are padding are zero or of no meaning. Raises `UserError` where the model has no
    sparse attention (`attach`), or the mask is not causal.
    """
    layer: _Layer | None = getattr(module, _LAYER, None)
    if layer is None:
        raise UserError(
            f"attn_implementation {NAME!r}: this model does not say which tokens it reads; load an artifact that was "
            "packed with --attention double, or call "
            "sparsepack.integration.transformers.double_sparsity.attach(model, ...)"
        )
    texts, _, length, head_dim = query.shape
    starts = _starts(texts, length)
    if layer.channels is None or min(starts) >= length:
        return dense_attention(module, query, key, value, attention_mask, scaling=scaling, **options)
    if max(starts) == 0:
        output = query.new_zeros(texts, length, *query.shape[1::2])
    else:
        output, _ = dense_attention(module, query, key, value, attention_mask, scaling=scaling, **options)
    # The oracle scales by 1 / sqrt(D), as every supported model does: then this factor is one.
    factor = 1.0 if scaling is None else scaling * head_dim**0.5
    alike = _alike(starts, attention_mask, options)
    for rows in [range(texts)] if alike else [range(row, row + 1) for row in range(texts)]:
        start = starts[rows.start]
        text = _text(rows.start, length, key.shape[2], attention_mask, options) if start < length else None
        if text is None or text.queries.stop <= start:
            continue
        sparse = slice(max(start, text.queries.start), text.queries.stop)
        first = text.first + sparse.start - text.queries.start
        keys = slice(text.first + len(text.queries)) if text.keys is None else text.keys
        for some in _slices(rows, sparse.stop - sparse.start):
            queries = query[some, :, sparse].float() * factor
            output[some, sparse] = _attend(
                layer, queries, key[some][:, :, keys], value[some][:, :, keys], first, text, options
            ).to(output.dtype)
    return output, None


def _starts(texts: int, length: int) -> list[int]:
    """From which row on each text is sparse."""
    given = _SPARSE_FROM.get()
    if given is None:
        return [0 if length == 1 else length] * texts
    if given.shape != (texts,):
        raise UserError(
            f"sparse_rows: positions of {list(given.shape)} texts, the batch has {texts}; give one for each"
        )
    return [int(start) for start in given.tolist()]


def _alike(starts: list[int], attention_mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether all texts of a call lie at the same places, so that they are attended as one text of more heads."""
    places = [of for of in (attention_mask, options.get("position_ids")) if of is not None]
    return len(set(starts)) == 1 and all(torch.equal(row, of[0]) for of in places for row in of[1:])


def _slices(rows: range, queries: int) -> list[slice]:
    """Texts that are attended together: as many as have the queries of one long text."""
    step = max(1, QUERIES_AT_ONCE // queries)
    return [slice(n, min(n + step, rows.stop)) for n in range(rows.start, rows.stop, step)]


def _attend(
    layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor, first: int, text: _Text, options: dict[str, Any]
) -> Tensor:
    """Texts at the same places: queries [B, heads, S, D], keys and values [B, kv_heads, T, D] -> [B, S, heads, D]."""
    assert layer.channels is not None
    texts, heads, length, head_dim = queries.shape
    channels = layer.channels.to(queries.device).repeat(texts, 1)
    queries, keys, values = (of.flatten(0, 1) for of in (queries, keys, values))
    labels = Labels(*encode_labels(heavy(keys, channels)), channels)
    window, cap = _window(options), float(options.get("softcap") or 0.0)
    sinks: Tensor | None = options.get("s_aux")
    of_heads = None if sinks is None else sinks.float().repeat(texts)
    found = attend_sparse(
        queries, keys, values, labels, layer.policy, first, window, text.oldest, cap=cap, sinks=of_heads
    )
    return found.view(length, texts, heads, head_dim).transpose(0, 1)


def _window(options: dict[str, Any]) -> int:
    """Tokens that a query sees at most, its own included; 0: all."""
    return int(options.get("sliding_window") or 0)


def _text(row: int, length: int, keys: int, attention_mask: Tensor | None, options: dict[str, Any]) -> _Text | None:
    """The place of text `row` of a batch among its queries and keys; None where all of them are padding.

    Raises `UserError` unless every query sees its text up to itself, or what its layer's window shows of that.
    """
    if attention_mask is None:  # nothing is padded, and no window is full
        return _Text(keys - 1 if length == 1 else 0, range(length), None)
    mask = attention_mask[row % len(attention_mask)]
    seen = mask[0] if mask.dtype == torch.bool else mask[0] == 0  # [S, T]
    here = seen.any(0)
    position = here.cumsum(0) * here  # of keys among those here, from 1; padding 0
    last = (seen * position).amax(-1).tolist()
    real = [n for n, (this, before) in enumerate(zip(last, [0, *last[:-1]], strict=True)) if this > before]
    if not real:
        return None
    queries, columns, window = range(real[0], real[-1] + 1), here.nonzero()[:, 0], _window(options)
    first, oldest = last[real[0]] - 1, 0
    if window and int(seen[real[0]].sum()) >= window:  # the cache may have forgotten the beginning
        positions = options["position_ids"]
        oldest = int(positions[row % len(positions), real[0]]) - first
    expected = reference_attention.visible(first + oldest, len(queries), oldest, window, seen.device)
    found = seen[queries.start : queries.stop, columns]
    if len(mask) != 1 or len(real) != len(queries) or not torch.equal(found, expected):
        raise UserError(
            f"attn_implementation {NAME!r}: the attention mask of text {row} is not causal with padding; sparse "
            "attention needs that, take sdpa for other masks"
        )
    return _Text(first + oldest, queries, columns if len(columns) < keys else None, oldest)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
