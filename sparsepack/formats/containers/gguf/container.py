"""The GGUF as a container: opened, its bytes checked; what they mean is the format's business."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sparsepack.files.gguf import GgufFile, TensorInfo, read_gguf
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.containers.gguf.integrity import check_header, check_tensors
from sparsepack.formats.containers.gguf.values import MANIFEST
from sparsepack.formats.manifest import read_manifest

ARCHITECTURE = "sparsepack"
"""The GGUFs that no other program can run have this `general.architecture`."""


@dataclass(frozen=True)
class GgufArtifact(Artifact):
    """An artifact that is a GGUF file."""

    file: GgufFile

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.file.tensors

    @property
    def total_bytes(self) -> int:
        return len(self.file.raw)

    def check_bytes(self) -> None:
        check_tensors(self.file)

    def bytes(self, name: str) -> np.ndarray:
        return self.file.bytes(name)

    def stored(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        copied = super().stored(name, first, last)
        self.file.forget(name)
        return copied


def open_gguf(path: Path) -> tuple[GgufFile, dict[str, Any]]:
    """A GGUF of ours, its header checked, and its manifest; raises `ArtifactError` where it is neither or damaged."""
    check_header(path)
    file = read_gguf(path)
    return file, read_manifest(file.metadata.get(MANIFEST), f"{path}: {MANIFEST}")


def is_ours(path: Path) -> bool:
    """Whether we wrote a GGUF, by its keys alone; raises `ArtifactError` where it is no GGUF."""
    metadata = read_gguf(path).metadata
    return MANIFEST in metadata or metadata.get("general.architecture") == ARCHITECTURE
