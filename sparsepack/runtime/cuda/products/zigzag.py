"""Zigzag matrices on the GPU: loading, the product that skips inactive columns, and the dense one for many inputs."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix
from sparsepack.formats.codecs.q4_k import scales_and_mins
from sparsepack.runtime.cuda.driver.flag_in_data import workspace
from sparsepack.runtime.cuda.driver.host_memory import Place, on_card
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.driver.shared_memory import shared_limit
from sparsepack.runtime.cuda.products.tile_config import (
    BAND_ROWS,
    COLUMNS_AT_ONCE,
    PADDED_ROWS,
    PRODUCERS,
    STATIC_BYTES,
    CudaTileConfig,
    default_tile_config,
    fitted,
    measured_tile_config,
    shared_bytes,
    with_ring,
)

LARGEST_FACTOR = 63  # of d: scales have 6 bits
MOST_ROUNDS = 8  # of a warp's chunks at a time
MOST_VALUES = 32  # of several inputs, that a lane has at a time
MOST_INPUTS = 8
MOST_TILE_BANDS = 8  # of a matrix with room for so many
SCRATCH_BYTES = 1 << 28
"""This many bytes of a matrix are dequantised at a time."""


@dataclass(frozen=True)
class CudaZigzag:
    """A zigzag matrix in the order in which `kernels/products/zigzag_gemv.cu` reads it.

    blocks        -- uint8 [tiles, columns, tile_bands, 144]
    config        -- what it is laid out for
    gate_bands    -- bands of gate, where each tile has as many bands of gate as of up; 0: bands in their order
    largest_scale -- largest |d| of a superblock times 63: bounds what a nibble is multiplied by
    largest_d     -- largest |d| or |dmin| of a superblock
    fp16_scale    -- power of two that brings the largest weight near the largest float16
    """

    blocks: Tensor
    rows: int
    columns: int
    config: CudaTileConfig
    gate_bands: int
    largest_scale: float
    largest_d: float
    fp16_scale: float


def load_zigzag(
    matrix: PackedMatrix,
    device: torch.device | str = "cuda",
    config: CudaTileConfig | None = None,
    *,
    gate: bool = False,
    place: Place = on_card,
) -> CudaZigzag:
    """Copy a stored zigzag matrix to the GPU. Takes the matrix's stored size, and bands up to whole tiles.

    place -- where the matrix shall lie: products read it there
    gate -- the rows are gate and up, 256 rows of one beside 256 of the other; needs a multiple of 512 rows
    """
    if matrix.type != ZIGZAG:
        raise ValueError(f"matrix of type {matrix.type}, expected {ZIGZAG}")
    if gate and matrix.rows % (2 * BAND_ROWS):
        raise ValueError(f"{matrix.rows} rows of gate and up, expected a multiple of {2 * BAND_ROWS}")
    if gate and config and config.tile_bands % 2:
        raise ValueError(f"{config}: gate and up need an even number of bands in a tile")
    blocks = matrix.blocks.to(device)
    config = config or measured_tile_config((matrix.rows, matrix.columns), blocks.device, gate)
    config = config or default_tile_config(blocks.shape[0], matrix.columns, blocks.device, gate)
    there = place(tiled(headers_in_order(blocks), config.tile_bands, gate))
    ends = ((end,) for end in largest_ends(blocks))
    return laid_out(there, matrix.rows, matrix.columns, config, blocks.shape[0] // 2 if gate else 0, ends)


def laid_out(
    blocks: Tensor, rows: int, columns: int, config: CudaTileConfig, gate_bands: int, ends: Iterable[Iterable[float]]
) -> CudaZigzag:
    """A matrix of blocks that lie on the GPU. ends: of each of its parts the largest |d|, and likewise |dmin|."""
    d, dmin = (max(parts) for parts in ends)
    return CudaZigzag(blocks, rows, columns, config, gate_bands, LARGEST_FACTOR * d, max(d, dmin), fp16_scale(d, dmin))


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


def tiled(blocks: Tensor, tile_bands: int, gate: bool) -> Tensor:
    """uint8 [bands, columns, 144] -> [tiles, columns, tile_bands, 144], filled up with bands of zeros."""
    parts = blocks.chunk(2) if gate else (blocks,)
    each = tile_bands // len(parts)
    made = [_padded(part, each).view(-1, each, *part.shape[1:]).transpose(1, 2) for part in parts]
    return torch.cat(made, dim=2).contiguous()


def headers_in_order(blocks: Tensor) -> Tensor:
    """Put the six bits of each scale and each minimum of superblocks uint8 [.., 144] side by side, as the kernels take
    them apart."""
    scales, mins = scales_and_mins(blocks)
    both = scales.short() | mins.short() << 6
    even, odd = both[..., ::2], both[..., 1::2]  # twelve bits each; two are three bytes
    packed = torch.stack([even & 255, even >> 8 | (odd & 15) << 4, odd >> 4], dim=-1).flatten(-2)
    return torch.cat([blocks[..., :4], packed.byte(), blocks[..., 16:]], dim=-1)


def _padded(blocks: Tensor, multiple: int) -> Tensor:
    blocks = blocks.contiguous()
    missing = -blocks.shape[0] % multiple
    return torch.cat([blocks, blocks.new_zeros(missing, *blocks.shape[1:])]) if missing else blocks


@dataclass(frozen=True)
class Input:
    """The input of a product, and which columns the product reads. Fields not given have no effect.

    x               -- float32 [columns]; [B, columns] of several inputs
    gated           -- x has twice as many numbers, gate and then up: what is multiplied is activation(gate) * up, by
                       the function of this number; no norm. None: x is taken as it is
    norm, eps       -- RMSNorm of x comes first: weight float32 [columns]
    squares         -- parts of the sum of x^2, which the norm needs: float32 [..], of several inputs [B, ..]; else the
                       product adds them up
    threshold       -- float32 [1] or [columns]; None: every column is active
    offset          -- float32 [columns], taken from x before it is compared and multiplied
    scales          -- float32 [1], of several inputs [B]: what the threshold is multiplied by; None: one
    skipped         -- int64 [1] or [B], where there are scales: the weights of inactive columns are added
    flag_in_data    -- x and squares are in words of `flag_in_data.py`: read as soon as they are stored; no norm without
                       squares
    """

    x: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    squares: Tensor | None = None
    threshold: Tensor | None = None
    offset: Tensor | None = None
    scales: Tensor | None = None
    skipped: Tensor | None = None
    flag_in_data: bool = False
    gated: int | None = None

    @property
    def dense(self) -> bool:
        return self.threshold is None

    def of_texts(self, which: slice, of: int) -> "Input":
        """Some of so many inputs that lie one after the other."""

        def some(each: Tensor | None) -> Tensor | None:
            return None if each is None else each.view(of, -1)[which]

        scales, skipped = (None if each is None else each[which] for each in (self.scales, self.skipped))
        x = self.x.view(of, -1)[which]
        return replace(self, x=x, squares=some(self.squares), scales=scales, skipped=skipped)


@dataclass(frozen=True)
class Together:
    """Experts whose products are launched together (`products/experts.py`).

    experts    -- matrices that lie one after the other, and one of which a logit of a token's is
    used       -- those that a token is given by its logits
    normalised -- whether their weights are made to add up to one
    added      -- whether each has an x, and y is the sum of their weighted products; else they share x, and each has
                  a y
    shared     -- matrices behind these that every token has: the sigmoid of one logit more is the weight of each
    """

    experts: int
    used: int
    normalised: bool
    added: bool
    shared: int = 0

    @property
    def stored(self) -> int:
        """The number of all matrices."""
        return self.experts + self.shared

    @property
    def of_token(self) -> int:
        """The number of those that a token has, by its logits or as every token."""
        return self.used + self.shared

    @property
    def logits(self) -> int:
        """The number of logits of a token."""
        return self.experts + bool(self.shared)


def gemv(
    matrix: CudaZigzag,
    input: Input,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int | None = None,
    squares: Tensor | None = None,
    active: Tensor | None = None,
    reset: Tensor | None = None,
) -> None:
    """Put y = W[:, active] x[active] + bias + residual on the current stream.

    y          -- float32 [rows]; [rows / 2] with an activation
    bias       -- float32 [rows]
    residual   -- float32 [rows], may be y itself; where the input has its flag in the data, not what the kernel just
                  before writes
    activation -- for rows of gate and up: y = activation(gate) * up; see `kernels/common/activations.cuh`
    squares    -- float32 [blocks(matrix)]: what the blocks' rows add to the sum of y^2
    active     -- int64 []: the number of active columns is added to it
    reset      -- int32 [..]: flag-in-data words that become SENTINEL again, since all have read them
    """
    launch_gemv(matrix, input, y, bias, residual, activation, squares, active, reset)


def launch_gemv(
    matrix: CudaZigzag,
    input: Input,
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int | None,
    squares: Tensor | None,
    active: Tensor | None,
    reset: Tensor | None,
    chosen: tuple[Together, Tensor] | None = None,
) -> None:
    """What `gemv` launches, or with `chosen` the products of the experts that tokens have: how they are launched, and
    the logits of the router, float32 [texts, logits]. Of several texts what comes in and goes out lies one text after
    the other."""
    together, logits = chosen or (None, None)
    device, tiles = matrix.blocks.device, matrix.blocks.shape[0]
    if input.flag_in_data and input.norm is not None and input.squares is None:
        raise ValueError("an input with its flag in the data, with a norm and without squares")
    _check_gate(matrix, activation, residual, input)
    if (input.dense or together) and not matrix.config.stages:
        matrix = _with_ring(matrix, shared_bytes)
    config = matrix.config
    grid: tuple[int, ...] = (config.splits, tiles)
    parts, texts = 0 if input.squares is None else input.squares.numel(), 1
    if together is not None and logits is not None:
        texts = len(logits)
        grid, parts = (config.splits, tiles // together.stored, together.of_token * texts), parts // texts
        config = fitted(config, lambda config: shared_bytes(matrix.columns, config), device)
        matrix = replace(matrix, config=config)
    _check_blocks(matrix, 1, together, texts)
    launch(
        kernel("zigzag_gemv", "zigzag_gemv", _defines(matrix, input, activation, together), device.index or 0),
        grid,
        config.threads,
        *(matrix.blocks, matrix.columns, matrix.rows, matrix.largest_scale),
        *(input.x, input.norm, input.eps, input.squares, parts),
        *(input.threshold, input.offset, input.scales),
        *(y, bias, residual, squares),
        *(active, input.skipped, workspace(device)),
        *(reset, 0 if reset is None else reset.numel(), logits),
        shared=shared_bytes(matrix.columns, config),
    )


def blocks(matrix: CudaZigzag) -> int:
    """The number of thread blocks of a product with the matrix."""
    return blocks_of(matrix)


def blocks_of(matrix: CudaZigzag, together: Together | None = None) -> int:
    """The number of thread blocks of a product with the matrix, or of the products of experts."""
    tiles = matrix.blocks.shape[0] * matrix.config.splits
    return tiles if together is None else tiles // together.stored * together.of_token


def _check_gate(matrix: CudaZigzag, activation: int | None, residual: Tensor | None, input: Input) -> None:
    if input.gated is not None and (activation is not None or input.norm is not None):
        raise ValueError("an input of gate and up, with a norm or an activation of the product")
    if activation is not None and residual is not None:
        raise ValueError("an activation, with a residual: activation(gate) * up is taken as it is")
    if (activation is not None) != (matrix.gate_bands > 0):
        raise ValueError(f"activation {activation} for {matrix.gate_bands} bands of gate: one needs the other")


def _check_blocks(matrix: CudaZigzag, inputs: int, together: Together | None = None, texts: int = 1) -> None:
    """Raises `ValueError` where a block would have no columns, or blocks would wait for each other in vain."""
    config, device = matrix.config, matrix.blocks.device
    if config.splits > -(-matrix.columns // COLUMNS_AT_ONCE):
        raise ValueError(f"{config}: more splits than {matrix.columns} columns have chunks of {COLUMNS_AT_ONCE}")
    if config.splits == 1 and not (together and together.added):
        return
    count = blocks_of(matrix, together) * texts
    if count > multiprocessors(device):
        raise ValueError(f"{config}: {count} blocks that wait for each other, more than run at once")
    sums, room = count * config.tile_bands * BAND_ROWS * inputs, workspace(device).numel()
    if sums > room:
        raise ValueError(
            f"{config}: {sums} sums of blocks with {inputs} inputs, more than {room}; take tiles of up to "
            f"{MOST_TILE_BANDS} bands"
        )


def batch(
    matrix: CudaZigzag,
    input: Input,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int | None = None,
    squares: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    """Put y = W[:, active] x[active] + bias + residual for several inputs on the current stream; W is read once.

    input      -- of B, at most `MOST_INPUTS`; a column is active where it is in any of them; its flag not in the data
    y          -- float32 [B, rows]; [B, rows / 2] with an activation
    bias       -- float32 [rows]
    residual   -- float32 [B, rows], may be y itself
    activation -- for rows of gate and up, as `gemv` takes it
    squares    -- float32 [B, blocks(matrix)]: what the blocks' rows add to the sums of y^2
    active     -- int64 []: the number of active columns is added to it
    """
    inputs = len(input.x)
    if not 1 <= inputs <= MOST_INPUTS:
        raise ValueError(f"{inputs} inputs, expected 1 to {MOST_INPUTS}")
    if input.flag_in_data:
        raise ValueError("several inputs with their flag in the data: gemv takes one such input")
    _check_gate(matrix, activation, residual, input)
    matrix = _for_inputs(matrix, inputs)
    device, config = matrix.blocks.device, matrix.config
    _check_blocks(matrix, inputs)
    launch(
        kernel("zigzag_batch", "zigzag_batch", _batch_defines(matrix, input, activation), device.index or 0),
        (config.splits, matrix.blocks.shape[0]),
        config.threads,
        *(matrix.blocks, matrix.columns, matrix.rows, matrix.largest_d),
        *(input.x, input.norm, input.eps, input.squares, 0 if input.squares is None else input.squares.shape[1]),
        *(input.threshold, input.offset, input.scales),
        *(y, bias, residual, squares),
        *(active, input.skipped, workspace(device)),
        shared=_batch_bytes(matrix.columns, config, inputs),
    )


def most_inputs(matrix: CudaZigzag) -> int:
    """The most inputs that `batch` takes on the matrix's GPU: up to `MOST_INPUTS`, as shared memory has room."""
    limit = shared_limit(matrix.blocks.device)

    def needed(inputs: int) -> int:
        return STATIC_BYTES + _batch_bytes(matrix.columns, _for_inputs(matrix, inputs).config, inputs)

    return sum(needed(inputs) <= limit for inputs in range(1, MOST_INPUTS + 1))


def _for_inputs(matrix: CudaZigzag, inputs: int) -> CudaZigzag:
    return _with_ring(matrix, lambda columns, config: _batch_bytes(columns, config, inputs))


def _with_ring(matrix: CudaZigzag, needed: Callable[[int, CudaTileConfig], int]) -> CudaZigzag:
    """The same matrix with a ring of as many stages as there is shared memory for."""
    config = fitted(with_ring(matrix.config), lambda config: needed(matrix.columns, config), matrix.blocks.device)
    return replace(matrix, config=config)


def _batch_bytes(columns: int, config: CudaTileConfig, inputs: int) -> int:
    """The bytes of dynamic shared memory of a block of `zigzag_batch`: the ring, later the warps' sums, and the list
    of the block's columns."""
    first = max(config.ring_bytes, 4 * config.warps * inputs * PADDED_ROWS)
    return first + 4 * (inputs + 1) * COLUMNS_AT_ONCE * config.chunks(columns)


def _defines(
    matrix: CudaZigzag, input: Input, activation: int | None, together: Together | None = None
) -> tuple[str, ...]:
    values = {
        **_macros(matrix),
        **_of_input(matrix, input, activation),
        "FLAG_IN_DATA": int(input.flag_in_data),
    }
    if together is not None:
        values |= {
            "EXPERTS": together.experts,
            "CHOSEN": together.used,
            "SHARED": together.shared,
            "NORMALISED": int(together.normalised),
            "ADDED": int(together.added),
        }
    return tuple(f"{name}={value}" for name, value in values.items())


def _batch_defines(matrix: CudaZigzag, input: Input, activation: int | None) -> tuple[str, ...]:
    inputs = len(input.x)
    values = {
        **_macros(matrix, min(MOST_ROUNDS, MOST_VALUES // inputs)),
        **_of_input(matrix, input, activation),
        "INPUTS": inputs,
    }
    return tuple(f"{name}={value}" for name, value in values.items())


def _of_input(matrix: CudaZigzag, input: Input, activation: int | None) -> dict[str, int]:
    """The arguments of a product's kernel that say what happens to the input."""
    return {
        "GATE": int(activation is not None),
        "GATED": int(input.gated is not None),
        "ACTIVATION": (input.gated if activation is None else activation) or 0,
        "DENSE": int(input.dense),
        "NORM": int(input.norm is not None),
        "SQUARES": 0
        if input.norm is None or input.squares is None
        else -(-input.squares.shape[-1] // (32 * matrix.config.warps)),
        "OFFSET": int(input.offset is not None),
        "PER_CHANNEL": _per_channel(input.threshold),
        "HOLD": int(input.scales is not None),
    }


def _macros(matrix: CudaZigzag, most_rounds: int = MOST_ROUNDS) -> dict[str, int]:
    """The macros with which every product with a matrix is compiled."""
    config = matrix.config
    each = -(-config.chunks(matrix.columns) // config.warps)  # chunks of a warp
    passes = -(-each // most_rounds)
    return {
        "WARPS": config.warps,
        "STAGES": config.stages,
        "PRODUCERS": PRODUCERS,
        "TILE_BANDS": config.tile_bands,
        "SPLITS": config.splits,
        "ROUNDS": -(-each // passes),
        "PASSES": passes,
    }


def _per_channel(threshold: Tensor | None) -> int:
    return int(threshold is not None and threshold.numel() > 1)


def dequantise(matrix: CudaZigzag, out: Tensor, first: int, bands: int) -> None:
    """Bands of a matrix, transposed, times `fp16_scale`: out float16 [columns, 256 * bands]."""
    dequantise_blocks(matrix.blocks, out, matrix.fp16_scale, first, bands, matrix.gate_bands)


def dequantise_blocks(
    blocks: Tensor, out: Tensor, scale: float, first: int = 0, bands: int = 1, gate_bands: int = 0
) -> None:
    """Bands of superblocks uint8 [tiles, columns, tile_bands, 144] times `scale`: out float16 [columns, 256 * bands].
    gate_bands: as of a `CudaZigzag`."""
    device, (tiles, columns, tile_bands, _) = blocks.device, blocks.shape
    warps, at_once = 8, 4
    filling = -(-multiprocessors(device) * 32 // tiles)  # some six times what runs at once: ends even out
    launch(
        kernel("dequantise", "zigzag_dequantise", (f"AT_ONCE={at_once}",), device.index or 0),
        (min(filling, -(-columns * tile_bands // (warps * at_once))), tiles),
        warps * 32,
        *(blocks, columns, tile_bands, gate_bands),
        *(first, bands, scale, out, out.stride(0)),
    )
