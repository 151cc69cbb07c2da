"""Zigzag matrices on the GPU: how they are laid out there, loading, and turning them into 16-bit numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.formats.blocks.q4_k import scales_and_mins
from sparsepack.formats.blocks.q6_p import steps_and_centres
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS, codec_of, superblock_bytes
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.driver.memory import DividedPlace, Place, on_card
from sparsepack.runtime.cuda.products.tile_config import (
    CudaTileConfig,
    default_tile_config,
    measured_tile_config,
    planes_tile_bands,
    planes_tile_config,
)

LARGEST_FACTOR = 63  # of d: scales have 6 bits
PLANES_PARTS = (8, 64, 32, 32, 32, 32)
"""The bytes of a superblock's header and planes on the GPU."""
SCRATCH_BYTES = 1 << 28
"""This many bytes of a matrix are dequantised at a time."""


@dataclass(frozen=True)
class Rest:
    """What of a matrix of planes lies elsewhere, mostly in the host's memory.

    first  -- so many planes of a column lie with the matrix
    planes -- the others: uint8 [tiles, columns, bytes]
    tiles, columns -- of so many first tiles products read them, and of the next one of so many first columns; of the
              others somebody else multiplies them. A prompt is multiplied with all
    read   -- int64 [1], to which products add the bytes of a row of superblocks that columns have there by their
              levels; None: nobody counts
    """

    first: int
    planes: Tensor
    tiles: int
    read: Tensor | None = None
    columns: int = 0


@dataclass(frozen=True)
class CudaZigzag:
    """A zigzag matrix in the order in which `kernels/products/zigzag_gemv.cu` reads it.

    blocks        -- uint8 [tiles, columns, tile_bands, bytes of a superblock there]
    config        -- what it is laid out for
    gate_bands    -- bands of gate, where each tile has as many bands of gate as of up; 0: bands in their order
    largest_scale -- largest |d| of a superblock times 63: bounds what a nibble is multiplied by
    largest_d     -- largest |d| or |dmin| of a superblock
    typical_scale -- of planes as largest_scale, but for the mean scale of a group of rows
    fp16_scale    -- power of two that brings the largest weight near the largest float16
    row_scale     -- what the sums of rows are multiplied by: float32 [bands * 256]; None: nothing
    block         -- the type of the superblocks
    rest          -- what of its planes lies elsewhere; None: nothing
    on_card       -- whether it is known to lie in the GPU's memory
    """

    blocks: Tensor
    rows: int
    columns: int
    config: CudaTileConfig
    gate_bands: int
    largest_scale: float
    largest_d: float
    fp16_scale: float
    row_scale: Tensor | None = None
    block: str = "Q4_K"
    typical_scale: float = 0.0
    rest: Rest | None = None
    on_card: bool = False

    @property
    def planes(self) -> bool:
        """Whether its columns are read at levels."""
        return bool(BLOCKS[self.block].levels)


def load_zigzag(
    matrix: PackedMatrix,
    device: torch.device | str = "cuda",
    config: CudaTileConfig | None = None,
    *,
    gate: bool = False,
    place: Place = on_card,
) -> CudaZigzag:
    """Copy a stored zigzag matrix to the GPU. Takes the matrix's stored size, a tail that of a whole band, and bands up
    to whole tiles.

    place -- where the matrix shall lie: products read it there
    gate -- the rows are gate and up, 256 rows of one beside 256 of the other; needs a multiple of 512 rows
    """
    if matrix.format.order != "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one in zigzag order")
    if gate and matrix.rows % (2 * BAND_ROWS):
        raise ValueError(f"{matrix.rows} rows of gate and up, expected a multiple of {2 * BAND_ROWS}")
    if gate and config and config.tile_bands % 2:
        raise ValueError(f"{config}: gate and up need an even number of bands in a tile")
    blocks, block = matrix.padded().blocks.to(device), matrix.format.block
    size = block_bytes(block)
    if config is None and isinstance(place, DividedPlace) and BLOCKS[block].levels:
        bands = blocks.shape[0]
        config = planes_tile_config(bands, matrix.columns, blocks.device, planes_tile_bands(bands))
    elif config is None:
        config = measured_tile_config((matrix.rows, matrix.columns), blocks.device, gate, block)
    config = config or default_tile_config(blocks.shape[0], matrix.columns, blocks.device, gate, size)
    config = replace(config, block_bytes=size)
    laid, ends_of_all = in_order(blocks, block)
    in_tiles, ends, rest = tiled(laid, config.tile_bands, gate, block), ((end,) for end in ends_of_all), None
    if isinstance(place, DividedPlace) and BLOCKS[block].levels:
        in_tiles, others = divided(in_tiles, place.levels)
        rest = Rest(place.levels, place.rest(others), len(others))
    there = place(in_tiles)
    loaded = laid_out(there, matrix.rows, matrix.columns, config, blocks.shape[0] // 2 if gate else 0, ends, block)
    loaded = replace(loaded, rest=rest, on_card=place is on_card)
    if matrix.row_scale is None:
        return loaded
    row_scale = torch.zeros(len(blocks) * BAND_ROWS, device=blocks.device)
    row_scale[: matrix.rows] = matrix.row_scale
    largest = math.frexp(float(row_scale.max()))[1]  # at most two to the power of this
    return replace(loaded, row_scale=row_scale, fp16_scale=math.ldexp(loaded.fp16_scale, -largest))


def laid_out(
    blocks: Tensor,
    rows: int,
    columns: int,
    config: CudaTileConfig,
    gate_bands: int,
    ends: Iterable[Iterable[float]],
    block: str = "Q4_K",
) -> CudaZigzag:
    """A matrix of blocks that lie on the GPU. ends: of each of its parts the largest |d|, and likewise |dmin|, or of
    planes what `planes_in_order` says."""
    d, dmin = (max(parts) for parts in ends)
    scale, largest = LARGEST_FACTOR * d, max(d, dmin)
    typical = LARGEST_FACTOR * dmin if BLOCKS[block].levels else 0.0
    of_fp16 = fp16_scale(d, dmin)
    return CudaZigzag(blocks, rows, columns, config, gate_bands, scale, largest, of_fp16, None, block, typical)


def largest_ends(blocks: Tensor) -> tuple[float, float]:
    """The largest |d| and |dmin| of superblocks, uint8 [.., 144]. NaN and infinity count as nothing here, and show in
    the products."""
    ends = blocks[..., :4].contiguous().view(torch.float16).float().abs().nan_to_num(0, 0, 0)
    d, dmin = ends.view(-1, 2).amax(0).tolist() if ends.numel() else (0.0, 0.0)
    return d, dmin


def fp16_scale(d: float, dmin: float) -> float:
    """The power of two that brings weights of superblocks with such ends near the largest float16."""
    largest = LARGEST_FACTOR * max(15 * d, dmin)
    return float(2.0 ** (14 - math.ceil(math.log2(max(largest, 1e-30)))))


def tiled(blocks: Tensor, tile_bands: int, gate: bool, block: str = "Q4_K") -> Tensor:
    """uint8 [bands, columns, bytes] -> [tiles, columns, tile_bands, bytes], filled up with bands of zeros. Of planes
    the last two dimensions are one piece, the parts of all bands in turns (`kernels/blocks/q6_p.cuh`)."""
    parts = blocks.chunk(2) if gate else (blocks,)
    each = tile_bands // len(parts)
    loaded = [_padded(part, each).view(-1, each, *part.shape[1:]).transpose(1, 2) for part in parts]
    together = torch.cat(loaded, dim=2)
    if BLOCKS[block].levels:
        headers, *planes = (part.flatten(2) for part in torch.split(together, [*PLANES_PARTS], dim=3))
        headers = functional.pad(headers, (0, max(16 - headers.shape[2], 0)))
        return torch.cat([headers, *planes], dim=2).view(*together.shape[:2], tile_bands, -1)
    return together.contiguous()


def divided(tiles: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Tiles of planes, as `tiled` gives them, as the first planes of all columns, in as many dimensions, and the others
    [tiles, columns, bytes]."""
    count, columns, tile_bands, _ = tiles.shape
    pieces = tiles.view(count, columns, -1)
    others = tile_bands * sum(PLANES_PARTS[1 + levels :])
    first = pieces[..., : pieces.shape[2] - others].contiguous().view(count, columns, tile_bands, -1)
    return first, pieces[..., pieces.shape[2] - others :].contiguous()


def headers_in_order(blocks: Tensor) -> Tensor:
    """Put the six bits of each scale and each minimum of superblocks uint8 [.., 144] side by side, as the kernels take
    them apart."""
    scales, mins = scales_and_mins(blocks)
    both = scales.short() | mins.short() << 6
    even, odd = both[..., ::2], both[..., 1::2]  # twelve bits each; two are three bytes
    packed = torch.stack([even & 255, even >> 8 | (odd & 15) << 4, odd >> 4], dim=-1).flatten(-2)
    return torch.cat([blocks[..., :4], packed.byte(), blocks[..., 16:]], dim=-1)


def in_order(blocks: Tensor, block: str) -> tuple[Tensor, tuple[float, float]]:
    """Superblocks as `kernels/blocks/NAME.cuh` draws them: uint8 [.., bytes as stored] -> uint8 [.., bytes]; and
    the largest |d| and |dmin|, as of Q4_K."""
    if block == "Q4_K":
        return headers_in_order(blocks), largest_ends(blocks)
    if BLOCKS[block].levels:
        return planes_in_order(blocks, block)
    bits, parts = codec_of(block).bits, codec_of(block).apart(blocks.reshape(-1, blocks.shape[-1]))
    numbers = [parts.numbers]
    if (
        bits < 8
    ):  # of each lane, low halves of rows 0 .. 3 and 4 .. 7; then what is above them, of as many rows as fit a byte
        rows = parts.numbers.view(-1, 32, 2, 4)
        numbers = [(rows[:, :, 0] & 15) | rows[:, :, 1] << 4]
        if bits > 4:
            above = (parts.numbers >> 4).view(len(parts.numbers), -1, 8 // (bits - 4), 4)
            shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=blocks.device)
            numbers.append((above << shifts[:, None]).sum(2, dtype=torch.uint8))
    heads = (functional.pad(part, (0, -part.shape[1] % 16)) for part in (parts.shared, parts.each.flatten(1)))
    laid = torch.cat([*heads, *(part.flatten(1) for part in numbers)], dim=1).view(*blocks.shape[:-1], -1)
    # The d with which Q4_K would have the largest weights: sub-blocks have scales of eight bits where d is shared.
    largest = (128 if parts.shared.shape[1] else 1) << bits - 1
    d = (parts.shared if parts.shared.shape[1] else parts.each).contiguous().view(torch.float16).float()
    d = d.abs().nan_to_num(0, 0, 0)
    return laid, ((float(d.max()) * largest / (15 * LARGEST_FACTOR) if d.numel() else 0.0), 0.0)


def planes_in_order(blocks: Tensor, block: str) -> tuple[Tensor, tuple[float, float]]:
    """Likewise of superblocks with planes, each superblock's by itself: `tiled` puts those of bands together. In place
    of |dmin| the |d| that belongs to the mean scale of a group."""
    parts = codec_of(block).apart(blocks.reshape(-1, blocks.shape[-1]))
    upper, lower = parts.each.unbind(2)
    header = torch.stack([lower ^ 32, upper], dim=2).flatten(1)
    q = parts.numbers.view(-1, 4, 8, 2, 4)  # group, word, half, row of the half
    places = torch.tensor([6, 2, 4, 0], dtype=torch.uint8, device=blocks.device)
    first = ((q >> 4) << places).sum(4, dtype=torch.uint8).permute(0, 2, 3, 1).flatten(1)
    planes = [_plane_words(q >> bit & 1, low=bit % 2 == 0, nibbles=bit > 1) for bit in (3, 2, 1, 0)]
    laid = torch.cat([header, first, *planes], dim=1)
    # The d with which Q4_K would have the largest weights, and that of a mean scale; see `factor_exponent` of
    # `kernels/products/gemv_q6_p.cuh`.
    steps, _ = steps_and_centres(parts.each)
    of_step = (126 + 126) / (15 * LARGEST_FACTOR)
    ends = (float(steps.amax()) * of_step, float(steps.mean()) * of_step) if steps.numel() else (0.0, 0.0)
    return laid.view(*blocks.shape[:-1], -1), ends


def _plane_words(bits: Tensor, low: bool, nibbles: bool) -> Tensor:
    """A plane's bits uint8 [n, group, word, half, row] as `kernels/blocks/q6_p.cuh` places them: uint8 [n, 32].

    low -- it is the lower one of two planes that come together
    nibbles -- and these come together with plane 1
    """
    words = torch.zeros(*bits.shape[:1], 8, dtype=torch.int64, device=bits.device)
    for half in range(2):
        for row, place in enumerate((4, 0, 2, 6 - 8) if nibbles else (6, 2, 4, 0)):
            for group in range(4):
                at = (8 * group + place + (not low) - half) % 32
                words |= bits[:, group, :, half, row].long() << at
    return torch.stack([words >> 8 * byte & 255 for byte in range(4)], dim=2).byte().flatten(1)


@cache
def block_bytes(block: str) -> int:
    """Bytes of a superblock on the GPU."""
    return in_order(torch.zeros(1, superblock_bytes(block), dtype=torch.uint8), block)[0].shape[1]


def _padded(blocks: Tensor, multiple: int) -> Tensor:
    blocks = blocks.contiguous()
    missing = -blocks.shape[0] % multiple
    return torch.cat([blocks, blocks.new_zeros(missing, *blocks.shape[1:])]) if missing else blocks


def dequantise(matrix: CudaZigzag, out: Tensor, first: int, bands: int) -> None:
    """Bands of a matrix, transposed, times `fp16_scale`: out float16 [columns, 256 * bands]."""
    blocks, scale, row_scale = matrix.blocks, matrix.fp16_scale, matrix.row_scale
    dequantise_blocks(blocks, out, scale, first, bands, matrix.gate_bands, row_scale, matrix.block, matrix.rest)


def dequantise_blocks(
    blocks: Tensor,
    out: Tensor,
    scale: float,
    first: int = 0,
    bands: int = 1,
    gate_bands: int = 0,
    row_scale: Tensor | None = None,
    block: str = "Q4_K",
    rest: Rest | None = None,
) -> None:
    """Bands of superblocks uint8 [tiles, columns, tile_bands, bytes] times `scale`: out float16 [columns, 256 * bands].
    gate_bands, row_scale, block, rest: as of a `CudaZigzag`."""
    present = len(BLOCKS[block].levels) if rest is None else rest.first
    device, (tiles, columns, tile_bands, _) = blocks.device, blocks.shape
    warps, at_once = 8, 4
    filling = -(-multiprocessors(device) * 32 // tiles)  # some six times what runs at once: ends even out
    launch(
        kernel("dequantise", "zigzag_dequantise", (f"AT_ONCE={at_once}", f"BLOCK={block.lower()}"), device.index or 0),
        (min(filling, -(-columns * tile_bands // (warps * at_once))), tiles),
        warps * 32,
        *(blocks, columns, tile_bands, gate_bands),
        *(first, bands, scale, row_scale, out, out.stride(0)),
        *(None if rest is None else rest.planes, present),
    )
