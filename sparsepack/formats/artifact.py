"""An opened artifact, whatever its format and container: what `inspect`, `verify`, `eval` and the engines work on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import TensorInfo
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import StockModel
from sparsepack.formats.table import FORMATS, Format, those_with
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.sparse_attention import SparseAttention


@dataclass(frozen=True)
class Program:
    """Whether a program can load an artifact, and what it does with it or why not."""

    program: str
    loads: bool
    what: str


@dataclass(frozen=True)
class Artifact(ABC):
    """An opened artifact: its header is checked, its tensors not yet.

    A container (`containers.gguf`, `containers.safetensors`) gives the stored bytes, a format what they mean.
    """

    embedding: ClassVar[str] = "token_embd.weight"
    """The name of the embedding."""
    output: ClassVar[str] = "output.weight"
    """The name of the output matrix; without such a tensor the embedding is that too."""

    row_scale: ClassVar[str] = ".row_scale"
    """The name of a tensor ends so that has what each row of a matrix is multiplied by, which counts as its bytes."""

    manifest: Mapping[str, Any]

    @property
    def format(self) -> Format:
        """Its row in the table of formats."""
        return FORMATS[self.manifest["kind"]]

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file or the folder."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that it is made of, and no other that may lie beside them."""
        return (self.path,)

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is stored: name, shape, type and bytes of each tensor."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of everything in it."""

    @abstractmethod
    def check_bytes(self) -> None:
        """Check every byte. Raises `ArtifactError` naming the first bad tensor or file."""

    @abstractmethod
    def bytes(self, name: str) -> np.ndarray:
        """The raw bytes of a tensor: uint8 [nbytes], mapped, not copied."""

    def stored(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """The bytes of a tensor from `first` to before `last` of its first dimension, copied: uint8 [n, bytes each]."""
        return torch.from_numpy(self.bytes(name).reshape(self.tensors[name].shape[0], -1)[first:last].copy())

    def decoded(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """The logical weights of a tensor, float32; of a matrix its rows [first, last) alone."""
        info = self.tensors[name]
        data = self.stored(name) if len(info.shape) == 1 else self.stored(name, first, last)
        return BLOCKS[info.type].decode(data).reshape(-1, *info.shape[1:])

    @abstractmethod
    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        """What `checkpoint` has for a tensor, in the order of rows in which it is stored here; None: nothing."""

    @abstractmethod
    def programs(self) -> Iterator[Program]:
        """Which programs can do what with it."""

    @abstractmethod
    def stock(self) -> StockModel:
        """The stock transformers model that it stands for. Raises `ArtifactError` where it is not understood."""

    def packed(self) -> PackedModel:
        """What an engine runs. Raises `ArtifactError` where the format is none of an engine's, or not understood."""
        raise ArtifactError(
            f"{self.path}: {self.format.name}, which no engine of sparsepack runs; "
            f"pack the model again as {those_with('runs')}"
        )

    def attention(self) -> SparseAttention | None:
        """Which tokens decoded positions read; None: all. Raises `ArtifactError` where it cannot be of this model."""
        return None

    def bases(self) -> Mapping[int, str]:
        """The names of the matrices by which the residual stream changes its basis, by the blocks before which it
        does."""
        return {}

    def pruning(self) -> dict[str, Any] | None:
        """What of its weights was pruned and how, JSON-able; None where it leaves out no zeros."""
        return None

    def neurons(self) -> dict[str, Any] | None:
        """What is known of the neurons by which its MLPs are stored, JSON-able; None where they are not."""
        return None

    def logical_shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape without padding, as the manifest gives it; the stored one where it does not."""
        shape = self.manifest["tensors"].get(name, {}).get("shape")
        return self.tensors[name].shape if shape is None else tuple(shape)

    def check_shapes(self) -> None:
        """Raise `ArtifactError` unless the matrices are those of the manifest, in its shapes: nothing is padded."""
        matrices = {name for name, info in self.tensors.items() if len(info.shape) > 1}
        if matrices != set(self.manifest["tensors"]):
            raise ArtifactError(f"{self.path}: the manifest lists other matrices than are stored; pack it again")
        for name in matrices:
            if self.logical_shape(name) != self.tensors[name].shape:
                raise ArtifactError(f"{self.path}: {name} has not the shape in the manifest; pack it again")

    @property
    def sparse_sites(self) -> int:
        """Number of sites that have a threshold."""
        return sum(name.endswith(".threshold") for name in self.tensors)

    def holds_weights(self, name: str) -> bool:
        """Whether a tensor holds weights of the model, not a site's rule or what follows from the configuration."""
        return True

    def type_of_weights(self, name: str) -> str:
        """The name of the type that weights were rounded to, whose row in `BLOCKS` has what error it can cause."""
        return self.tensors[name].type

    def padding_problems(self) -> Iterator[str]:
        """Padding that is not zero, a sentence each."""
        return iter(())
