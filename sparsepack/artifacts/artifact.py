"""Open either kind of GGUF of ours, and find in it the logical matrices that a checkpoint has too."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.artifacts.gguf.integrity import check_header
from sparsepack.artifacts.gguf.plain import llama_cpp_rows
from sparsepack.artifacts.manifest import read_manifest
from sparsepack.codecs.matrices import ZIGZAG, decode_rows
from sparsepack.codecs.zigzag import unpack
from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import GgufFile, read_gguf
from sparsepack.models.checkpoint import EMBEDDING, FINAL_NORM, HEAD, Checkpoint
from sparsepack.models.gguf_names import gguf_names

ROTARY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Artifact:
    """An opened file: its header is checked, its tensors not yet."""

    file: GgufFile
    manifest: dict[str, Any]

    @property
    def zigzag(self) -> bool:
        """Whether the matrices are in zigzag order."""
        return bool(self.manifest["kind"] == ZIGZAG)

    def logical_shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape without padding, as the manifest gives it; the stored one where it does not."""
        entry = self.manifest["tensors"].get(name)
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if shape is None:
            return self.file.tensors[name].shape
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise ArtifactError(f"{self.file.path}: the manifest gives {name} the shape {shape}; pack it again")
        return tuple(shape)

    def decoded(self, name: str, rows: int | None = None) -> Tensor:
        """A tensor's weights in float32; of a zigzag matrix the first `rows` (default: the logical ones)."""
        info = self.file.tensors[name]
        data = torch.from_numpy(self.file.bytes(name).copy())
        if self.zigzag and len(info.shape) == 3:
            blocks = data.view(info.shape[0], info.shape[1], -1)
            return unpack(blocks, rows or self.logical_shape(name)[0])
        return decode_rows(data.view(*info.shape[:-1], -1), info.type)


def open_artifact(path: Path) -> Artifact:
    """Open a zigzag or plain GGUF of ours; raises `ArtifactError` where it is neither, damaged or too new."""
    check_header(path)
    file = read_gguf(path)
    return Artifact(file, read_manifest(file))


def source_tensors(artifact: Artifact, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor | None]]:
    """Every stored tensor that has weights of the model, with what `checkpoint` holds for it (None: nothing).

    In the artifact's order of rows: sites stacked, or q and k as llama.cpp wants them. One matrix in memory.
    """
    names = gguf_names(checkpoint.layers)
    for name in artifact.file.tensors:
        if name == ROTARY_FACTORS or name.endswith((".threshold", ".offset")):
            continue
        if artifact.zigzag:
            yield name, _zigzag_source(checkpoint, name)
        else:
            source = names.get(name)
            known = source in checkpoint.source.shapes
            yield name, llama_cpp_rows(checkpoint, source, checkpoint.tensor(source)) if source and known else None


def _zigzag_source(checkpoint: Checkpoint, name: str) -> Tensor | None:
    outside = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
    if name in outside:
        return checkpoint.tensor(outside[name])
    block, layer, what, part = (*name.split("."), "", "", "")[:4]
    if block != "blk" or not layer.isdecimal() or int(layer) >= checkpoint.layers:
        return None
    if what in checkpoint.family.norms:
        return checkpoint.tensor(f"model.layers.{layer}.{checkpoint.family.norms[what]}.weight")
    if what in checkpoint.family.projections:
        weight, bias = checkpoint.stacked(int(layer), what)
        return bias if part == "bias" else weight
    return None
