"""Products with matrices in the host's memory, which the GPU shares with the processor: the GPU reads the first bands
over the bus while the processor multiplies the last rows, out of memory of its own
(`kernels/products/offloaded_product.cu`). Of planes the GPU multiplies the first ones of all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.tile_config import offloaded_tile_config
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output

REQUEST_THREADS, TAKE_THREADS = 1024, 256
ROWS_OF_A_BLOCK = 512
"""A block takes so many rows where nobody asks for their squares."""


@dataclass(frozen=True)
class OffloadedProduct:
    """A product that GPU and processor share: it says which rows are whose, and where results meet. Kernels read and
    write the tensors in the host's memory like their own.

    gpu_part    -- the first bands, which the GPU reads; of planes all, with the rest of the first tiles
    rows        -- of the whole matrix
    sums        -- float32 [B, gpu_part.rows]: what the GPU makes of them; products on one stream share it
    number      -- int32 [2]: of the step, as in `neurons.Division`
    before_list -- whether the product comes before the step has its number, from the first block's list or, where a
                   model has no lists, at the end
    abort       -- int32 [1], and the others as `runtime/hybrid/mailbox.py` draws them
    waited      -- int64 [1], to which the nanoseconds are added that the GPU waited
    limit       -- milliseconds to wait for an answer
    levels      -- uint8 [columns] in the mailbox, of planes; None: there are none
    x           -- float32 [B, columns], of planes: the input as both sides multiply it; products on one stream share it
    """

    gpu_part: CudaZigzag
    rows: int
    sums: Tensor
    number: Tensor
    before_list: bool
    abort: Tensor
    request_number: Tensor
    request_x: Tensor
    answer_number: Tensor
    answer: Tensor
    waited: Tensor
    limit: int
    levels: Tensor | None = None
    x: Tensor | None = None

    @property
    def gpu_rows(self) -> int:
        """The rows before those of the answer."""
        return self.rows - self.answer.shape[1]


def first_bands(matrix: CudaZigzag, bands: int) -> CudaZigzag:
    """The first bands of a matrix in the host's memory, whole tiles of them, for products that have only these."""
    tile_bands = matrix.config.tile_bands
    config = offloaded_tile_config(bands, matrix.columns, matrix.blocks.device, tile_bands)
    rows = min(matrix.rows, BAND_ROWS * bands)
    return replace(matrix, blocks=matrix.blocks[: bands // tile_bands], rows=rows, config=config)


def counting_rest(matrix: CudaZigzag, read: Tensor) -> CudaZigzag:
    """A matrix of planes of which a part lies elsewhere, with the counter of what products read there."""
    return matrix if matrix.rest is None else replace(matrix, rest=replace(matrix.rest, read=read))


def rest_of_first_bands(matrix: CudaZigzag, bands: int, columns: int = 0) -> CudaZigzag:
    """Such a matrix for products that read what lies elsewhere of the first bands, whole tiles of them, alone, and of
    the next tile of so many first columns."""
    assert matrix.rest is not None
    rest = replace(matrix.rest, tiles=bands // matrix.config.tile_bands, columns=columns)
    return replace(matrix, rest=rest)


def ask(of: OffloadedProduct, input: Input) -> None:
    """Ask the processor for the last rows of a product, on the current stream. What the product skips is zero there."""
    sequences, columns = of.request_x.shape
    planes, threshold = of.gpu_part.block if of.levels is not None else None, input.threshold
    of_levels = int(threshold is not None and threshold.dim() == 2)
    defines = (
        f"INPUTS={sequences}",
        f"GATED={0 if input.gated is None else 1 + input.plain}",
        f"ACTIVATION={input.gated or 0}",
        *(() if planes is None else (f"LEVELS={len(BLOCKS[planes].levels)}", f"OF_LEVELS={of_levels}")),
    )
    per_channel = int(threshold is not None and threshold.numel() > 1)
    skipped = input.skipped if planes is None else None  # else the product counts
    launch(
        kernel("offloaded_product", "request_rows", defines, of.sums.device.index or 0),
        (1,),
        REQUEST_THREADS,
        *(input.x, columns, input.norm, float(input.eps)),
        *(threshold, per_channel, input.offset, input.scales, of.rows, skipped),
        *(of.request_number, of.request_x, of.number, int(of.before_list), of.levels, of.x),
    )


def take(of: OffloadedProduct, output: Output) -> None:
    """Put y = the GPU's sums and the processor's answer, + bias + residual, on the current stream.

    output -- y and residual float32 [B, rows], maybe the same; squares float32 [B, parts]: parts of the sums of y^2
    """
    squares = output.squares
    sequences = len(of.answer)
    parts = -(-of.rows // ROWS_OF_A_BLOCK) if squares is None else squares.numel() // sequences
    launch(
        kernel("offloaded_product", "take_rows", (), of.sums.device.index or 0),
        (parts, sequences),
        TAKE_THREADS,
        *(of.sums, of.sums.shape[1], of.gpu_rows, of.answer_number, of.answer, of.rows, of.abort, of.limit),
        *(of.number, int(of.before_list), output.bias, output.residual, output.y, squares, of.waited),
    )


def multiply(
    of: OffloadedProduct, by: Callable[[CudaZigzag, Input, Output], None], input: Input, output: Output
) -> None:
    """The whole product: what `gemv` does, or `batch` for several sequences. by -- one of these"""
    ask(of, input)
    sums = of.sums if len(of.sums) > 1 else of.sums[0]
    if of.x is None:
        input = replace(input, skipped=None)  # counted for all rows already
    else:
        x = of.x if len(of.x) > 1 else of.x[0]
        input = Input(x, threshold=input.threshold, scales=input.scales, skipped=input.skipped)
    by(of.gpu_part, input, replace(output, y=sums, bias=None, residual=None, squares=None))
    take(of, output)


def count_step(number: Tensor) -> None:
    """Let a step without lists end, on the current stream: int32 [2], of the step, as in `neurons.Division`."""
    launch(kernel("offloaded_product", "count_step", (), number.device.index or 0), (1,), 1, number)
