"""An opened slid folder: what its tensors are, and the stock model of which they are the weights.

What a slid folder holds of a matrix, for the writer and the readers alike: names, shapes and types.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.stored import shown
from sparsepack.formats.artifact import Program
from sparsepack.formats.codecs.slide import Slide, dequantised, unpack_positions, unslide
from sparsepack.formats.codecs.value_types import VALUE_TYPES, ValueType
from sparsepack.formats.containers.safetensors.container import FolderArtifact
from sparsepack.formats.containers.safetensors.layout import CONFIG
from sparsepack.formats.manifest import PRUNING
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.families import family_of
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


@dataclass(frozen=True)
class SlidArtifact(FolderArtifact):
    """A slid folder. Its weights are known by the names that they have in the checkpoint."""

    @cached_property
    def slides(self) -> dict[str, Slide]:
        """How each pruned matrix was slid, by its name without `.weight`."""
        try:
            patterns = json.loads(self.folder.texts[CONFIG])["quantization_config"]["patterns"]
            return {name: Slide(Pattern(*map(_number, numbers))) for name, numbers in patterns.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PackingError) as error:
            raise ArtifactError(f"{self.path}: its patterns are not understood ({shown(error)})") from error

    def slide_of(self, name: str) -> Slide | None:
        """How a weight was slid; None for a tensor that is as in the checkpoint."""
        return self.slides.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def pruning(self) -> dict[str, Any]:
        patterns = Counter(str(how.pattern) for how in self.slides.values())
        return {"patterns": dict(patterns), **(self.manifest.get(PRUNING) or {})}

    def holds_weights(self, name: str) -> bool:
        return not name.endswith((".weight" + POSITIONS, ".weight" + SCALE))

    def type_of_weights(self, name: str) -> str:
        return value_type(self.format).name if self.slide_of(name) else super().type_of_weights(name)

    def check_bytes(self) -> None:
        super().check_bytes()
        for name, how in self.slides.items():
            self._positions(f"{name}.weight", how, 0, None)

    def check_shapes(self) -> None:
        values = value_type(self.format)
        self._check_sites()
        for name, how in self.slides.items():
            weight = f"{name}.weight"
            shape = self.logical_shape(weight) if weight in self.tensors else ()
            if len(shape) != 2:
                raise ArtifactError(f"{self.path}: {weight} is missing or no matrix; pack it again")
            rows, columns = shape
            expected = slid_tensors(weight, rows, how.stored(columns), values)
            for part, (of_shape, of_type) in expected.items():
                info = self.tensors.get(part)
                if info is None or info.shape != of_shape or info.type != of_type:
                    found = "missing" if info is None else f"{info.type} {list(info.shape)}"
                    raise ArtifactError(f"{self.path}: {part} is {found}, expected {of_type} {list(of_shape)}")
        for name, info in self.tensors.items():
            if self.slide_of(name) is None and self.logical_shape(name) != info.shape:
                raise ArtifactError(f"{self.path}: {name} has not the shape in the manifest; pack it again")

    def _check_sites(self) -> None:
        """The projections of a site share their input, which is quantised for all of them or for none."""
        family = family_of(self.manifest["model"]["model_type"], str(self.path))
        for names in family.projections.values():
            for prefix in {name[: -len(of)] for name in self.slides for of in names if name.endswith(of)}:
                if missing := [of for of in names if prefix + of not in self.slides]:
                    raise ArtifactError(f"{self.path}: {prefix}{missing[0]} is not slid as its site is; pack it again")

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        how = self.slide_of(name)
        if how is None:
            return super().decoded(name, first, last)
        of_type = value_type(self.format)
        values = self.stored(name, first, last).view(of_type.dtype).float()  # [rows, stored]
        weight = unslide(values, self._positions(name, how, first, last), how, self.logical_shape(name)[1])
        if not of_type.scaled:
            return weight
        return dequantised(weight, self.stored(name + SCALE, first, last).view(torch.float32).flatten())

    def _positions(self, name: str, how: Slide, first: int, last: int | None) -> Tensor:
        try:
            return unpack_positions(self.stored(name + POSITIONS, first, last), self.tensors[name].shape[1], how)
        except PackingError as error:
            raise ArtifactError(f"{self.path}: {name}: {error}; copy or pack it again") from error

    def stock(self) -> StockModel:
        stock, values = super().stock(), value_type(self.format)
        if not values.scaled:
            return stock
        sites = stock.family.projections.items()
        slid = {
            (layer, site)
            for layer in range(stock.layers)
            for site, names in sites
            if f"model.layers.{layer}.{names[0]}" in self.slides
        }
        return replace(stock, inputs=dict.fromkeys(slid, values.dtype))

    def programs(self) -> Iterator[Program]:
        yield Program("sparsepack", True, "evaluates it")
        yield Program("transformers", True, "from_pretrained, after `import sparsepack`")
        yield Program("llama.cpp", False, "it takes GGUF files; pack as q4_k for it")


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:60]!r} is no number")
    return value
