"""Sparse attention in a manifest: the section `attention`, written from a `SparseAttention` and read as one.

    kind                          "double": Double Sparsity
    tokens                        share of the tokens that a decoded position sees and reads, "1/8"
    sinks, recent, min_context    see `models.sparse_attention.TokenPolicy`
    label_bits                    of a channel of a label: 4 (`formats.blocks.labels`)
    head_dim, kv_heads, rotary    what the channels are channels of: `models.blocks.Heads`
    groups                        "mean": the query heads of a KV head read what their mean query ranks best
    calibration                   SHA-256 of the calibration that the channels are from
    channels                      of each layer null, where it is dense, or each KV head's heavy channels, ascending

All of it decides what is read, so a key that is not understood makes the artifact one that must not be run.

What an artifact's sparse attention is, in a few numbers and in words: for `inspect` and the model card.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from sparsepack.errors import ArtifactError
from sparsepack.files.stored import Count, Name, Size, Stored, shown, validate
from sparsepack.formats.blocks.labels import LABEL_BITS, padded_channels
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Heads, Rotary
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.sparse_attention import LARGEST_DENOMINATOR, SparseAttention, TokenPolicy, described, in_words

ATTENTION = "attention"
"""The manifest has the section under this key."""

_DOUBLE_SPARSITY = "double"
_Tokens = Annotated[int, Field(ge=0, lt=2**31)]


def _share(value: str) -> str:
    found = re.fullmatch(r"([1-9]\d{0,6})/([1-9]\d{0,6})", value)
    if not found or int(found[1]) > int(found[2]) or int(found[2]) > LARGEST_DENOMINATOR:
        raise ValueError(f"{value[:60]!r}, expected a share such as 1/16")
    return value


class _Section(Stored):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _SectionRotary(_Section):
    convention: Rotary
    dims: Count


class AttentionSection(_Section):
    """The section as it is read from a file: it holds together, whether or not it is of the model at hand."""

    kind: Literal["double"]
    tokens: Annotated[str, AfterValidator(_share)]
    sinks: _Tokens
    recent: Annotated[_Tokens, Field(ge=1)]
    min_context: _Tokens
    label_bits: Literal[4]
    head_dim: Annotated[Size, Field(lt=2**31)]
    kv_heads: Annotated[Size, Field(lt=2**31)]
    groups: Literal["mean"]
    rotary: _SectionRotary
    calibration: Name
    channels: list[list[list[Count]] | None]

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.sinks + self.recent > self.min_context:
            raise ValueError(f"min_context {self.min_context}, expected sinks + recent or more")
        sparse = [heads for heads in self.channels if heads is not None]
        if not sparse:
            raise ValueError("every layer is dense")
        if any(len(heads) != self.kv_heads for heads in sparse):
            raise ValueError(f"channels: expected those of {self.kv_heads} KV heads in every layer that is not dense")
        count = len(sparse[0][0])
        for one in (one for heads in sparse for one in heads):
            if not one or len(one) != count:
                raise ValueError(f"channels: {count} in one head and {len(one)} in another, expected as many in all")
            if one[-1] >= self.head_dim or any(after <= before for before, after in pairwise(one)):
                raise ValueError(f"channels: expected ascending numbers below {self.head_dim} without repetition")
        return self

    def attention(self) -> SparseAttention:
        """The sparse attention as engines take it."""
        policy = TokenPolicy(Fraction(self.tokens), self.sinks, self.recent, self.min_context)
        channels = (None if heads is None else torch.tensor(heads, dtype=torch.int64) for heads in self.channels)
        return SparseAttention(policy, tuple(channels))


def attention_section(sparse: SparseAttention, heads: Heads, calibration: str) -> dict[str, Any]:
    """The section of a model's sparse attention, JSON-able.

    heads -- of that model; calibration -- SHA-256 of the one that the channels are from
    """
    numbers = described(sparse)
    return {
        "kind": _DOUBLE_SPARSITY,
        **{name: numbers[name] for name in ("tokens", "sinks", "recent", "min_context")},
        "label_bits": LABEL_BITS,
        **{name: value for name, value in heads.to_json().items() if name != "heads"},
        "groups": "mean",
        "calibration": calibration,
        "channels": [None if channels is None else channels.tolist() for channels in sparse.channels],
    }


def sparse_attention_of(
    manifest: Mapping[str, Any], model: Architecture | Any, where: object = "the manifest"
) -> SparseAttention | None:
    """What a manifest says of sparse attention, as an engine takes it; None where it says nothing of it.

    model -- what the artifact runs as: an engine's `Architecture`, or a stock transformers configuration
    where -- the manifest stands, for messages

    Raises `ArtifactError` for a section that is not understood, or is of other heads or layers than the model has.
    """
    stored = manifest.get(ATTENTION)
    if stored is None:
        return None
    try:
        section = validate(AttentionSection, stored)
        _check_fits(section, model)
    except Exception as error:  # transformers makes a model of a strange configuration, and fails in many ways
        raise ArtifactError(f"{where}: {ATTENTION}: {shown(error)}; pack the model again") from error
    return section.attention()


def _check_fits(section: AttentionSection, model: Architecture | Any) -> None:
    """Raise ValueError unless the channels can be those of the model."""
    if isinstance(model, Architecture):
        heads, layers = model.heads_and_rope, model.layers
    else:
        heads, layers = heads_of_config(model), int(model.num_hidden_layers)
    rotary = section.rotary
    facts = {
        "layers": (len(section.channels), layers),
        "head_dim": (section.head_dim, heads.head_dim),
        "kv_heads": (section.kv_heads, heads.kv_heads),
        "rotary.convention": (rotary.convention, heads.rotary.convention),
        "rotary.dims": (rotary.dims, heads.rotary.dims),
    }
    for name, (found, expected) in facts.items():
        if found != expected:
            raise ValueError(f"{name} {found}, the model has {expected}")


_SCALE_BYTES = 2
_KEY_BYTES = 2
"""A channel of a key or a value takes this many bytes in a cache of 16 bits."""


def attention_summary(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section `attention` of a manifest that was read, JSON-able, its channels counted; None where it has none.

    dense_layers     -- those that read all tokens
    label_bytes      -- for each token, of all layers that have labels
    key_value_bytes  -- for each token, of all layers, with a cache of 16 bits
    in_words         -- all of it, for people
    """
    if manifest.get(ATTENTION) is None:
        return None
    section = validate(AttentionSection, manifest[ATTENTION])
    numbers = described(section.attention())
    label = padded_channels(numbers["channels"]) * LABEL_BITS // 8 + _SCALE_BYTES
    labelled = numbers["layers"] - len(numbers["dense_layers"])
    label_bytes = labelled * section.kv_heads * label
    key_value_bytes = numbers["layers"] * section.kv_heads * section.head_dim * 2 * _KEY_BYTES
    return {
        **section.model_dump(exclude={"channels"}),
        **numbers,
        "label_bytes": label_bytes,
        "key_value_bytes": key_value_bytes,
        "in_words": f"{in_words(numbers)}; labels take {label_bytes:,} bytes a token, keys and values in 16 bits "
        f"{key_value_bytes:,}",
    }
