"""A slid matrix as it is stored: values of a type, their positions packed, a scale for each row.

Made of some rows at a time: what one step leaves for the next then stays in a cache, and takes little memory.
"""

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.codecs.slide import Slide, pack_positions, slide
from sparsepack.formats.codecs.symmetric import STEPS, quantise_rows
from sparsepack.models.records.groups import check_pattern

PIECE, CUDA_PIECE = 1 << 20, 1 << 23
"""This many weights are in work at a time, on a CPU and on a CUDA device: fewer would cost more in calls; a weight
takes some 20 bytes with what is made of it."""


def encode(
    weight: Tensor, how: Slide, dtype: torch.dtype, steps: float | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slide a matrix and quantise it to `dtype`, one of `symmetric.STEPS`; or keep its values, in any other type.

    steps -- as `symmetric.quantise_rows` takes it
    scale -- float32 [rows] of values that are quantised already, and that `dtype` holds exactly; they are slid alone

    weight: [rows, columns] of float32, float16 or bfloat16. Returns values, `dtype` [rows, how.stored(columns)],
    positions as `pack_positions` has them, and scales, float32 [rows], or None where nothing is quantised.

    Raises `PackingError` naming the first group without the pattern, or where a value is not finite.
    """
    rows, stored = len(weight), how.stored(weight.shape[1])
    values = torch.empty(rows, stored, dtype=dtype, device=weight.device)
    positions = torch.empty(rows, -(-stored // 4), dtype=torch.uint8, device=weight.device)
    quantised, scale = scale is not None, torch.empty(rows, device=weight.device) if scale is None else scale
    step = max((CUDA_PIECE if weight.is_cuda else PIECE) // max(weight.shape[1], 1), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        try:
            slid, within = slide(weight[part], how)
        except PackingError:
            check_pattern(weight, how.pattern)  # which counts rows from the first of all
            raise
        if dtype in STEPS and not quantised:
            slid, scale[part] = quantise_rows(slid, dtype, steps)
        values[part], positions[part] = slid, pack_positions(within)
    return values, positions, scale if dtype in STEPS else None
