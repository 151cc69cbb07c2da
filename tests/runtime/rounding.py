"""How far rounding alone moves logits: those of the reference with small random errors in what enters its products.

A router, a choice of tokens and a level of planes are decided by a comparison. At some position of a random model its
sides are nearly equal, and a backend that rounds may decide otherwise there, which changes logits by more than any
bound that notices a fault. The reference with errors does so at the same positions.
"""

from functools import partial
from typing import Any

import torch
from backends import TOLERANCE
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.reference.backend import ReferenceOperations, operations

ERROR = 2.0**-10
"""Standard deviation of the relative errors: some three times that of inputs and weights in float16."""
RUNS = 16


class _Inexact(ReferenceOperations):
    """The oracle, each input of a product with an error of its own. Zeros stay zeros."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __getattribute__(self, name: str) -> Any:
        function = super().__getattribute__(name)
        if name not in ("zigzag_gemv", "zigzag_matmul", "planes_matmul", "matmul"):
            return function

        def inexact(matrix: Any, x: Tensor, *of_product: Tensor) -> Tensor:
            error = ERROR * torch.randn(x.shape, generator=self._generator)
            return function(matrix, x * (1 + error), *of_product)  # type: ignore[no-any-return]

        return inexact


Ids = list[int] | list[list[int]]
"""Of one sequence, teacher-forced; or of several, [B, S], which take steps together."""


def reference_logits(packed: PackedModel, ids: Ids, sparse_from: int, cache_type: str, of: Any = operations) -> Tensor:
    """Logits [S, V] or [B, S, V] of the reference with a cache of this type. of: its operations"""
    tokens = torch.tensor(ids)
    new_decoder = partial(
        OperationsDecoder, packed, of, torch.device("cpu"), max(64, tokens.shape[-1]), None, cache_type
    )
    if tokens.dim() == 1:
        return new_decoder().teacher_forced(tokens, sparse_from, True)
    decoder = new_decoder(sequences=len(tokens))
    return torch.stack([decoder.step(column, True) for column in tokens.T.tolist()], dim=1)


def moved_by_rounding(packed: PackedModel, ids: Ids, sparse_from: int, cache_type: str = "f32") -> Tensor:
    """Changes of logits, [RUNS, S, V] or [RUNS, B, S, V]."""
    exact = reference_logits(packed, ids, sparse_from, cache_type)
    runs = (reference_logits(packed, ids, sparse_from, cache_type, _Inexact(seed)) for seed in range(RUNS))
    return torch.stack([run - exact for run in runs])


def check_logits(
    found: Tensor,
    expected: Tensor,
    backend: str,
    packed: PackedModel,
    ids: Ids,
    sparse_from: int,
    cache_type: str = "f32",
) -> None:
    """Logits of the last positions of ids [n, V], or of all [B, S, V], differ by less than the backend's tolerance, and
    where they do not, by no more than rounding moves them beside it."""
    off = (found.cpu() - expected.cpu()).abs().amax(-1)
    bounds = torch.full_like(off, TOLERANCE[backend])
    if backend != "reference" and (off >= bounds).any():
        moved = moved_by_rounding(packed, ids, sparse_from, cache_type).abs().amax(-1)
        assert moved.median() < 2 * TOLERANCE[backend], "rounding mostly moves this model as far as a fault would"
        bounds += moved.amax(0)[-len(off) :]
    assert (off < bounds).all(), f"off by {off.tolist()}; expected less than {bounds.tolist()}"
