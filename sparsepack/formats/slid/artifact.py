"""An opened slid folder: what its tensors are, and the stock model of which they are the weights."""

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
from sparsepack.formats.codecs.slide import Slide, unpack_positions, unslide
from sparsepack.formats.codecs.symmetric import dequantised
from sparsepack.formats.containers.safetensors.container import FolderArtifact
from sparsepack.formats.containers.safetensors.layout import CONFIG
from sparsepack.formats.manifest import PRUNING
from sparsepack.formats.slid.layout import POSITIONS, SCALE, slid_tensors, value_type
from sparsepack.formats.stock import StockModel
from sparsepack.models.families import family_of
from sparsepack.models.records.pattern import Pattern


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
