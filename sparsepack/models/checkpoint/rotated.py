"""A checkpoint in another basis: the same function, its residual stream and its values written in other coordinates.

With x = h / rms(h), a norm's output is diag(w) x. The length of h is the same in every orthonormal basis Q, so that
h' = Q^T h is what flows, and every output stays as it was, once the norms' weights w are folded into what reads them:

    embedding      E Q
    readers        W diag(w) Q        q, k, v, gate and up, routers; their biases are outputs and stay
    writers        Q^T W, Q^T b       o and down
    output matrix  W diag(w) Q        of a tied model W = E: it becomes a matrix of its own
    norms          1

Where segments of the blocks have bases of their own, Q is that of the block: the embedding has the first one and the
output matrix the last one. Before the first block of a later segment h' is multiplied by a matrix (`bases.Bases`).

What attention gives is a weighted mean of values, so that the values of a KV head may be turned, too, by an R that o
takes back: rows R^T W of v (and of its bias), and W R for the columns of o of each query head that shares the KV head.

These are the invariances of SliceGPT (2401.15024) and QuaRot (2404.00456). `family.ResidualStream` says who reads and
who writes. All products are taken in float64.

The basis of a rotated model, found from its embedding and that of the model it was made from.

The embedding is E in one and E Q in the other, quantised perhaps. Of all orthogonal matrices the one that brings E
nearest to what is stored is U V^T, with U S V^T the singular values and vectors of E^T (E Q) (orthogonal Procrustes,
Schoenemann 1966). With E the identity that is the orthogonal matrix nearest to a stored one.

The bases in which a model's residual stream is written, one for each segment of its blocks, and those of the values
of its attention, one for each KV head.
"""

import copy
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite, brought, stored_type, type_name
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import segmented_config
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.families import stream_of
from sparsepack.models.family import ATTN_OUT, HEAD, Family
from sparsepack.models.hf_config import heads_of_config


@dataclass(frozen=True)
class FoundBasis:
    """An orthogonal matrix that was found.

    basis       -- float64 [hidden, hidden]
    residual    -- of the embedding in that basis: its difference from what is stored, over what is stored
    uncertainty -- by how much the basis itself may be off, relative: infinite where the embedding does not say
    """

    basis: Tensor
    residual: float
    uncertainty: float


def found_basis(pairs: Iterable[tuple[Tensor, Tensor]]) -> FoundBasis:
    """The basis, from pairs of the same rows [N, hidden] of the embedding and of what is stored."""
    products: Tensor | None = None
    own = stored = 0.0
    rows = 0
    for before, after in pairs:
        one, other = before.double(), after.double()
        product = one.t() @ other
        products = product if products is None else products.add_(product)
        own += float(one.square().sum())
        stored += float(other.square().sum())
        rows += len(one)
    assert products is not None
    if not torch.isfinite(products).all():
        return FoundBasis(torch.eye(len(products)).double(), math.inf, math.inf)
    left, sizes, right = torch.linalg.svd(products)
    squares = max(own + stored - 2 * float(sizes.sum()), 0.0)
    residual = math.sqrt(squares / stored) if stored else math.inf
    # The basis itself takes in a part of the mistakes: so many numbers of them as an orthogonal matrix has.
    left_over = rows * len(sizes) - len(sizes) * (len(sizes) - 1) // 2
    return FoundBasis(left @ right, residual, _uncertainty(sizes, squares / max(left_over, 1)))


def _uncertainty(sizes: Tensor, variance: float) -> float:
    """How far the basis is off, relative, where every stored number is off by a mistake of that variance of its own.

    A small turn in the plane of two directions i, j changes what they carry by the mistakes along them: its variance is
    variance / (sizes_i + sizes_j), of sizes that are the squared singular values of the embedding.
    """
    hidden = len(sizes)
    if float(sizes[-1]) <= torch.finfo(sizes.dtype).eps * hidden * float(sizes[0]):
        return math.inf  # directions that the embedding does not have
    turns = float((1 / (sizes[:, None] + sizes[None])).sum())
    return math.sqrt(variance * turns / hidden)


FROM_START = (0,)
"""The one segment of a model whose stream keeps its basis."""
_STREAM, _VALUES = "stream.", "values."


@dataclass(frozen=True)
class Bases:
    """A basis for each segment, a run of consecutive blocks.

    starts   -- the first block of each segment, ascending from 0
    matrices -- orthogonal [hidden, hidden], float64 unless they are being trained, whose columns are the directions;
                none: they are not known yet, and nothing is turned
    values   -- of each block, orthogonal [kv_heads, D, D], a matrix like these for the values of each KV head; none:
                values stay as they are
    """

    starts: tuple[int, ...] = FROM_START
    matrices: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The blocks before which the stream changes its basis."""
        return self.starts[1:]

    def segment(self, layer: int) -> int:
        """The number of a block's segment."""
        return bisect_right(self.starts, layer) - 1

    def of_block(self, layer: int) -> Tensor:
        """The basis of a block."""
        return self.matrices[self.segment(layer)]

    def change(self, layer: int) -> Tensor:
        """The matrix W of the boundary before a block: h' = h W^T takes h, a row in the basis before it, into the
        block's own. As h = s Q_a and h' = s Q_b are one stream s, W is Q_b^T Q_a."""
        segment = self.starts.index(layer)
        return self.matrices[segment].t() @ self.matrices[segment - 1]

    def tensors(self) -> dict[str, Tensor]:
        """The matrices, by the first blocks of their segments, and those of values, by their blocks: what `bases_of`
        reads."""
        stream = {f"{_STREAM}{start}": matrix for start, matrix in zip(self.starts, self.matrices, strict=True)}
        return stream | {f"{_VALUES}{layer}": matrices for layer, matrices in enumerate(self.values)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Bases":
        """The same with each tensor changed."""
        return Bases(self.starts, tuple(map(change, self.matrices)), tuple(map(change, self.values)))


def bases_of(tensors: Mapping[str, Tensor]) -> Bases:
    """The bases that `Bases.tensors` told of."""
    starts, blocks = (
        sorted(int(name.removeprefix(kind)) for name in tensors if name.startswith(kind)) for kind in (_STREAM, _VALUES)
    )
    matrices = tuple(tensors[f"{_STREAM}{start}"] for start in starts)
    return Bases(tuple(starts), matrices, tuple(tensors[f"{_VALUES}{layer}"] for layer in blocks))


PIECE = 1 << 22
"""This many weights are in float64 at one time."""


def rotated(checkpoint: Checkpoint, bases: Bases, weights: str = "auto", device: str = "cpu") -> Checkpoint:
    """The checkpoint with its residual stream and its values in other bases; tensors are made as they are read. The
    hash is that of the checkpoint itself.

    bases   -- of the segments and values; where none are known yet, norms are folded and nothing is turned
    weights -- the type in which tensors are stored, as `stored_type` has it
    device  -- where they are made

    Raises `CheckpointError` for a model that cannot be rotated; reading does for what `weights` cannot hold.
    """
    check_one_basis(checkpoint)
    fold = _fold(checkpoint, bases, weights, device)
    source, hidden = checkpoint.source, int(checkpoint.config.hidden_size)
    shapes = {**source.shapes, HEAD: source.shapes[HEAD if HEAD in source.shapes else checkpoint.family.embedding]}
    shapes |= dict.fromkeys(fold.changes, (hidden, hidden))
    entries = {name: (fold.type_of(name), shape) for name, shape in shapes.items()}
    config = copy.deepcopy(checkpoint.config)
    config.tie_word_embeddings = False
    config.dtype = stored_type(weights, checkpoint.dtype)
    made = changed_source(source, fold.tensor, entries)
    return replace(checkpoint, config=config, source=made, bases=bases.boundaries)


def check_one_basis(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model whose stream changes its basis already."""
    if checkpoint.bases:
        raise CheckpointError(
            f"{checkpoint.name}: rotated already, its residual stream changes its basis before block "
            f"{checkpoint.bases[0]}; expected the model that it was made from"
        )


def rotated_config(config: str, made: Checkpoint) -> str:
    """The config.json of a rotated checkpoint.

    config -- that of the checkpoint it was made from
    """
    values = json.loads(config)
    dtype = "torch_dtype" if "torch_dtype" in values else "dtype"  # its name in files of older programs
    values |= {"tie_word_embeddings": False, dtype: type_name(made.dtype)}
    text = f"{json.dumps(values, indent=2, ensure_ascii=False)}\n"
    return segmented_config(text, made.bases) if made.bases else text


@dataclass(frozen=True)
class _Fold:
    """What becomes of a checkpoint's tensors. By name: of a matrix that reads the stream its block, and the norm whose
    weights are folded into it (None: none are), the blocks of matrices and biases that write it, the norms, the blocks
    before which the stream changes its basis, and the bases [heads, D, D] of what makes or takes the channels of
    heads."""

    checkpoint: Checkpoint
    bases: Bases
    weights: str
    device: torch.device
    readers: Mapping[str, tuple[int, str | None]]
    writers: Mapping[str, int]
    norms: frozenset[str]
    changes: Mapping[str, int]
    heads: Mapping[str, Tensor]

    def type_of(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        if name in self.changes:
            return stored_type(self.weights, self.checkpoint.dtype)
        source, family = self.checkpoint.source, self.checkpoint.family
        return stored_type(self.weights, source.dtypes[name if name in source.dtypes else family.embedding])

    def tensor(self, name: str) -> Tensor:
        """A tensor of the rotated checkpoint, on the CPU."""
        dtype = self.type_of(name)
        if name in self.changes:
            known, hidden = bool(self.bases.matrices), int(self.checkpoint.config.hidden_size)
            return (self.bases.change(self.changes[name]).cpu() if known else torch.eye(hidden)).to(dtype)
        stored, heads = self.checkpoint.tensor(name), self.heads.get(name)
        if name in self.norms:
            return torch.ones_like(stored, dtype=dtype)
        if name in self.readers:
            layer, norm = self.readers[name]
            made = self._turned(stored, dtype, self._basis(layer), self._scale(norm), heads)
        elif name in self.writers and stored.dim() == 1:
            made = self._turned(stored[None], dtype, self._basis(self.writers[name]))[0]
        elif name in self.writers:
            columns = stored.to(self.device).mT  # there, since a CPU takes columns apart slowly
            made = self._turned(columns, dtype, self._basis(self.writers[name]), heads=heads).mT.contiguous().cpu()
        elif heads is not None:  # the bias of values
            made = self._turned(stored[:, None], dtype, heads=heads)[:, 0].contiguous()
        else:
            made = stored.to(dtype)
        if not all_finite(made):
            raise CheckpointError(
                f"{self.checkpoint.name}: {name} has values that {type_name(dtype)} cannot hold once it is rotated; "
                "store it in float32"
            )
        return made

    def _scale(self, norm: str | None) -> Tensor | None:
        return None if norm is None else self.checkpoint.tensor(norm).to(self.device, torch.float64)

    def _basis(self, layer: int) -> Tensor | None:
        return self.bases.of_block(layer) if self.bases.matrices else None

    def _turned(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        basis: Tensor | None = None,
        scale: Tensor | None = None,
        heads: Tensor | None = None,
    ) -> Tensor:
        """Vectors of the residual stream [N, hidden] by rows, or those of each expert [experts, N, hidden], scaled by
        `scale` [hidden], in a basis; on the device where the rows are. heads: the rows are the channels of heads, which
        are turned by these matrices, [heads, D, D]."""
        if rows.dim() == 3:
            return torch.stack([self._turned(of_expert, dtype, basis, scale) for of_expert in rows])
        made = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        step = max(PIECE // rows.shape[1], 1)
        if heads is not None:
            step = max(step // heads.shape[1], 1) * heads.shape[1]  # whole heads
            turns = iter(torch.split(heads, step // heads.shape[1]))
        for given, place in zip(torch.split(rows, step), torch.split(made, step), strict=True):
            piece = brought(given, self.device, torch.float64)
            if scale is not None:
                piece = piece * scale
            if basis is not None:
                piece = piece @ basis
            if heads is not None:
                turn = next(turns).transpose(1, 2)
                piece = (turn @ torch.unflatten(piece, 0, turn.shape[:2])).flatten(0, 1)
            place.copy_(piece.to(dtype))
        return made


def _fold(checkpoint: Checkpoint, bases: Bases, weights: str, device: str) -> _Fold:
    family, end = checkpoint.family, checkpoint.layers - 1
    stream = stream_of(family, checkpoint.name)
    last = f"{family.backbone}.{stream.last}.weight"
    readers: dict[str, tuple[int, str | None]] = {family.embedding: (0, None), HEAD: (end, last)}
    writers: dict[str, int] = {}
    for layer in range(checkpoint.layers):
        block, family = family.block(layer), checkpoint.family_at(layer)
        for site, norm in stream.readers.items():
            of_site = layer, f"{block}.{family.norms[norm]}.weight"
            modules = (*family.projections[site], *family.routers(site))
            readers |= {f"{block}.{family.weight(module)}": of_site for module in modules}
        for site in stream.writers:
            for projection in family.projections[site]:
                writers |= {f"{block}.{family.weight(projection)}": layer, f"{block}.{projection}.bias": layer}
    norms = {norm for _, norm in readers.values() if norm is not None}
    place = torch.device("cpu" if device == "mps" else device)  # Apple's GPUs have no float64
    moved = bases.map(lambda matrix: matrix.to(place, torch.float64))
    changes = {family.basis(layer): layer for layer in bases.boundaries}
    heads = _of_heads(checkpoint, moved)
    return _Fold(checkpoint, moved, weights, place, readers, writers, frozenset(norms), changes, heads)


def _of_heads(checkpoint: Checkpoint, bases: Bases) -> dict[str, Tensor]:
    """Which tensors are turned by which bases of values, by name: [heads, D, D]."""
    family, found = checkpoint.family, dict[str, Tensor]()
    group = heads_of_config(checkpoint.config).heads // max((len(matrices) for matrices in bases.values), default=1)
    for layer, matrices in enumerate(bases.values):
        value, output = value_and_output(family, layer)
        head_dim = matrices.shape[1]
        before = checkpoint.source.shapes[f"{value}.weight"][0] // head_dim - len(matrices)  # of q and k in one matrix
        stay = torch.eye(head_dim, dtype=matrices.dtype, device=matrices.device).expand(before, -1, -1)
        found |= dict.fromkeys((f"{value}.weight", f"{value}.bias"), torch.cat([stay, matrices]))
        found[f"{output}.weight"] = matrices.repeat_interleave(group, 0)
    return found


def value_and_output(family: Family, layer: int) -> tuple[str, str]:
    """The names of a block's v, or of the matrix whose last rows are v, and o."""
    block = family.block(layer)
    return f"{block}.{family.projections['attn_in'][-1]}", f"{block}.{family.projections[ATTN_OUT][0]}"
