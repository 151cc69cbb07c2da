"""Directions among which every channel is spread evenly: a Hadamard matrix, all of whose numbers are 1 or -1, with the
signs of its rows drawn at random (QuaRot, 2404.00456).

A matrix of order n is the Kronecker product of one of order m and of Sylvester's of a power of two. Paley's are of the
order m = q + 1 for a prime q of the form 4 k + 3, and m = 2 (q + 1) for one of the form 4 k + 1: 12, 20, 24, 28, 36,
44, 60, 84 and so on, which is enough for the widths that models have.
"""

import math

import torch
from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.errors import RotationError
from sparsepack.models.checkpoint.bases import Bases
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.heads import heads_of_config
from sparsepack.rotation.options import RotateOptions
from sparsepack.workers.resume import ResumeState


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `RotationError` where no Hadamard matrix of the model's width is known here."""
    hidden = int(checkpoint.config.hidden_size)
    if _inner_order(hidden) is None:
        raise RotationError(
            f"{checkpoint.name}: no Hadamard matrix for its {hidden} channels is known here; take the basis pca"
        )


def bases(checkpoint: Checkpoint, calibration: Calibration, options: RotateOptions, resume: ResumeState) -> Bases:
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
