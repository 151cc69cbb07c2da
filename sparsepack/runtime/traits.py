"""What a decoder computes for some models only, a row for each: a backend's row says which of them it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsepack.models.architecture import Architecture

PARTS_OF_HEADS = "a rotary embedding of a part of each head"
LONG_TEXTS = "texts so long that they turn by other frequencies"
LOCAL_FREQUENCIES = "rotary frequencies of their own in layers with a sliding window"
SOFT_CAPS = "soft caps"
SCALES = "scaled embeddings or attention scores of their own scale"
POST_NORMS = "norms after attention and MLP"
ROW_NORMS = "norms of the queries and keys of all heads together"
SHARED_EXPERTS = "a shared expert"
ROPELESS = "layers without rotary embedding"
PLAIN_MLPS = "MLPs without a gate"
QUERY_GROWTH = "texts so long that later queries are scaled"

TRAITS: Mapping[str, Callable[[Architecture, int], bool]] = MappingProxyType(
    {
        PARTS_OF_HEADS: lambda a, context: 2 * len(a.inv_freq) != a.head_dim,
        LONG_TEXTS: lambda a, context: a.long_texts is not None and context > a.long_texts.tokens,
        LOCAL_FREQUENCIES: lambda a, context: bool(a.local_inv_freq),
        SOFT_CAPS: lambda a, context: bool(a.attention_cap or a.logit_cap),
        SCALES: lambda a, context: (
            a.embedding_scale != 1 or a.logit_scale != 1 or a.attention_scale not in (0, a.head_dim**-0.5)
        ),
        POST_NORMS: lambda a, context: any(block.norms_after for block in a.blocks),
        ROW_NORMS: lambda a, context: any(block.attention.qk_norm == "rows" for block in a.blocks),
        ROPELESS: lambda a, context: bool(a.ropeless),
        QUERY_GROWTH: lambda a, context: bool(a.query_growth) and context > a.query_growth[1],
        PLAIN_MLPS: lambda a, context: not all(block.mlp.gated for block in a.blocks),
        SHARED_EXPERTS: lambda a, context: a.experts is not None and a.experts.shared > 0,
    }
)
"""Each trait, in words, and what tells whether a model has it in sequences of up to so many tokens."""


def traits_of(architecture: Architecture, context: int) -> list[str]:
    """The traits that a model has in sequences of up to `context` tokens."""
    return [trait for trait, has in TRAITS.items() if has(architecture, context)]
