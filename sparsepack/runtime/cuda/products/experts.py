"""The experts of an MLP on the GPU: their router, and the products of those that a token has, in one launch."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedExperts
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.products import grouped, zigzag, zigzag_products
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, expert_tile_config
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, Together

ROUTE_THREADS = 256
MOST_PARTS = 8
ORDER_THREADS = 1024
LOADED_AT_ONCE = 1 << 26
"""About so many bytes of experts are copied to the GPU at a time."""


@dataclass(frozen=True)
class CudaExperts:
    """Matrices of one shape, of which each token has some.

    all      -- blocks [experts * tiles, columns, tile_bands, 144], a matrix after the other; the rest is that of one
    together -- how a token's products are launched
    correction -- float32 [experts]: what is added to scores that choose; None: nothing
    scale    -- float32 [experts], by which the weights of experts are multiplied; None: they are not
    """

    all: CudaZigzag
    together: Together
    correction: Tensor | None = None
    scale: Tensor | None = None

    @property
    def grouped(self) -> bool:
        """Whether `multiply_grouped` takes them."""
        return self.all.block == grouped.BLOCK

    def part(self, which: Literal["chosen", "shared"]) -> "CudaExperts":
        """The same, of which a launch takes a part of a token's."""
        return replace(self, together=replace(self.together, part=which))

    def expert(self, number: int) -> CudaZigzag:
        """The matrix of one expert."""
        tiles = self.all.blocks.shape[0] // self.together.stored
        return replace(self.all, blocks=self.all.blocks[number * tiles : (number + 1) * tiles])


def load_experts(
    matrix: PackedExperts,
    used: int,
    normalised: bool,
    device: torch.device | str = "cuda",
    config: CudaTileConfig | None = None,
    *,
    gate: bool = False,
    added: bool = False,
    shared: int = 0,
) -> CudaExperts:
    """Copy the matrices of all experts to the GPU. Takes their stored size, tails that of whole bands, and bands up to
    whole tiles.

    used, normalised -- as of an `ExpertMlp`
    shared           -- so many of the matrices, the last, are of experts that every token has
    gate             -- as of `zigzag.load_zigzag`
    added            -- whether the products of a token's experts are one sum
    """
    bands, columns = -(-matrix.rows // BAND_ROWS), matrix.columns
    together = Together(matrix.experts - shared, used, normalised, added, shared)
    block = matrix.format.block
    size = zigzag.block_bytes(block)
    place = bands, columns, torch.device(device)
    config = config or expert_tile_config(*place, together.of_token, gate, added, size)
    config = replace(config, block_bytes=size)
    ends, first, tiled = [(0.0, 0.0)], 0, None
    at_once = max(LOADED_AT_ONCE // max(matrix.padded_nbytes // matrix.experts, 1), 1)
    for number in range(0, matrix.experts, at_once):
        blocks = matrix.padded_blocks(number, number + at_once).to(device)
        in_order, of_these = zigzag.in_order(blocks, block)
        ends.append(of_these)
        for one in in_order:
            laid = zigzag.tiled(one, config.tile_bands, gate, block)
            if tiled is None:
                tiled = laid.new_empty(matrix.experts * len(laid), *laid.shape[1:])
            tiled[first : first + len(laid)] = laid
            first += len(laid)
    assert tiled is not None  # a mixture has experts
    ends_of_all = zip(*ends, strict=True)
    of_all = zigzag.laid_out(tiled, matrix.rows, columns, config, bands // 2 if gate else 0, ends_of_all, block)
    return CudaExperts(of_all, together)


def route(router: Tensor, input: Input, logits: Tensor, bias: Tensor | None = None) -> None:
    """Put logits = router RMSNorm(x) + bias on the current stream.

    router -- float32 [logits, hidden]
    input  -- x of one sequence [hidden] or of several [B, hidden], with a norm and with squares
    logits -- float32 [logits] or [B, logits]; in words of `driver/memory.py` where the input is
    bias   -- float32 [logits]; None: there is none
    """
    if input.norm is None or input.squares is None:
        raise ValueError("a router's input without norm or squares: attention leaves both")
    rows, hidden = router.shape
    parts, sequences = input.squares.shape[-1], input.x.numel() // hidden
    defines = (
        f"ROUNDS={-(-hidden // ROUTE_THREADS)}",
        f"PARTS={-(-parts // ROUTE_THREADS)}",
        f"FLAG_IN_DATA={int(input.flag_in_data)}",
    )
    launch(
        kernel("route", "route", defines, router.device.index or 0),
        (rows, sequences),
        ROUTE_THREADS,
        *(router, hidden, input.x, input.norm, input.eps, input.squares, parts, bias, logits),
    )


def multiply_experts(experts: CudaExperts, input: Input, output: Output, *, logits: Tensor) -> None:
    """Put the products of the experts that a token has, by its logits, on the current stream.

    Where products are not added, y = W x + bias of each of a token's experts, likeliest first, then those that every
    token has: x float32 [columns], y [of_token, rows], or [of_token, rows / 2] with an activation. Where they are, y =
    residual + the sum of weight * (W x + bias) of each: x [of_token, columns], y [rows]. Of several sequences all of
    these, and logits, have a dimension more, before the others; each sequence has experts of its own. What is
    two-dimensional so far may be flat.

    output -- squares is float32 [blocks(experts, 1)], of several sequences [B, blocks(experts, B)]; the active columns
              of each sequence and expert are added to `active`; bias is float32 [stored experts, rows]
    """
    stored = experts.together.stored, experts.all.rows
    if output.bias is not None and output.bias.shape != stored:
        raise ValueError(f"bias {list(output.bias.shape)} of experts: expected {[*stored]}")
    logits = logits.view(-1, experts.together.logits)
    at_once, config = _spread(experts, len(logits))
    matrix = replace(experts.all, config=config)
    for first in range(0, len(logits), at_once):
        these = slice(first, first + at_once)

        def of(each: Tensor | None, these: slice = these) -> Tensor | None:
            return None if each is None else each.view(len(logits), -1)[these]

        y = output.y.view(len(logits), -1)[these]
        of_these = replace(output, y=y, residual=of(output.residual), squares=of(output.squares))
        chosen = experts.together, logits[these], experts.correction
        zigzag_products.gemv(matrix, input.of_texts(these, len(logits)), of_these, chosen, experts.scale)


def order_by_expert(chosen: Tensor, stored: int, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The places of chosen, int64 [S, each], by expert: int32 [places], those of an expert in their order, and where
    each of `stored` experts' begin, int32 [stored + 1].

    counted -- int32 [1]: so many of the S positions count, and the places of others are left out; None: all
    """
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(stored + 1, dtype=torch.int32, device=chosen.device)
    launch(
        kernel("expert_order", "expert_order", (), chosen.device.index or 0),
        (1,),
        ORDER_THREADS,
        *(chosen, chosen.numel(), counted, chosen.shape[1], stored, order, ends),
        shared=4 * (ORDER_THREADS // 32 + 1) * stored,
    )
    return order, ends


def multiply_grouped(
    experts: CudaExperts,
    x: ScaledFp16,
    order: Tensor,
    ends: Tensor,
    each: int,
    bias: Tensor | None = None,
    *,
    zeros: bool = False,
) -> Product:
    """The products of many positions with the experts that each of them has: W x + bias for every place, of which each
    position has one for each of its experts.

    x           -- [places / each, columns]: place n takes row n / each
    order, ends -- of `order_by_expert`
    bias        -- float32 [stored experts, rows]
    zeros       -- whether there are places of no expert, behind the last end: they get zeros

    Returns [places, rows], with factors of 1. Weights, their scales and minima, and inputs are rounded to float16, sums
    are float32. Raises `ValueError` for experts that are not `grouped`.
    """
    if not experts.grouped:
        raise ValueError(f"experts of {experts.all.block}: grouped products take {grouped.BLOCK}")
    matrix, places, stored = experts.all, len(order), experts.together.stored
    y = (torch.zeros if zeros else torch.empty)(1, places, matrix.rows, device=order.device)
    if places:
        # Most experts shall need one group of places; those of all positions, some.
        tokens = next((size for size in grouped.TOKENS if 3 * places <= 2 * size * stored), grouped.TOKENS[-1])
        parts = min(MOST_PARTS, -(-len(x.values) * each // (4 * tokens * experts.together.of_token)))
        of = {"tokens": tokens, "parts": parts, "experts": stored, "each": each}
        grouped.grouped_product(matrix, x.values, y, **of, order=order, ends=ends, factor=x.factor, bias=bias)
    return Product(y[0], torch.ones(places, device=order.device), 1.0, None)


def decoded_weights(experts: CudaExperts) -> int:
    """How many float16 the matrices of all experts take."""
    matrix = experts.all
    return matrix.blocks.shape[0] * matrix.columns * matrix.config.tile_bands * BAND_ROWS


def decode_experts(experts: CudaExperts, first: int, count: int, parts: int, scratch: Tensor) -> tuple[Tensor, ...]:
    """Some of the matrices times `fp16_scale`, each by its parts of as many rows, transposed: float16 [count, columns,
    rows / parts]. They last as long as the scratch, float16 with room for them, is not used otherwise."""
    matrix, tiles = experts.all, experts.all.blocks.shape[0] // experts.together.stored
    bands = tiles * matrix.config.tile_bands  # of a matrix, filled up to whole tiles
    width = count * bands * BAND_ROWS
    out = scratch[: matrix.columns * width].view(matrix.columns, width)
    # Where gate and up share tiles, all gates come before all ups.
    gate_bands = count * bands // 2 if matrix.gate_bands else 0
    blocks_of_these = matrix.blocks[first * tiles : (first + count) * tiles]
    zigzag.dequantise_blocks(blocks_of_these, out, matrix.fp16_scale, 0, count * bands, gate_bands, block=matrix.block)
    rows = matrix.rows // parts
    if gate_bands:
        both = out.view(matrix.columns, 2, count, -1)
        return tuple(both[:, part, :, :rows].transpose(0, 1) for part in range(parts))
    each = out.view(matrix.columns, count, -1)
    return tuple(each[..., part * rows : (part + 1) * rows].transpose(0, 1) for part in range(parts))


def blocks(experts: CudaExperts, sequences: int = 1) -> int:
    """The number of thread blocks that finish the rows of a sequence."""
    _, config = _spread(experts, sequences)
    return zigzag_products.blocks(replace(experts.all, config=config), experts.together)


def _spread(experts: CudaExperts, sequences: int) -> tuple[int, CudaTileConfig]:
    """How many of so many sequences are launched at a time, and how: blocks that wait for each other run at once."""
    matrix, together, at_once = experts.all, experts.together, sequences
    of_text = matrix.blocks.shape[0] // together.stored * len(together.slots)  # blocks, at least
    blocks_at_once = multiprocessors(matrix.blocks.device)
    if together.added:
        launches = -(-sequences // max(blocks_at_once // of_text, 1))
        at_once = -(-sequences // launches)
    splits = max(1, min(matrix.config.splits, blocks_at_once // (of_text * at_once)))
    return at_once, replace(matrix.config, splits=splits)
