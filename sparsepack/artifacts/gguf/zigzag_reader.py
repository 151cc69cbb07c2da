"""Read a zigzag GGUF: mapped, not copied; checked, not trusted."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.artifacts.gguf.integrity import check_header, check_tensors
from sparsepack.artifacts.gguf.zigzag_layout import ARCHITECTURE, CONFIG, NUMBERS, TOKENIZER, norm_widths, site_shapes
from sparsepack.artifacts.manifest import read_manifest
from sparsepack.codecs import zigzag
from sparsepack.codecs.matrices import ZIGZAG, PackedMatrix, decode_matrix, zigzag_rows
from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import GgufFile, TensorInfo, read_gguf
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint import EMBEDDING, FINAL_NORM, HEAD
from sparsepack.models.families import FAMILIES, SITES
from sparsepack.models.packed import PackedLayer, PackedModel, PackedSite
from sparsepack.models.rule import SiteRule

_MATRIX_TYPES = ("Q6_K", "Q4_K", "F16", "BF16", "F32")


def read_zigzag(path: Path, verify: bool = True) -> PackedModel:
    """Open a zigzag GGUF. Matrices stay in the mapped file; norms, biases and rules are copied.

    The header is always checked against its hash; the tensors too unless `verify` is False.
    Raises `ArtifactError` where the file is damaged, of another kind, newer than this program, or inconsistent.
    """
    path = Path(path)
    check_header(path)
    file = read_gguf(path)
    manifest = read_manifest(file)
    if file.metadata.get("general.architecture") != ARCHITECTURE or manifest["kind"] != ZIGZAG:
        raise ArtifactError(
            f"{path}: a plain {manifest['kind'].upper()} GGUF, expected a zigzag one: run it with llama.cpp, "
            "or pack the model again as zigzag-q4_k"
        )
    if verify:
        check_tensors(file)
    return _Reader(file, manifest).model()


class _Reader:
    """Takes the tensors of a file one after the other, and notices missing, wrong and unknown ones."""

    def __init__(self, file: GgufFile, manifest: dict[str, Any]) -> None:
        self.file, self.manifest = file, manifest
        self.left = set(file.tensors)
        self.architecture = self._architecture()

    def model(self) -> PackedModel:
        architecture = self.architecture
        layers = tuple(self.layer(i) for i in range(architecture.layers))
        embedding = self.rows_matrix("token_embd.weight")
        output = embedding if architecture.tied else self.rows_matrix("output.weight")
        output_norm = self.vector("output_norm.weight", architecture.hidden)
        if self.left:
            raise self.wrong(f"the tensor {min(self.left)} is not understood ({len(self.left)} such tensors)")
        return PackedModel(
            architecture=architecture,
            layers=layers,
            embedding=embedding,
            output_norm=output_norm,
            output=output,
            config_json=self.text(CONFIG),
            tokenizer_json=self.text(TOKENIZER),
            manifest=self.manifest,
        )

    def layer(self, layer: int) -> PackedLayer:
        widths, shapes = norm_widths(self.architecture), site_shapes(self.architecture)
        norms = {name: self.vector(f"blk.{layer}.{name}.weight", width) for name, width in widths.items()}
        return PackedLayer({site: self.site(f"blk.{layer}.{site}", *shapes[site]) for site in SITES}, norms)

    def site(self, name: str, parts: tuple[int, ...], columns: int) -> PackedSite:
        rows = sum(parts)
        info = self.take(f"{name}.weight", ("Q4_K",), (zigzag.bands(rows), columns, zigzag.BAND_ROWS))
        self.check_logical(info.name, rows, columns)
        blocks = self.mapped(info).view(zigzag.bands(rows), columns, -1)
        bias = self.vector(f"{name}.bias", rows) if f"{name}.bias" in self.file.tensors else None
        return PackedSite(PackedMatrix(blocks, ZIGZAG, rows, columns), bias, self.rule(name, columns), parts)

    def rule(self, name: str, columns: int) -> SiteRule | None:
        threshold = self.file.tensors.get(f"{name}.threshold")
        if threshold is None:
            return None
        width = 1 if threshold.shape == (1,) else columns
        value = self.vector(threshold.name, width)
        offset = self.vector(f"{name}.offset", columns) if f"{name}.offset" in self.file.tensors else None
        return SiteRule(value.reshape(()) if width == 1 else value, offset)

    def rows_matrix(self, name: str) -> PackedMatrix:
        shape = (self.architecture.vocabulary, self.architecture.hidden)
        info = self.take(name, _MATRIX_TYPES, shape)
        self.check_logical(name, *shape)
        return PackedMatrix(self.mapped(info).view(shape[0], -1), info.type, *shape)

    def vector(self, name: str, width: int) -> Tensor:
        return self.mapped(self.take(name, ("F32",), (width,))).clone().view(torch.float32)

    def take(self, name: str, types: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise self.wrong(f"the tensor {name} is missing")
        if info.shape != shape or info.type not in types:
            raise self.wrong(
                f"{name} is {info.type} {list(info.shape)}, the architecture means {'/'.join(types)} {list(shape)}"
            )
        self.left.discard(name)
        return info

    def mapped(self, info: TensorInfo) -> Tensor:
        with warnings.catch_warnings():
            # The mapping is read-only, and nothing here or in a runtime writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.file.bytes(info.name))

    def check_logical(self, name: str, rows: int, columns: int) -> None:
        entry = self.manifest["tensors"].get(name)
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if shape != [rows, columns]:
            raise self.wrong(f"the manifest gives {name} the logical shape {shape}, expected {[rows, columns]}")

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(f"{key} is missing")
        return value

    def wrong(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.file.path}: {what}; pack the model again")

    def _architecture(self) -> Architecture:
        try:
            numbers = json.loads(self.text(NUMBERS))
            architecture = Architecture.from_json(numbers)
            _check_numbers(architecture, len(self.file.tensors))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.wrong(f"{NUMBERS} is not understood ({error})") from error
        return architecture


def _check_numbers(architecture: Architecture, tensors: int) -> None:
    """Raise ValueError where a number could not be a model's."""
    sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "context")
    for name in sizes:
        value = getattr(architecture, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} {value!r}, expected a positive integer")
    real = (architecture.norm_eps, architecture.rotary_scale, *architecture.inv_freq)
    if not all(type(value) in (int, float) for value in real):
        raise ValueError("norm_eps, rotary_scale or inv_freq hold something else than numbers")
    if not all(type(value) is int for value in (*architecture.sliding_windows, *architecture.eos)):
        raise ValueError("sliding_windows or eos hold something else than integers")
    if architecture.model_type not in FAMILIES:
        raise ValueError(f"model type {architecture.model_type!r}, expected one of {', '.join(FAMILIES)}")
    windows = len(architecture.sliding_windows)
    if architecture.layers > tensors or windows != architecture.layers:
        raise ValueError(f"{architecture.layers} layers, {tensors} tensors, {windows} sliding windows")
    if architecture.heads % architecture.kv_heads or len(architecture.inv_freq) * 2 != architecture.head_dim:
        raise ValueError(
            f"{architecture.heads} heads, {architecture.kv_heads} of keys, {len(architecture.inv_freq)} frequencies "
            f"for heads of {architecture.head_dim}"
        )


def stock_config(packed: PackedModel) -> Any:
    """The stock transformers configuration of the model inside; `ArtifactError` where it is not understood."""
    from transformers import AutoConfig

    try:
        values = json.loads(packed.config_json)
        return AutoConfig.for_model(**values)
    except Exception as error:  # transformers checks fields in several ways, each with its own kind
        reason = " ".join(str(error).split())
        raise ArtifactError(f"{CONFIG} inside the artifact is not understood ({reason}); pack it again") from error


def dequantised(packed: PackedModel) -> Callable[[str], Tensor]:
    """The logical weights by their Hugging Face names, decoded to float32 when asked for.

    For `models.whole.build_model`, which then is the stock model with the artifact's weights. The function raises
    `ArtifactError` for a name that the model does not have.
    """
    makers: dict[str, Callable[[], Tensor]] = {
        EMBEDDING: lambda: decode_matrix(packed.embedding),
        HEAD: lambda: decode_matrix(packed.output),
        FINAL_NORM: lambda: packed.output_norm,
    }
    family = FAMILIES[packed.architecture.model_type]
    for index, layer in enumerate(packed.layers):
        prefix = f"model.layers.{index}"
        for norm, module in family.norms.items():
            makers[f"{prefix}.{module}.weight"] = partial(_same, layer.norms[norm])
        for site, projections in family.projections.items():
            makers |= _site_makers(prefix, projections, layer.sites[site])

    def tensor(name: str) -> Tensor:
        if name not in makers:
            raise ArtifactError(f"{name}: no such tensor in the artifact of {packed.manifest['model']['name']}")
        return makers[name]()

    return tensor


def _same(value: Tensor) -> Tensor:
    return value


def _site_makers(prefix: str, projections: tuple[str, ...], site: PackedSite) -> dict[str, Callable[[], Tensor]]:
    makers: dict[str, Callable[[], Tensor]] = {}
    start = 0
    for projection, rows in zip(projections, site.parts, strict=True):
        stop = start + rows
        makers[f"{prefix}.{projection}.weight"] = partial(zigzag_rows, site.matrix, start, stop)
        if site.bias is not None:
            makers[f"{prefix}.{projection}.bias"] = partial(_same, site.bias[start:stop])
        start = stop
    return makers
