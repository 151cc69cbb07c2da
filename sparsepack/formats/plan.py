"""What an artifact will be, before any tensor of it is made: the writer makes it, the dry run adds it up."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.files.transfer import Workspace
from sparsepack.formats.blocks.table import stored_bytes
from sparsepack.formats.kinds import GATE_ORDERS
from sparsepack.models.activity import NeuronCounts
from sparsepack.models.pattern import Pattern
from sparsepack.models.sites import Rules
from sparsepack.reconstruction import Inputs


@dataclass(frozen=True)
class EncodedSite:
    """One site, its projections' rows stacked.

    tensors -- the bytes that are stored, by the names of the artifact's tensors: uint8, of any shape; none of a matrix
               that the format keeps as it is
    weight  -- what is stored, decoded: float32 [rows, columns]
    rows    -- which rows of `weight` each tensor that holds weights has, by its name: a slice, or their numbers
    """

    tensors: Mapping[str, Tensor]
    weight: Tensor
    rows: Mapping[str, slice | Tensor]


SiteEncoder = Callable[[int, str, Tensor, Inputs | None], EncodedSite]
"""The function takes (layer, site, weight float32 [rows, columns], inputs). With inputs, weights make up for each
other's errors; with None each is rounded by itself.

It raises `PackingError` for weights that cannot be encoded, `SingularError` as `Inputs.inverse_factor`."""

Encoded = Mapping[str, Callable[[], Tensor]]
"""By the names of an artifact's tensors, what gives their bytes."""


@dataclass(frozen=True)
class PlanRequest:
    """What goes into an artifact beside the model's weights.

    rules          -- of the sites; one without stays dense
    provenance     -- named parts for the manifest, JSON-able, such as calibration, recipe, thresholds
    output_type    -- of the output matrix: "auto" (the format's choice), q8_0, q6_k, q4_k, f16, bf16, f32
    embedding_type -- of the embedding, likewise; a tied model has this one matrix for both
    patterns       -- of the nonzero weights of each matrix that `prune` pruned, by its name without `.weight`
    pattern        -- of all matrices of the blocks instead, of a model that was pruned elsewhere
    attention      -- the manifest's section of sparse attention (`formats.attention`); None: every token is read
    neurons        -- how often each neuron was active, for formats that store them by it
    gates          -- the order in which these store gates, one of `kinds.GATE_ORDERS`
    encoded        -- matrices that were encoded before, by the names of the artifact's tensors
    notes          -- what the user is told beside the format's own
    device         -- where the encoders run
    workspace      -- their memory on the CPU
    """

    rules: Rules = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    output_type: str = "auto"
    embedding_type: str = "auto"
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    pattern: Pattern | None = None
    attention: Mapping[str, Any] | None = None
    neurons: NeuronCounts | None = None
    gates: str = GATE_ORDERS[0]
    encoded: Encoded = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    workspace: Workspace = field(default_factory=Workspace, compare=False, repr=False)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    shape   -- as stored, in weights, slowest dimension first
    type    -- a row of `blocks.table.BLOCKS`
    logical -- shape without padding; None: as stored
    weights -- whether it holds weights of the model, not a site's rule or what follows from the configuration
    padding_rows -- rows of zeros after the logical ones; of each expert, where it holds experts
    """

    name: str
    shape: tuple[int, ...]
    type: str
    logical: tuple[int, ...] | None = None
    weights: bool = True
    padding_rows: int = 0

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.shape if self.logical is None else self.logical

    @property
    def nbytes(self) -> int:
        """Bytes as stored, padding between tensors not counted."""
        return stored_bytes(self.type, math.prod(self.shape))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the name of what is worked on before the message of a `PackingError`."""
    try:
        yield
    except PackingError as error:
        raise PackingError(f"{what}: {error}") from error


@dataclass(frozen=True)
class PlannedGroup:
    """Tensors that are made together and stand one after the other, such as the values of a matrix and their scales.

    produce -- makes the bytes of each, uint8 of any shape on any device, when their turn comes
    """

    tensors: tuple[PlannedTensor, ...]
    produce: Callable[[], Sequence[torch.Tensor]]

    def data(self) -> Sequence[torch.Tensor]:
        """What `produce` makes. Raises `PackingError` naming the first tensor where they cannot be encoded."""
        with naming(self.tensors[0].name):
            made = self.produce()
        for tensor, data in zip(self.tensors, made, strict=True):
            if data.nbytes != tensor.nbytes:
                raise RuntimeError(f"{tensor.name}: {data.nbytes} bytes were made, {tensor.nbytes} planned")
        return made


def alone(tensor: PlannedTensor, produce: Callable[[], torch.Tensor]) -> PlannedGroup:
    """A tensor that is made by itself, as most are."""
    return PlannedGroup((tensor,), lambda: (produce(),))


def offsets(start: int, tensors: Iterable[PlannedTensor], alignment: int = 1) -> list[int]:
    """The offsets at which tensors begin behind `start` bytes, and the file's end; each begins at a multiple."""
    return list(accumulate(size + -size % alignment for size in (start, *(tensor.nbytes for tensor in tensors))))


@dataclass(frozen=True)
class TensorFile:
    """A file to write: a header, then the tensors of groups at their `offsets`, zeros between them."""

    path: Path
    header: bytes
    groups: Sequence[PlannedGroup]
    alignment: int = 1

    @cached_property
    def offsets(self) -> list[int]:
        """The offsets at which tensors begin, and the file's end, in bytes."""
        return offsets(len(self.header), tensors_of(self.groups), self.alignment)


WriteFiles = Callable[[Sequence[TensorFile], int], Mapping[str, str]]
"""Takes files and how many groups to make at a time; writes the files, and returns the SHA-256 of each tensor."""

Measure = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """An artifact to write, in one of the containers.

    groups  -- in the order in which they are stored
    notes   -- where it differs from what was asked, a sentence each, for the user
    at_once -- how many groups to make, hash and write side by side; so many are in memory, and where it is one the
               one before it, too
    measure -- (finished artifact, before it gets its name) -> the manifest's score; None: it has none
    check   -- (the finished artifact, its name to come) raises `PackingError` where it cannot be opened
    """

    format: str
    groups: tuple[PlannedGroup, ...]
    notes: tuple[str, ...] = ()
    at_once: int = 1
    measure: Measure | None = None
    check: Callable[[Path, Path], None] = lambda made, output: None

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """The tensors of all groups."""
        return tensors_of(self.groups)

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of the finished artifact, headers and padding included."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The hash of all that is known of the artifact before its tensors are made."""

    @abstractmethod
    def files(self, path: Path) -> list[TensorFile]:
        """The files with tensors of the artifact at a path."""

    @abstractmethod
    def write(self, path: Path, overwrite: bool = False, write_files: WriteFiles | None = None) -> None:
        """Make the artifact, whole or not at all.

        write_files -- writes the files with tensors; None: this process alone does

        Raises `OutputError` where the output exists or the disk refuses it, `PackingError` naming a tensor that cannot
        be encoded, of several always the same one, and `CheckpointError` where the model is seen to have changed since
        it was opened.
        """

    def with_beside(self, beside: Callable[[Path], Mapping[str, str]]) -> "Plan":
        """The plan with files beside the sealed ones, made from the finished artifact; a single file has no room."""
        return self

    def with_measure(self, measure: Measure) -> Self:
        """Return the plan of an artifact that is measured once it is finished."""
        return replace(self, measure=measure)

    @property
    def bits_per_weight(self) -> float:
        """The bits of everything in the artifact, over the model's weights, as `inspect` has it."""
        return 8 * self.total_bytes / sum(math.prod(t.logical_shape) for t in self.tensors if t.weights)


def tensors_of(groups: Iterable[PlannedGroup]) -> tuple[PlannedTensor, ...]:
    """The tensors of groups, one after the other."""
    return tuple(tensor for group in groups for tensor in group.tensors)


def manifest_shapes(tensors: Iterable[PlannedTensor]) -> dict[str, dict[str, Any]]:
    """What the manifest says of each matrix: `{"shape": [rows, columns], "padding_rows": n}`; where it is of experts,
    the shape begins with how many there are, and the padding is that of each."""
    shapes = {}
    for tensor in tensors:
        logical = tensor.logical_shape
        if len(logical) > 1:
            shapes[tensor.name] = {"shape": list(logical), "padding_rows": tensor.padding_rows}
    return shapes
