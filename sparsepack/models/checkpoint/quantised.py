"""A folder of a quantised release as a source of tensors: each matrix is decoded when it is asked for."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile, read_split_gguf
from sparsepack.files.stored import shown, validate
from sparsepack.models.checkpoint.configuration import QUANTISED
from sparsepack.models.checkpoint.safetensors_source import PLAIN, SafetensorsSource
from sparsepack.models.checkpoint.schemes import SCHEMES, Misfit, Scheme, Settings, stored_name
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.models.checkpoint.sources import (
    StoredType,
    check_finite,
    stored_types,
)
from sparsepack.models.families import FAMILIES, TEXT_PARTS

_OF_ACTIVATIONS = (
    ".input_scale",
    ".activation_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".prob_scale",
    ".kv_scale",
)
"""Ends of tensors that say how a release's own programs round activations and caches, which are not rounded here."""

_COUNTS = ("I64", "BOOL")
"""Types of buffers that plain models have."""
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where releases before transformers' `quantization_config` say how they are quantised, and by what."""
_COMPRESSED_FORMATS = (
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)

_READERS = {
    **{method: f"transformers with the package {method}" for method in ("aqlm", "fp_quant", "hqq", "sinq", "vptq")},
    **{"eetq": "transformers with kernels", "quanto": "transformers with optimum-quanto"},
    **{"higgs": "transformers with flute", "quark": "transformers with amd-quark"},
    **{"spqr": "transformers with spqr_quant", "torchao": "transformers with torchao"},
    **{"exl2": "exllamav2", "exl3": "exllamav3", "compressed-tensors": "vLLM"},
}
"""Methods that are not read here, or not in all formats -> who reads them."""


def quantised_source(source: SafetensorsSource, values: Any, folder: Path) -> "SafetensorsSource | QuantisedSource":
    """The source of a folder's tensors, decoded where they are quantised.

    values -- `quantization_config` of its config.json; None: it has none, and files of older releases may

    Raises `CheckpointError` as `QuantisedSource` does, and for coded tensors of which nothing says what they mean.
    """
    coded = next((name for name, kind in source.types.items() if kind not in (*PLAIN, *_COUNTS)), None)
    if values is None and coded is None:
        return source
    beside = _beside(folder) if values is None else values
    if beside is None:
        raise CheckpointError(
            f"{folder}: {coded} is {source.types[coded or '']}, and no quantization_config in config.json says what "
            "its numbers mean; download config.json again, or take an unquantised release"
        )
    return QuantisedSource(source, settings_of(beside, str(folder)), str(folder))


def _beside(folder: Path) -> Any:
    """What a file beside the weights says of their quantisation; None: nothing there."""
    for name, method in _FILES.items():
        path = folder / name
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be read ({shown(error)}); download it again") from error
            inner = found.get("quantization") if isinstance(found, dict) else None
            return {"quant_method": method, **(inner if isinstance(inner, dict) else found)}
    return None


def settings_of(values: Any, where: str) -> Settings:
    """What `quantization_config` says.

    where -- the file that has it, for messages

    Raises `CheckpointError` where it is not understood, and for methods that are not read.
    """
    try:
        settings = validate(Settings, values)
    except ValueError as error:
        raise CheckpointError(f"{where}: quantization_config: {shown(error)}; download it again") from error
    if settings.quant_method != "auto-round":
        return settings
    packing = settings.packing_format or ""  # AutoRound packs as GPTQ or AWQ do
    method = next((method for method in ("gptq", "awq") if packing.endswith(method)), settings.quant_method)
    return settings.model_copy(
        update={"quant_method": method, "dynamic": bool(getattr(settings, "extra_config", None))}
    )


def is_read(settings: Settings) -> bool:
    """Whether there is a scheme for what a configuration names."""
    if settings.quant_method == "compressed-tensors" and settings.format not in (None, *_COMPRESSED_FORMATS):
        return False
    return any(settings.quant_method in scheme.methods for scheme in SCHEMES)


@dataclass(frozen=True)
class _Matrix:
    """A matrix as it is stored: by which scheme, under which names by their ends, and its shape."""

    scheme: Scheme
    names: Mapping[str, str]
    shape: tuple[int, ...]


class QuantisedSource:
    """A folder whose config.json says how it is quantised; matrices that are not are read as they are.

    source   -- the stored tensors
    settings -- what it says
    where    -- the folder, for messages

    Raises `CheckpointError` for a scheme that is not read, and for the first tensor that is not what the configuration
    means.
    """

    file: GgufFile | None = None

    def __init__(self, source: SafetensorsSource, settings: Settings, where: str) -> None:
        self._source, self._settings, self._where = source, settings, where
        self._matrices: dict[str, _Matrix] = {}
        self._held: dict[str, torch.Tensor] = {}
        coded = [name for name, kind in source.types.items() if kind not in PLAIN or settings.rounds(name)]
        if not is_read(settings):
            named = " ".join(filter(None, (settings.quant_method, settings.format)))
            first = f"{coded[0]} is {source.types[coded[0]]}, " if coded else ""
            reader = _READERS.get(settings.quant_method)
            others = f"; {named} is read by {reader}" if reader else ""
            raise CheckpointError(
                f"{where}: {first}quantised by {named}, which is not read; read are {', '.join(read_methods())}: take "
                f"the model's release in one of them, as a GGUF or unquantised{others}"
            )
        found = dict(self._found(coded))
        small = source.stored([names[end] for scheme, names in found.values() for end in scheme.read])
        for matrix, (row, names) in found.items():
            self._matrices[matrix] = _Matrix(row, names, self._shape(matrix, row, names, small))
        used = {name for each in self._matrices.values() for name in each.names.values()} | self._empty_biases()
        self._others = [name for name in source.types if name not in used and not name.endswith(_OF_ACTIVATIONS)]
        if unread := [name for name in self._others if source.types[name] not in (*PLAIN, *_COUNTS)]:
            raise self._unread(unread)
        if not self._matrices:
            plain = next((name for name in self._others if len(source.shapes[name]) > 1), "none")
            raise CheckpointError(
                f"{where}: quantised by {settings.quant_method} by its quantization_config, but {plain} and all other "
                "tensors are plain numbers; expected weights that belong to config.json: download both again, or take "
                "quantization_config out where the weights are those of the unquantised model"
            )

    def _found(self, coded: list[str]) -> Iterator[tuple[str, tuple[Scheme, dict[str, str]]]]:
        """Each matrix whose tensors are all there, with its scheme and their names."""
        types = self._source.types
        for name in coded:
            for scheme in SCHEMES:
                matrix = scheme.matrix(name)
                if (
                    self._settings.quant_method not in scheme.methods
                    or matrix is None
                    or types[name] not in scheme.types
                ):
                    continue
                if all(stored_name(matrix, end) in types for end in scheme.beside):
                    ends = (scheme.codes, *scheme.beside, *scheme.more)
                    there = {end: each for end in ends if (each := stored_name(matrix, end)) in types}
                    yield matrix, (scheme, there)
                    break

    def _empty_biases(self) -> set[str]:
        """Biases of zeros that AutoGPTQ gave every matrix, whether its model has any or not: those of projections that
        have nothing else in any block."""
        if self._settings.quant_method != "gptq":
            return set()
        biases = [bias for name in self._matrices if (bias := stored_name(name, ".bias")) in self._source.types]
        by_projection: dict[str, list[str]] = {}
        for bias in biases:
            by_projection.setdefault(re.sub(r"\d+", "", bias), []).append(bias)
        zero = {name for name, value in self._source.stored(biases).items() if not value.any()}
        return {bias for each in by_projection.values() if zero.issuperset(each) for bias in each}

    def _shape(
        self, matrix: str, scheme: Scheme, names: Mapping[str, str], small: Mapping[str, torch.Tensor]
    ) -> tuple[int, ...]:
        shapes = {end: self._source.shapes[name] for end, name in names.items()}
        try:
            return scheme.shape(shapes, {end: small[names[end]] for end in scheme.read}, self._settings)
        except Misfit as error:
            said, name = str(error), names.get(error.end, matrix)
        except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
            said, name = f"does not fit the tensors beside it ({shown(error)})", names[scheme.codes]
        raise CheckpointError(
            f"{self._where}: {name} {said}; weights and the quantization_config ({self._settings.quant_method}) do not "
            "belong together: download both again"
        )

    def _unread(self, names: list[str]) -> CheckpointError:
        """The error of stored tensors that no scheme explains."""
        types, method = self._source.types, self._settings.quant_method
        for name, scheme in itertools.product(names, SCHEMES):
            matrix = scheme.matrix(name)
            if method in scheme.methods and matrix is not None and types[name] in scheme.types:
                missing = next(each for end in scheme.beside if (each := stored_name(matrix, end)) not in types)
                return CheckpointError(
                    f"{self._where}: {name} is {types[name]}, and {missing}, which {method} has beside it, is missing; "
                    "download the model again"
                )
        return CheckpointError(
            f"{self._where}: {names[0]} is {types[names[0]]}, which no scheme of {method} that is read explains; read "
            f"are {', '.join(read_methods())}: take another release of the model"
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {name: self._source.shapes[name] for name in self._others}
        return plain | {name: matrix.shape for name, matrix in self._matrices.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        plain = {name: self._source.dtypes[name] for name in self._others}
        return plain | {name: matrix.scheme.dtype for name, matrix in self._matrices.items()}

    @property
    def hash(self) -> SourceHash:
        return self._source.hash

    @property
    def stored_types(self) -> tuple[StoredType, ...]:
        """How its tensors are stored; what the release has for activations is not counted."""
        nbytes, shapes = self._source.nbytes, self._source.shapes
        plain = [(self._source.types[name], shapes[name], nbytes[name], False) for name in self._others]
        coded = [
            (each.scheme.name, each.shape, sum(nbytes[name] for name in each.names.values()), True)
            for each in self._matrices.values()
        ]
        return stored_types([*plain, *coded])

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor; a coded one is decoded whole, and two are held until `tensor` reads another."""
        if name not in self._matrices:
            return self._source.rows(name, first, last)
        if name not in self._held:
            self._held = {**dict([*self._held.items()][-1:]), name: self._decoded(name)}
        return self._held[name][first:last]

    def tensor(self, name: str) -> torch.Tensor:
        self._held.clear()
        return self._decoded(name)

    def _decoded(self, name: str) -> torch.Tensor:
        if name not in self._matrices:
            return self._source.tensor(name)
        matrix = self._matrices[name]
        stored = self._source.stored(matrix.names.values())
        by_end = {end: stored[each] for end, each in matrix.names.items()}
        try:
            decoded = matrix.scheme.decode(by_end, matrix.shape, self._settings)
        except (ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._where}: {name}: its {matrix.scheme.name} tensors do not belong together ({shown(error)}); "
                "download the model again"
            ) from error
        return check_finite(self._source.path_of(matrix.names[matrix.scheme.codes]), name, decoded)


def types_alone(path: Path) -> tuple[str, tuple[StoredType, ...]] | None:
    """The model type, or llama.cpp's architecture, and how tensors are stored, of a folder or GGUF of a family without
    a row; None of others. Raises `CheckpointError` and `ArtifactError` as opening does."""
    if path.is_file():
        file = read_split_gguf(path)
        kind = str(file.metadata.get("general.architecture"))[:60]
        names = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
        if any(kind in (gguf.architecture, gguf.mixtures) for gguf in names):
            return None
        infos = file.tensors.values()
        return kind, stored_types((each.type, each.shape, each.nbytes, each.type not in PLAIN) for each in infos)
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = str(values["model_type"])[:60]
    except (ValueError, LookupError, TypeError, OSError, RecursionError):
        return None
    if kind in (*FAMILIES, *TEXT_PARTS):
        return None
    settings = next(filter(None, map(values.get, QUANTISED)), None)
    return kind, quantised_source(SafetensorsSource(path), settings, path).stored_types


def read_methods() -> tuple[str, ...]:
    """The values of `quant_method` that are read."""
    return tuple(dict.fromkeys(method for scheme in SCHEMES for method in scheme.methods))
