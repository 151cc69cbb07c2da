"""The kinds of bases, a row each. A new one is a row here, its name in `options.BASES`, and a file with `bases`.

Directions among which every channel is spread evenly: a Hadamard matrix, all of whose numbers are 1 or -1, with the
signs of its rows drawn at random (QuaRot, 2404.00456).

A matrix of order n is the Kronecker product of one of order m and of Sylvester's of a power of two. Paley's are of the
order m = q + 1 for a prime q of the form 4 k + 3, and m = 2 (q + 1) for one of the form 4 k + 1: 12, 20, 24, 28, 36,
44, 60, 84 and so on, which is enough for the widths that models have.

Which consecutive blocks make a segment with a basis of its own: where one basis would lose most.

A segment's basis Q are the eigenvectors of its blocks' second moments M, pooled. What skipping the smaller half of the
channels loses in a block is the smaller half of diag(Q^T M Q), as a share of the trace of M. The segments are those for
which the sum over all blocks is least, by dynamic programming. Blocks whose moments the calibration pooled stay in one
segment.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.training import Train
from sparsepack.errors import RotationError
from sparsepack.formats.table import FORMATS, Format
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import Bases
from sparsepack.models.hf_config import heads_of_config
from sparsepack.progress import progress


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `RotationError` where no Hadamard matrix of the model's width is known here."""
    hidden = int(checkpoint.config.hidden_size)
    if _inner_order(hidden) is None:
        raise RotationError(
            f"{checkpoint.name}: no Hadamard matrix for its {hidden} channels is known here; take the basis pca"
        )


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions) -> Bases:
    """The one basis of a model, and those of its values where there are Hadamard matrices of the size of its heads, by
    sizes and the seed alone."""
    generator = torch.Generator().manual_seed(options.seed)
    heads = heads_of_config(checkpoint.config)
    of_stream, of_head = hadamard(int(checkpoint.config.hidden_size)), hadamard(heads.head_dim)
    assert of_stream is not None  # `check_model` was asked
    stream = _signed(of_stream, 1, generator)[0]
    if of_head is None:
        return Bases(matrices=(stream,))
    values = [_signed(of_head, heads.kv_heads, generator) for _ in range(checkpoint.layers)]
    return Bases(matrices=(stream,), values=tuple(values))


def _signed(matrix: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Orthogonal matrices of a Hadamard matrix [n, n], each with other signs of its rows: float64 [count, n, n]."""
    negative = torch.randint(0, 2, (count, len(matrix), 1), generator=generator).bool()
    return torch.where(negative, -matrix, matrix) / math.sqrt(len(matrix))


def hadamard(order: int) -> Tensor | None:
    """A matrix H of 1 and -1 with H H^T = order I: float64 [order, order]; None where none is known here."""
    if (inner := _inner_order(order)) is None:
        return None
    made = _paley(inner) if inner > 1 else torch.ones(1, 1).double()
    while len(made) < order:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made


def _inner_order(order: int) -> int | None:
    """The smallest order, 1 or one of Paley's, of which `order` is a power of two times as large."""
    doubled = order & -order  # the largest power of two in it
    while doubled:
        inner = order // doubled
        if inner == 1 or (inner % 4 == 0 and (_prime(inner - 1) or _twice_paley(inner))):
            return inner
        doubled //= 2
    return None


def _twice_paley(order: int) -> bool:
    return order // 2 % 4 == 2 and _prime(order // 2 - 1)


def _paley(order: int) -> Tensor:
    if _prime(order - 1):
        return torch.eye(order).double() + _conference(order - 1)
    # Each zero of the matrix becomes [[1, -1], [-1, -1]], each other number that times [[1, 1], [1, -1]].
    of_zeros, of_others = torch.tensor([[[1.0, -1], [-1, -1]], [[1, 1], [1, -1]]]).double()
    half = order // 2
    return torch.kron(torch.eye(half).double(), of_zeros) + torch.kron(_conference(half - 1), of_others)


def _conference(prime: int) -> Tensor:
    """The matrix [prime + 1, prime + 1] of zeros on the diagonal and 1 or -1 elsewhere whose rows are orthogonal: of a
    prime 4 k + 1 symmetric, of one 4 k + 3 antisymmetric."""
    squares = {number**2 % prime for number in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]).double()
    numbers = torch.arange(prime)
    made = torch.ones(prime + 1, prime + 1).double()
    made[0, 0] = 0
    made[1:, 1:] = character[(numbers[:, None] - numbers[None]) % prime]
    if prime % 4 == 3:
        made[1:, 0] = -1
    return made


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


Run = tuple[range, Tensor]
"""A run of consecutive blocks, and the mean of its second moments, float64 [hidden, hidden]."""

_STEPS = 10**9
"""Losses are compared in so many steps of a block's whole energy, so that those that are the same but for rounding
are."""


def check_count(checkpoint: Checkpoint, segments: int, runs: int) -> None:
    """Raise `RotationError` for more segments than runs of blocks that have second moments."""
    if segments <= runs:
        return
    blocks = f"{checkpoint.layers} blocks"
    why = "" if runs == checkpoint.layers else f", of which a calibration keeps second moments in {runs} runs"
    raise RotationError(f"{checkpoint.name}: {segments} segments of {blocks}{why}; expected at most {runs}")


def pooled(runs: Sequence[Run]) -> Tensor:
    """The mean second moments of all blocks of some runs, float64 [hidden, hidden]."""
    total = sum((len(blocks) * moments for blocks, moments in runs), torch.zeros_like(runs[0][1]))
    return total / sum(len(blocks) for blocks, _ in runs)


def chosen_segments(runs: Sequence[Run], count: int, device: str = "cpu") -> list[Sequence[Run]]:
    """The runs of each of `count` segments, of all that there are, by what is lost. Where that is the same, segments
    are as even as they can be, and begin early."""
    ends: Sequence[int] = [len(runs)]
    if count == len(runs):
        ends = range(1, len(runs) + 1)
    elif count > 1:
        possible = _possible(len(runs), count)
        with progress("choosing segments", len(possible)) as advance:
            losses = {}
            for first, end in possible:
                segment = runs[first:end]
                shares = zip(segment, energy_lost(segment, device), strict=True)
                losses[first, end] = sum(len(blocks) * round(share * _STEPS) for (blocks, _), share in shares)
                advance()
        ends = _best([len(blocks) for blocks, _ in runs], losses, count)
    return [runs[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def energy_lost(runs: Sequence[Run], device: str = "cpu") -> list[float]:
    """The share of the energy that skipping half of the channels loses in a block of each run, in one basis for all."""
    place = torch.device("cpu" if device == "mps" else device)  # Apple's GPUs have no float64
    basis = torch.linalg.eigh(pooled(runs).to(place)).eigenvectors
    lost = []
    for _, moments in runs:
        sizes = (basis * (moments.to(place) @ basis)).sum(0).clamp_min(0).sort().values
        whole = float(sizes.sum())
        lost.append(float(sizes[: len(sizes) // 2].sum()) / whole if whole else 0.0)
    return lost


def _possible(runs: int, count: int) -> list[tuple[int, int]]:
    """First run and end of each segment that is one of `count`."""
    found = []
    for first in range(runs):
        for end in range(first + 1, runs + 1):
            # Its number among the segments: at least one before it where there are runs, and as many after it.
            least = max(int(first > 0), count - 1 - (runs - end))
            most = min(first, count - 1 - int(end < runs))
            if least <= most:
                found.append((first, end))
    return found


def _best(lengths: Sequence[int], losses: Mapping[tuple[int, int], int], count: int) -> tuple[int, ...]:
    """The ends of the segments that lose least.

    lengths -- how many blocks each run has
    losses  -- of each possible segment
    """

    @cache
    def best(first: int, parts: int) -> tuple[int, int, tuple[int, ...]]:
        """Loss, sum of squares and ends of the best `parts` segments from a run on."""
        ends = [len(lengths)] if parts == 1 else range(first + 1, len(lengths) - parts + 2)
        candidates = []
        for end in ends:
            loss, squares, later = best(end, parts - 1) if parts > 1 else (0, 0, ())
            blocks = sum(lengths[first:end])
            candidates.append((losses[first, end] + loss, blocks**2 + squares, (end, *later)))
        return min(candidates)

    return best(0, count)[2]


@dataclass(frozen=True)
class Basis:
    """A kind of basis.

    module -- what finds it, by two functions. `check_model(checkpoint)` raises `RotationError` for a model that has no
              such basis. `bases(checkpoint, calibration, options)` returns the `Bases` of its segments, float64 on the
              CPU. One that is trained has a third, `learn_bases(checkpoint, calibration, start, options, train)`
    needs  -- what the calibration must have for it besides its text: nothing, or the second moments of the stream
    suits  -- whether a format's artifacts lose less in it
    why    -- a clause for people: what it does for these
    trains -- whether it trains on the model's output, and holds the whole model
    """

    module: str
    needs: Literal["nothing", "moments"]
    suits: Callable[[Format], bool]
    why: str
    trains: bool = False

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `RotationError` for a model that has no such basis."""
        self._implementation.check_model(checkpoint)

    def find(self, checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions) -> Bases:
        """The bases of a model's segments, or those from which they are learnt."""
        found: Bases = self._implementation.bases(checkpoint, calibration, options)
        return found

    def learn(
        self, checkpoint: Checkpoint, calibration: Calibration, start: Bases, options: RotateOptions, train: Train
    ) -> Bases:
        """The bases that training makes of those of the start, where this one `trains`."""
        found: Bases = self._implementation.learn_bases(checkpoint, calibration, start, options, train)
        return found

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of the formats that it suits."""
        return tuple(name for name, format in FORMATS.items() if self.suits(format))

    @property
    def _implementation(self) -> Any:
        return importlib.import_module(self.module)


ROTATIONS: Mapping[str, Basis] = {
    "pca": Basis(
        "sparsepack.calibrate.pca",
        "moments",
        lambda format: format.thresholds,
        "channels differ as far as they can, so that skipping the small ones loses less",
    ),
    "hadamard": Basis(
        "sparsepack.calibrate.bases",
        "nothing",
        lambda format: format.weight_sparsity and format.matrices.block in ("I8", "F8_E4M3"),
        "channels are even, so that rounding their inputs to 8 bits loses less",
    ),
    "learnt": Basis(
        "sparsepack.calibrate.learnt_bases",
        "moments",
        lambda format: format.thresholds,
        "its output changes least where small channels are skipped",
        trains=True,
    ),
}
"""Each basis stands under its name; `options.BASES` lists the names."""
