"""What an artifact's sparse attention is, in a few numbers and in words: for `inspect` and the model card."""

from collections.abc import Mapping
from typing import Any

from sparsepack.artifacts.attention import ATTENTION, AttentionSection
from sparsepack.codecs.labels import LABEL_BITS, padded_channels
from sparsepack.files.stored import checked

_SCALE_BYTES = 2
_KEY_BYTES = 2
"""Of a channel of a key or a value in a cache of 16 bits."""


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
    sparse = [heads for heads in section.channels if heads is not None]
    channels = len(sparse[0][0])
    label = padded_channels(channels) * LABEL_BITS // 8 + _SCALE_BYTES
    summary = {
        **section.model_dump(exclude={"channels"}),
        "channels": channels,
        "layers": len(section.channels),
        "dense_layers": [layer for layer, heads in enumerate(section.channels) if heads is None],
        "label_bytes": len(sparse) * section.kv_heads * label,
        "key_value_bytes": len(section.channels) * section.kv_heads * section.head_dim * 2 * _KEY_BYTES,
    }
    return {**summary, "in_words": _in_words(summary)}


def _in_words(summary: Mapping[str, Any]) -> str:
    dense = summary["dense_layers"]
    named = (
        f"layer{'s' * (len(dense) > 1)} {', '.join(map(str, dense))} of {summary['layers']}" if dense else "no layer"
    )
    return (
        f"from {summary['min_context']:,} tokens on a decoded one reads {summary['tokens']} of them: the first "
        f"{summary['sinks']}, the last {summary['recent']}, and those that {summary['channels']} of "
        f"{summary['head_dim']} channels rank best; {named} read{'s' * (len(dense) < 2)} all; labels take "
        f"{summary['label_bytes']:,} bytes a token, keys and values in 16 bits {summary['key_value_bytes']:,}"
    )
