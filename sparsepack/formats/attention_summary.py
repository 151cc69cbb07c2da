"""What an artifact's sparse attention is, in a few numbers and in words: for `inspect` and the model card."""

from collections.abc import Mapping
from typing import Any

from sparsepack.files.stored import checked
from sparsepack.formats.attention import ATTENTION, AttentionSection
from sparsepack.formats.codecs.labels import LABEL_BITS, padded_channels
from sparsepack.models.records.sparse_attention import described, in_words

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
    section = checked(AttentionSection, manifest[ATTENTION])
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
