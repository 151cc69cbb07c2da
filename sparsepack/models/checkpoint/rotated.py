"""A checkpoint in another basis: the same function, its residual stream written in other coordinates.

With x = h / rms(h), a norm's output is diag(w) x. The length of h is the same in every orthonormal basis Q, so that
h' = Q^T h is what flows, and every output stays as it was, once the norms' weights w are folded into what reads them:

    embedding      E Q
    readers        W diag(w) Q        q, k, v, gate and up; their biases are outputs and stay
    writers        Q^T W, Q^T b       o and down
    output matrix  W diag(w) Q        of a tied model W = E: it becomes a matrix of its own
    norms          1

This is the invariance of SliceGPT (2401.15024) and QuaRot (2404.00456). `families.ResidualStream` says who reads and
who writes. All products are taken in float64.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.checkpoint import HEAD, Checkpoint
from sparsepack.models.checkpoint.sources import ChangedSource
from sparsepack.models.families import stream_of
from sparsepack.models.precision import HALVES, type_name

PIECE = 1 << 22
"""This many weights are in float64 at one time."""


def stored_type(asked: str, own: torch.dtype) -> torch.dtype:
    """The type in which a tensor of a rotated checkpoint is stored: the one asked for; for "auto" its own, or float32
    where its own has 16 bits, since rounding a second time would make another model of it."""
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    return torch.float32 if own in HALVES else own


def rotated(checkpoint: Checkpoint, basis: Tensor | None, weights: str = "auto", device: str = "cpu") -> Checkpoint:
    """The checkpoint with its residual stream in the basis of the columns of `basis`; tensors are made as they are
    read. Its hash is that of the checkpoint itself.

    basis   -- orthogonal, float64 [hidden, hidden]; None: norms are folded and nothing is turned, which is what is
               known before there is a basis
    weights -- the type in which tensors are stored, as `stored_type` has it
    device  -- where they are made

    Raises `CheckpointError` for a model that cannot be rotated; reading does for what `weights` cannot hold.
    """
    fold = _fold(checkpoint, basis, weights, device)
    source = checkpoint.source
    shapes = {**source.shapes, HEAD: source.shapes[HEAD if HEAD in source.shapes else checkpoint.family.embedding]}
    entries = {name: (fold.type_of(name), shape) for name, shape in shapes.items()}
    config = copy.deepcopy(checkpoint.config)
    config.tie_word_embeddings = False
    config.dtype = stored_type(weights, checkpoint.dtype)
    return replace(checkpoint, config=config, source=ChangedSource(source, fold.tensor, entries))


def rotated_config(config: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, object]:
    """What config.json of a rotated checkpoint says, from what that of the checkpoint it was made from says."""
    dtype = "torch_dtype" if "torch_dtype" in config else "dtype"  # its name in files of older programs
    return {**config, "tie_word_embeddings": False, dtype: type_name(checkpoint.dtype)}


@dataclass(frozen=True)
class _Fold:
    """What becomes of a checkpoint's tensors. By name: the norm whose weights are folded into a matrix that reads the
    stream (None: none are), the matrices and biases that write it, and the norms."""

    checkpoint: Checkpoint
    basis: Tensor | None
    weights: str
    device: torch.device
    readers: Mapping[str, str | None]
    writers: frozenset[str]
    norms: frozenset[str]

    def type_of(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        source, family = self.checkpoint.source, self.checkpoint.family
        return stored_type(self.weights, source.dtypes[name if name in source.dtypes else family.embedding])

    def tensor(self, name: str) -> Tensor:
        """A tensor of the rotated checkpoint, on the CPU."""
        stored, dtype = self.checkpoint.tensor(name), self.type_of(name)
        if name in self.norms:
            return torch.ones_like(stored, dtype=dtype)
        if name in self.readers:
            made = self._turned(stored, self._scale(self.readers[name]), dtype)
        elif name in self.writers and stored.dim() == 1:
            made = self._turned(stored[None], None, dtype)[0]
        elif name in self.writers:
            made = self._turned(stored.t(), None, dtype).t().contiguous()
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

    def _turned(self, rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Vectors of the residual stream [N, hidden] by rows, scaled by `scale` [hidden], in the basis."""
        made = torch.empty(rows.shape, dtype=dtype)
        step = max(PIECE // rows.shape[1], 1)
        for given, place in zip(torch.split(rows, step), torch.split(made, step), strict=True):
            piece = given.to(self.device, torch.float64)
            if scale is not None:
                piece = piece * scale
            if self.basis is not None:
                piece = piece @ self.basis
            place.copy_(piece.to(dtype))
        return made


def _fold(checkpoint: Checkpoint, basis: Tensor | None, weights: str, device: str) -> _Fold:
    family = checkpoint.family
    stream = stream_of(family, checkpoint.name)
    last = f"{family.backbone}.{stream.last}.weight"
    readers: dict[str, str | None] = {family.embedding: None, HEAD: last}
    writers: set[str] = set()
    for layer in range(checkpoint.layers):
        block = family.block(layer)
        for site, norm in stream.readers.items():
            of_site = f"{block}.{family.norms[norm]}.weight"
            readers |= {f"{block}.{projection}.weight": of_site for projection in family.projections[site]}
        for site in stream.writers:
            for projection in family.projections[site]:
                writers |= {f"{block}.{projection}.weight", f"{block}.{projection}.bias"}
    norms = {norm for norm in readers.values() if norm is not None}
    place = torch.device("cpu" if device == "mps" else device)  # Apple's GPUs have no float64
    turned = None if basis is None else basis.to(place, torch.float64)
    return _Fold(checkpoint, turned, weights, place, readers, frozenset(writers), frozenset(norms))
