"""Products with zigzag matrices on the GPU, which skip inactive columns: of one input, and of several."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.models.blocks import Router
from sparsepack.runtime.cuda.driver.device import shared_limit
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.driver.memory import workspace
from sparsepack.runtime.cuda.products.tile_config import (
    COLUMNS_AT_ONCE,
    MANY_COLUMNS,
    PADDED_ROWS,
    PRODUCERS,
    STATIC_BYTES,
    CudaTileConfig,
    dense_ring,
    fitted,
    shared_bytes,
    with_ring,
)
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag

MOST_ROUNDS = 8  # of a warp's chunks at a time
MOST_VALUES = 32  # of several inputs, that a lane has at a time
MOST_INPUTS = 8
BATCH_WARPS = 12
"""Of several inputs with planes, so many warps of a block with `MANY_COLUMNS` multiply (an H200, 28672 x 4096 and eight
inputs: 41.3 us, 8 warps 43.3)."""
MOST_TILE_BANDS = 8  # of a matrix with room for so many


@dataclass(frozen=True)
class Input:
    """The input of a product, and which columns the product reads. Fields not given have no effect.

    x               -- float32 [columns]; [B, columns] of several inputs
    gated           -- x has twice as many numbers, gate and then up: what is multiplied is activation(gate) * up, by
                       the function of this number; no norm. None: x is taken as it is
    plain           -- gated, but x has as many numbers as there are columns: gate and up are one
    norm, eps       -- RMSNorm of x comes first: weight float32 [columns]
    squares         -- parts of the sum of x^2, which the norm needs: float32 [..], of several inputs [B, ..]; else the
                       product adds them up
    threshold       -- float32 [1] or [columns], or of matrices with planes [levels, columns], of experts whose products
                       are added [matrices, levels, columns]: a column is read at the level of how many its input
                       exceeds; None: every column is active, and read whole
    offset          -- float32 [columns], taken from x before it is compared and multiplied
    scales          -- float32 [1], of several inputs [B]: what the threshold is multiplied by; None: one
    skipped         -- int64 [1] or [B], where there are scales: the weights of inactive columns are added, or with
                       planes the bytes of superblocks that are not read, times the weights of each
    flag_in_data    -- x and squares are in words of `driver/memory.py`, read as soon as they are stored; no norm
                       without squares
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
    plain: bool = False

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
    shared     -- matrices behind these that every token has: the sigmoid of one logit more is the weight of each, or
                  without a gate it is 1
    routing    -- how a token's are chosen; None: by the softmax of logits
    part       -- of a token's experts, those that are launched: all, the chosen ones or the shared ones
    """

    experts: int
    used: int
    normalised: bool
    added: bool
    shared: int = 0
    shared_gate: bool = True
    routing: Router | None = None
    part: Literal["all", "chosen", "shared"] = "all"

    @property
    def slots(self) -> range:
        """Which of a token's experts are launched, in the order in which it has them."""
        return range(self.used * (self.part == "shared"), self.used if self.part == "chosen" else self.of_token)

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
        return self.experts + (self.shared > 0 and self.shared_gate)


@dataclass(frozen=True)
class Output:
    """The place of a product, and what is done to it before it is written there.

    y          -- float32 [rows]; [rows / 2] with an activation
    bias       -- float32 [rows], of experts [matrices, rows]
    residual   -- float32 [rows], may be y itself; where the input has its flag in the data, not what the kernel just
                  before writes
    activation -- for rows of gate and up: y = activation(gate) * up; see `kernels/common/activations.cuh`
    squares    -- float32 [blocks(matrix)]: what the blocks' rows add to the sum of y^2
    active     -- int64 []: the number of active columns is added to it, or with planes the stored bytes of a row of
                  superblocks that are read
    reset      -- int32 [..]: flag-in-data words that become SENTINEL again, since all have read them
    """

    y: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: int | None = None
    squares: Tensor | None = None
    active: Tensor | None = None
    reset: Tensor | None = None


def gemv(
    matrix: CudaZigzag,
    input: Input,
    output: Output,
    chosen: tuple[Together, Tensor, Tensor | None] | None = None,
    weight_scale: Tensor | None = None,
) -> None:
    """Put y = W[:, active] x[active] + bias + residual on the current stream.

    chosen -- for the products of the experts that tokens have instead: how they are launched, the logits of the
              router, float32 [texts, logits], and what is added to scores that choose, float32 [experts] or None. Of
              several texts what comes in and goes out lies one text after the other
    weight_scale -- float32 [matrices], by which the weights of experts are multiplied; None: they are not
    """
    together, logits, correction = chosen or (None, None, None)
    device, tiles = matrix.blocks.device, matrix.blocks.shape[0]
    if input.flag_in_data and input.norm is not None and input.squares is None:
        raise ValueError("an input with its flag in the data, with a norm and without squares")
    _check_gate(matrix, output.activation, output.residual, input)
    _check_levels(input.threshold, together)
    if (input.dense or together or matrix.planes) and not matrix.config.stages:
        matrix = _with_ring(matrix, shared_bytes)
    if input.dense and together is None:
        gate = output.activation is not None
        matrix = replace(matrix, config=dense_ring(matrix.config, matrix.columns, gate, device))
    config = matrix.config
    grid: tuple[int, ...] = (config.splits, tiles)
    parts, texts = 0 if input.squares is None else input.squares.numel(), 1
    if together is not None and logits is not None:
        texts = len(logits)
        grid, parts = (config.splits, tiles // together.stored, len(together.slots) * texts), parts // texts
        config = fitted(config, lambda config: shared_bytes(matrix.columns, config), device)
        matrix = replace(matrix, config=config)
    _check_blocks(matrix, 1, together, texts)
    launch(
        kernel("zigzag_gemv", "zigzag_gemv", _defines(matrix, input, output.activation, together), device.index or 0),
        grid,
        config.threads,
        *(matrix.blocks, matrix.columns, matrix.rows, matrix.largest_scale, matrix.typical_scale, matrix.row_scale),
        *_of_rest(matrix),
        *(input.x, input.norm, input.eps, input.squares, parts),
        *(input.threshold, input.offset, input.scales),
        *(output.y, output.bias, output.residual, output.squares),
        *(output.active, input.skipped, workspace(device)),
        *(output.reset, 0 if output.reset is None else output.reset.numel(), logits, correction, weight_scale),
        shared=shared_bytes(matrix.columns, config),
    )


def blocks(matrix: CudaZigzag, together: Together | None = None) -> int:
    """The number of thread blocks of a product with the matrix, or of the products of experts."""
    tiles = matrix.blocks.shape[0] * matrix.config.splits
    return tiles if together is None else tiles // together.stored * len(together.slots)


def _check_gate(matrix: CudaZigzag, activation: int | None, residual: Tensor | None, input: Input) -> None:
    if _of_levels(input.threshold) and not matrix.planes:
        raise ValueError(f"thresholds of levels for a matrix of {matrix.block}, which has no planes")
    if input.gated is not None and (activation is not None or input.norm is not None):
        raise ValueError("an input of gate and up, with a norm or an activation of the product")
    if activation is not None and residual is not None:
        raise ValueError("an activation, with a residual: activation(gate) * up is taken as it is")
    if (activation is not None) != (matrix.gate_bands > 0):
        raise ValueError(f"activation {activation} for {matrix.gate_bands} bands of gate: one needs the other")


def _check_levels(threshold: Tensor | None, together: Together | None) -> None:
    if not _of_levels(threshold):
        return
    assert threshold is not None
    expected = (together.stored,) if together is not None and together.added else ()
    if threshold.shape[:-2] != expected:
        raise ValueError(f"thresholds of levels {list(threshold.shape)}: expected {[*expected, 'levels', 'columns']}")


def _check_blocks(matrix: CudaZigzag, inputs: int, together: Together | None = None, texts: int = 1) -> None:
    """Raises `ValueError` where a block would have no columns, or blocks would wait for each other in vain."""
    config, device = matrix.config, matrix.blocks.device
    if config.splits > -(-matrix.columns // COLUMNS_AT_ONCE):
        raise ValueError(f"{config}: more splits than {matrix.columns} columns have chunks of {COLUMNS_AT_ONCE}")
    if config.splits == 1 and not (together and together.added):
        return
    count = blocks(matrix, together) * texts
    if count > multiprocessors(device):
        raise ValueError(f"{config}: {count} blocks that wait for each other, more than run at once")
    sums, room = count * config.tile_bands * BAND_ROWS * inputs, workspace(device).numel()
    if sums > room:
        raise ValueError(
            f"{config}: {sums} sums of blocks with {inputs} inputs, more than {room}; take tiles of up to "
            f"{MOST_TILE_BANDS} bands"
        )


def batch(matrix: CudaZigzag, input: Input, output: Output) -> None:
    """Put y = W[:, active] x[active] + bias + residual for several inputs on the current stream; W is read once.

    input  -- of B, at most `MOST_INPUTS`; a column is active where it is in any of them; its flag not in the data
    output -- y and residual have a dimension B before the others, squares is float32 [B, blocks(matrix)], and there is
              no reset
    """
    inputs = len(input.x)
    if not 1 <= inputs <= MOST_INPUTS:
        raise ValueError(f"{inputs} inputs, expected 1 to {MOST_INPUTS}")
    if input.flag_in_data or output.reset is not None:
        raise ValueError("several inputs with their flag in the data, or with a reset: gemv takes one such input")
    _check_gate(matrix, output.activation, output.residual, input)
    matrix = _for_inputs(matrix, inputs)
    device, config = matrix.blocks.device, matrix.config
    _check_blocks(matrix, inputs)
    launch(
        kernel("zigzag_batch", "zigzag_batch", _batch_defines(matrix, input, output.activation), device.index or 0),
        (config.splits, matrix.blocks.shape[0]),
        config.threads,
        *(matrix.blocks, matrix.columns, matrix.rows, matrix.largest_d, matrix.row_scale, *_of_rest(matrix)),
        *(input.x, input.norm, input.eps, input.squares, 0 if input.squares is None else input.squares.shape[1]),
        *(input.threshold, input.offset, input.scales),
        *(output.y, output.bias, output.residual, output.squares),
        *(output.active, input.skipped, workspace(device)),
        shared=_batch_bytes(matrix.columns, config, inputs),
    )


def most_inputs(matrix: CudaZigzag) -> int:
    """The most inputs that `batch` takes on the matrix's GPU: up to `MOST_INPUTS`, as shared memory has room."""
    limit = shared_limit(matrix.blocks.device)

    def needed(inputs: int) -> int:
        return STATIC_BYTES + _batch_bytes(matrix.columns, _for_inputs(matrix, inputs).config, inputs)

    return sum(needed(inputs) <= limit for inputs in range(1, MOST_INPUTS + 1))


def _for_inputs(matrix: CudaZigzag, inputs: int) -> CudaZigzag:
    """The same matrix with a ring, and of planes with more warps where that fits."""

    def needed(columns: int, config: CudaTileConfig) -> int:
        return _batch_bytes(columns, config, inputs)

    config = with_ring(matrix.config)
    many = matrix.planes and COLUMNS_AT_ONCE * config.chunks(matrix.columns) >= MANY_COLUMNS
    if many and config.warps < BATCH_WARPS and BATCH_WARPS % config.tile_bands == 0:
        step = math.lcm(PRODUCERS, BATCH_WARPS // config.tile_bands)
        wider = replace(config, warps=BATCH_WARPS, stages=max(config.stages // step, 1) * step)
        if STATIC_BYTES + needed(matrix.columns, wider) <= shared_limit(matrix.blocks.device):
            return replace(matrix, config=wider)
    return _with_ring(matrix, needed)


def _with_ring(matrix: CudaZigzag, needed: Callable[[int, CudaTileConfig], int]) -> CudaZigzag:
    """The same matrix with a ring of as many stages as there is shared memory for."""
    config = fitted(with_ring(matrix.config), lambda config: needed(matrix.columns, config), matrix.blocks.device)
    return replace(matrix, config=config)


def _batch_bytes(columns: int, config: CudaTileConfig, inputs: int) -> int:
    """The bytes of dynamic shared memory of a block of `zigzag_batch`: the ring, later the warps' sums, the list of
    the block's columns, and of planes what a warp's lanes leave for each other."""
    first = max(config.ring_bytes, 4 * config.warps * inputs * PADDED_ROWS)
    scratch = 640 * config.warps if config.planes else 0
    return first + 4 * (inputs + 1) * COLUMNS_AT_ONCE * config.chunks(columns) + 16 * inputs + scratch


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
            "FIRST_SLOT": together.slots.start,
            "LAST_SLOT": together.slots.stop,
        }
        if together.shared and not together.shared_gate:
            values["SHARED_GATE"] = 0
        if (how := together.routing) is not None:
            values |= {
                "SIGMOID": int(how.sigmoid),
                "GROUPS": how.groups,
                "GROUPS_USED": how.groups_used,
                "ROUTER_SCALE": f"{float(how.scale)}f",
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
        "GATED": 0 if input.gated is None else 1 + input.plain,
        "ACTIVATION": (input.gated if activation is None else activation) or 0,
        "DENSE": int(input.dense),
        "NORM": int(input.norm is not None),
        "SQUARES": 0
        if input.norm is None or input.squares is None
        else -(-input.squares.shape[-1] // (32 * matrix.config.warps)),
        "OFFSET": int(input.offset is not None),
        "PER_CHANNEL": _per_channel(input.threshold),
        "OF_LEVELS": _of_levels(input.threshold),
        "SCALED": int(input.scales is not None),
    }


def _macros(matrix: CudaZigzag, most_rounds: int = MOST_ROUNDS) -> dict[str, int | str]:
    """The macros with which every product with a matrix is compiled."""
    config = matrix.config
    each = -(-config.chunks(matrix.columns) // config.warps)  # chunks of a warp
    passes = -(-each // most_rounds)
    return {
        "WARPS": config.warps,
        "STAGES": config.stages,
        "PRODUCERS": PRODUCERS,
        "TILE_BANDS": config.tile_bands,
        "OFFLOADED": int(config.offloaded),
        "SPLITS": config.splits,
        "BLOCK": matrix.block.lower(),
        "ROUNDS": -(-each // passes),
        "PASSES": passes,
        **({} if matrix.rest is None else {"CARD_LEVELS": matrix.rest.first}),
    }


def _of_rest(matrix: CudaZigzag) -> tuple[Tensor | None, int, int, Tensor | None]:
    """The arguments of a product's kernel that say where planes are that lie elsewhere."""
    rest = matrix.rest
    return (None, 0, 0, None) if rest is None else (rest.planes, rest.tiles, rest.columns, rest.read)


def _per_channel(threshold: Tensor | None) -> int:
    return int(threshold is not None and threshold.numel() > 1)


def _of_levels(threshold: Tensor | None) -> int:
    return int(threshold is not None and threshold.dim() > 1)
