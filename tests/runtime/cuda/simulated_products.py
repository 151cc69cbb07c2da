"""Products of zigzag matrices and of matrices by rows in plain torch, and matrices for them. Each function stands in
for the one of its name."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from simulated_words import assert_written, write
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.models.activations import clamped_swiglu, soft_capped
from sparsepack.runtime.cuda.decoder.step_end import CudaThresholdController
from sparsepack.runtime.cuda.driver.memory import SENTINEL, DividedPlace
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.rows import RowsFp16
from sparsepack.runtime.cuda.products.tile_config import COLUMNS_AT_ONCE, CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.threshold_controller import SequenceScale

ACTIVATIONS = list(reference.ACTIVATION_FUNCTIONS.values())
ONE_SPLIT = CudaTileConfig(2, 8, 8, 1)


@dataclass(frozen=True)
class Matrix:
    """float32 [rows, columns], with what the real ones tell.

    lower   -- of planes, the same by the first, by two, ..
    without -- where planes after the first ones lie elsewhere, the same by columns' levels, of which these planes are
               zero; rest_rows: of so many first rows products have them all the same, and of the next tile of
               rest_columns first columns
    read    -- to which they add the bytes of a row of superblocks that columns have there
    """

    weight: Tensor
    rows: int
    columns: int
    gate_bands: int = 0
    fp16_scale: float = 4.0
    config: CudaTileConfig = ONE_SPLIT
    block: str = "Q4_K"
    largest_d: float = 1.0
    row_scale: None = None  # `weight` has it
    rest: None = None
    on_card: bool = False  # `dequantise` stands in for the kernel of prompts
    lower: tuple[Tensor, ...] = ()
    without: tuple[Tensor, ...] = ()
    first: int = 0
    rest_rows: int = 0
    rest_columns: int = 0
    read: Tensor | None = None

    @property
    def planes(self) -> bool:
        return bool(self.lower)

    @cached_property
    def blocks(self) -> Tensor:
        """The weights where the real ones have their superblocks: float32 [tiles, columns, tile_bands, 256]."""
        padded = torch.nn.functional.pad(self.weight, (0, 0, 0, -len(self.weight) % BAND_ROWS))
        bands = padded.view(-1, BAND_ROWS, self.columns).transpose(1, 2)
        return zigzag.tiled(bands, self.config.tile_bands, self.gate_bands > 0)


def load_zigzag(
    matrix: PackedMatrix, device: Any, config: Any = None, *, gate: bool = False, place: Any = None
) -> Matrix:
    assert not gate or matrix.rows % 512 == 0
    elsewhere: dict[str, Any] = {}
    if isinstance(place, DividedPlace) and matrix.levels:
        elsewhere = {"without": _without(matrix, place.levels), "first": place.levels, "rest_rows": matrix.rows}
    return Matrix(
        decode_matrix(matrix),
        matrix.rows,
        matrix.columns,
        gate_bands=matrix.rows // 512 if gate else 0,
        config=replace(ONE_SPLIT, splits=min(3, -(-matrix.columns // COLUMNS_AT_ONCE))),
        block=matrix.format.block,
        lower=tuple(decode_matrix(matrix, level) for level in range(1, len(matrix.levels))),
        **elsewhere,
    )


def _without(matrix: PackedMatrix, planes: int) -> tuple[Tensor, ...]:
    """The weights by each level, of planes after so many first ones as zeros."""
    blocks, tail = matrix.blocks.clone(), None if matrix.tail is None else matrix.tail.clone()
    for each in (blocks, tail):
        if each is not None:
            each[..., matrix.levels[planes - 1] :] = 0
    cleared = replace(matrix, blocks=blocks, tail=tail)
    return tuple(decode_matrix(cleared, level) for level in range(1, 1 + len(matrix.levels)))


def counting_rest(matrix: Matrix, read: Tensor) -> Matrix:
    return replace(matrix, read=read)


def rest_of_first_bands(matrix: Matrix, bands: int, columns: int = 0) -> Matrix:
    return replace(matrix, rest_rows=min(matrix.rows, BAND_ROWS * bands), rest_columns=columns)


def first_bands(matrix: Matrix, bands: int) -> Matrix:
    rows = min(matrix.rows, BAND_ROWS * bands)
    return replace(matrix, weight=matrix.weight[:rows], rows=rows)


def load_rows(matrix: PackedMatrix, device: Any, *, place: Any = None) -> Matrix:
    return Matrix(decode_matrix(matrix), matrix.rows, matrix.columns)


def load_rows_fp16(matrix: PackedMatrix, device: Any, *, place: Any = None) -> Any:
    return RowsFp16(load_rows(matrix, device), 4.0)  # type: ignore[arg-type]


def decode(matrix: Matrix, first: int, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(matrix.weight[first : first + len(out)] * scale)


def gemv(matrix: Matrix, input: Input, output: Output) -> None:
    if input.flag_in_data:
        assert_written(input.x)
    if input.norm is not None and input.squares is not None:
        assert_written(input.squares)
        torch.testing.assert_close(input.squares.sum(), input.x.square().sum())
    if output.reset is not None:
        output.reset.copy_(torch.tensor(SENTINEL))
    x = input.x if input.norm is None else reference.rms_norm(input.x, input.norm, input.eps)
    x = x if input.gated is None else gated(input.gated, x, input.plain)
    assert x.shape == (matrix.columns,)
    x = x if input.offset is None else x - input.offset
    levels, bytes = torch.full(x.shape, len(matrix.lower) + 1), torch.tensor([0, 1])
    if matrix.lower:
        bytes = torch.tensor([0, *BLOCKS[matrix.block].level_bytes])
    if input.threshold is not None:
        exceeded = x.abs() > scaled(input)[0]
        levels = exceeded.sum(0) if exceeded.dim() == 2 else levels * exceeded
    read = bytes[levels].sum()
    if input.skipped is not None:
        input.skipped.add_(matrix.rows * (matrix.columns * bytes[-1] - read))
    assert output.activation is None or output.residual is None
    gate_beside_up = output.activation is not None  # for products of both
    assert bool(matrix.gate_bands) == gate_beside_up
    product = torch.zeros(matrix.rows)
    for level, weight in enumerate((*matrix.lower, matrix.weight), 1):
        of_level = torch.where(levels == level, x, 0)
        if not matrix.without:
            product += weight @ of_level
            continue
        without, rows, columns = matrix.without[level - 1], matrix.rest_rows, slice(0, matrix.rest_columns)
        tile = slice(rows, rows + 1024)
        product[:rows] += weight[:rows] @ of_level
        product[rows:] += without[rows:] @ of_level
        product[tile] += (weight[tile, columns] - without[tile, columns]) @ of_level[columns]
    if matrix.read is not None:
        matrix.read.add_((bytes[levels] - bytes[matrix.first]).clamp_min(0).sum())
    product = product if output.bias is None else product + output.bias
    if output.activation is not None:
        product = gated(output.activation, product)
    product = product if output.residual is None else product + output.residual
    write(output.y, product)
    if output.squares is not None:
        write(output.squares, torch.nn.functional.pad(product.square().sum()[None], (0, len(output.squares) - 1)))
    if output.active is not None:
        output.active.add_(read)


def gated(activation: int, x: Tensor, plain: bool = False) -> Tensor:
    gate, up = (x, x) if plain else x.chunk(2, dim=-1)
    return gated_by(activation, gate, up)


def gated_by(activation: int, gate: Tensor, up: Tensor) -> Tensor:
    return clamped_swiglu(gate, up) if activation == len(ACTIVATIONS) else ACTIVATIONS[activation](gate) * up


def scaled(input: Input) -> Tensor:
    """The thresholds of each input."""
    threshold = input.threshold[None]
    return threshold if input.scales is None else input.scales.view(-1, *[1] * (threshold.dim() - 1)) * threshold


def dequantise(matrix: Matrix, out: Tensor, first: int, bands: int) -> None:
    part = matrix.weight[256 * first : 256 * (first + bands)]
    out.zero_()
    out[:, : len(part)] = part.t() * matrix.fp16_scale


def embed(matrix: Matrix, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(matrix.weight[ids.long()] * scale)


def product(
    matrix: Matrix,
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    cap: float = 0.0,
    candidates: Tensor | None = None,
) -> None:
    y.copy_(soft_capped((x if norm is None else reference.rms_norm(x, norm, eps)) @ matrix.weight.t(), cap))
    if candidates is not None:
        logits = y.double()
        candidates.copy_(torch.stack([logits.argmax(1), logits.amax(1).float().view(torch.int32).long()], dim=1))


def matmul(matrix: Matrix, x: Tensor) -> Tensor:
    return x @ matrix.weight.t()


def new_candidates(matrix: Matrix, vectors: int) -> Tensor:
    return torch.zeros(vectors, 2, dtype=torch.int64)


def pick_likeliest(
    candidates: Tensor,
    ids: Tensor,
    best: Tensor,
    positions: Tensor | None = None,
    controller: CudaThresholdController | None = None,
) -> None:
    ids.copy_(candidates[:, 0])
    best.copy_(candidates[:, 1].int().view(torch.float32))
    if positions is not None:
        positions += 1
    if controller is None:
        return
    for n, (scale, steps, skipped) in enumerate(
        zip(controller.scales, controller.steps, controller.skipped, strict=True)
    ):
        if controller.moving is None or controller.moving[n]:
            scaled = controller.controller.after(SequenceScale(float(scale), int(steps)), int(skipped))
            scale.copy_(torch.tensor(scaled.scale))
            steps.copy_(torch.tensor(scaled.steps))
    controller.skipped.zero_()
