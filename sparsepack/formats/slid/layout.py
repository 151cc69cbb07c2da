"""What a slid folder holds of a matrix, for the writer and the readers alike: names, shapes and types."""

from typing import Any

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.formats.codecs.slide import Slide
from sparsepack.formats.codecs.value_types import VALUE_TYPES, ValueType
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.records.pattern import Pattern

POSITIONS, SCALE = "_positions", "_scale"
"""The name of a weight's positions and of its scales ends with these, after the name of the weight."""


def value_type(format: Format) -> ValueType:
    """The type of the values in a format of slid folders."""
    return VALUE_TYPES[format.matrices]


def slid_formats() -> dict[str, ValueType]:
    """The value type of each format that leaves out pruned weights, by the format's name."""
    return {name: value_type(format) for name, format in FORMATS.items() if format.weight_sparsity}


def configured_type(format: Any) -> ValueType:
    """The type of the values by `format` of a folder's `quantization_config`. Raises `ArtifactError` where unknown."""
    known = slid_formats()
    if not isinstance(format, str) or format not in known:
        raise ArtifactError(f"format {str(format)[:60]!r}: expected one of {', '.join(known)}; update sparsepack")
    return known[format]


def configured_slides(patterns: Any) -> dict[str, Slide]:
    """How each Linear was slid, by `patterns` of a folder's `quantization_config`, the name of each -> [keep, of].

    Raises `ArtifactError` for patterns that mean nothing.
    """
    try:
        return {name: Slide(Pattern(keep, of)) for name, (keep, of) in patterns.items()}
    except (TypeError, ValueError, AttributeError, PackingError) as error:
        raise ArtifactError(f"quantization_config.patterns: not understood ({error}); pack the model again") from error


def slid_tensors(weight: str, rows: int, stored: int, values: ValueType) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of a slid matrix in the order in which they are stored: name -> shape and type.

    weight -- the matrix's name; stored -- values that are stored for a row
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        weight: ((rows, stored), values.stored),
        weight + POSITIONS: ((rows, -(-stored // 4)), "U8"),
    }
    if values.scaled:
        tensors[weight + SCALE] = ((rows,), "F32")
    return tensors
