"""Products of many positions with matrices of Q4_K as they are stored (`kernels/products/grouped_product.cu`)."""

import torch
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.kernel import Kernel, blocks_at_once, kernel, launch
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag

BLOCK = "Q4_K"
TOKENS = (16, 32, 64)
"""A block of threads takes so many places at a time."""
MOST_BANDS = 2
"""And at most so many bands of a matrix."""
MOST_POSITIONS = TOKENS[-1]
"""For up to this many positions `sums_of_few` reads a weight once (an H200, Qwen3.6-27B's shape, 128 positions, for
which it was twice: 48.9 ms; by cuBLAS with weights that are decoded first 46.4; 32 positions: 22.8 ms)."""
MOST_SPLITS = 32
_STAGES, _COLUMNS = 4, 32


def grouped_product(
    matrix: CudaZigzag,
    x: Tensor,
    y: Tensor,
    *,
    tokens: int,
    parts: int,
    experts: int = 1,
    order: Tensor | None = None,
    ends: Tensor | None = None,
    each: int = 1,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Put y = W x + bias of every place on the current stream.

    matrix      -- of so many experts, which lie one after the other
    x           -- float16 [places / each, columns], contiguous: place n takes row n / each
    y           -- float32 [splits, places, rows]: of as many splits of the columns, which add up
    order, ends -- of `experts.order_by_expert`; None: there is one matrix, with which every place is multiplied
    factor      -- float32 [places / each], of x, by which and by the matrix's scale products are multiplied; None: not
    tokens      -- places that a block of threads takes at a time, of `TOKENS`
    parts       -- blocks that divide an expert's places
    """
    splits, places, rows = y.shape
    tile_bands = matrix.config.tile_bands
    tiles, bands = matrix.blocks.shape[0] // experts, min(tile_bands, MOST_BANDS)
    launch(
        _kernel(matrix, tokens),
        (tiles * tile_bands // bands * splits, experts * parts),
        128 * bands,
        *(matrix.blocks, matrix.columns, rows, tiles, tile_bands, matrix.gate_bands, matrix.fp16_scale),
        *(order, ends, places, parts, each, splits, x),
        *(factor, 1 / matrix.fp16_scale, matrix.row_scale, bias, y),
        shared=_shared(bands, tokens),
    )


def takes(matrix: CudaZigzag, positions: int) -> bool:
    """Whether `sums_of_few` is for so many positions with a matrix."""
    return matrix.block == BLOCK and matrix.on_card and 0 < positions <= MOST_POSITIONS


def sums_of_few(matrix: CudaZigzag, x: Tensor) -> Tensor:
    """The products of few positions: x float16 [S, columns] -> float32 [S, rows], times the matrix's `fp16_scale`."""
    positions = len(x)
    tokens = next(size for size in TOKENS if positions <= size)
    bands = min(matrix.config.tile_bands, MOST_BANDS)
    pieces = matrix.blocks.shape[0] * matrix.config.tile_bands // bands
    at_once = blocks_at_once(_kernel(matrix, tokens), x.device, 128 * bands, _shared(bands, tokens))
    # Of one split's time: what a sum costs that is written and read once more.
    of_sum = 8 * positions * BAND_ROWS * pieces / (at_once * matrix.columns * zigzag.block_bytes(BLOCK))
    most = max(1, min(MOST_SPLITS, matrix.columns // (_STAGES * _COLUMNS)))
    splits = min(range(1, most + 1), key=lambda n: -(-pieces * n // at_once) / n + (n > 1) * n * of_sum)
    y = torch.empty(splits, positions, matrix.rows, device=x.device)
    grouped_product(matrix, x, y, tokens=tokens, parts=1)
    return y[0] if splits == 1 else y.sum(0)


def _kernel(matrix: CudaZigzag, tokens: int) -> Kernel:
    tile_bands, aligned = matrix.config.tile_bands, int(matrix.columns % 8 == 0)
    bands = min(tile_bands, MOST_BANDS)
    whole = f"WHOLE_TILES={int(bands == tile_bands)}"
    defines = (f"BANDS={bands}", f"TOKENS={tokens}", f"STAGES={_STAGES}", f"ALIGNED={aligned}", whole)
    return kernel("grouped_product", "grouped_product", defines, matrix.blocks.device.index or 0)


def _shared(bands: int, tokens: int) -> int:
    """Bytes of shared memory: the ring with its barriers, places and rows, and of each warp scales and minima."""
    pitch = bands * zigzag.block_bytes(BLOCK) + (16 if bands == 2 else 0)
    stage = _COLUMNS * pitch + tokens * (2 * _COLUMNS + 16)
    return _STAGES * (stage + 8) + 8 * tokens + 4 * bands * 8 * _COLUMNS
