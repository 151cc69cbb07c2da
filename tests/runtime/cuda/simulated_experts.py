"""Experts of an MLP, their router and products in plain torch. Each function stands in for the one of its name."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from simulated_products import ONE_SPLIT, Matrix, gemv, load_zigzag
from simulated_words import assert_written, write
from torch import Tensor

from sparsepack.formats.matrix import PackedExperts
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.memory import SENTINEL
from sparsepack.runtime.cuda.products import zigzag_products
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, Together
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference import products as reference_experts


@dataclass(frozen=True)
class Experts:
    """float32 matrices of one shape, with what the real ones tell."""

    each: list[Matrix]
    together: Together
    correction: Tensor | None = None
    scale: Tensor | None = None

    def part(self, which: Any) -> "Experts":
        return replace(self, together=replace(self.together, part=which))

    @cached_property
    def all(self) -> Matrix:
        missing = (0, 0, 0, -self.each[0].rows % (ONE_SPLIT.tile_bands * BAND_ROWS))
        padded = [torch.nn.functional.pad(matrix.weight, missing) for matrix in self.each]
        return replace(self.each[0], weight=torch.cat(padded))

    @property
    def grouped(self) -> bool:
        return self.each[0].block == "Q4_K"

    def expert(self, number: int) -> Matrix:
        return self.each[number]


def load_experts(
    matrix: PackedExperts,
    used: int,
    normalised: bool,
    device: Any,
    config: Any = None,
    *,
    gate: bool,
    added: bool,
    shared: int = 0,
) -> Experts:
    each = [load_zigzag(matrix.expert(number), device, gate=gate) for number in range(matrix.experts)]
    return Experts(each, Together(matrix.experts - shared, used, normalised, added, shared))


def order_by_expert(chosen: Tensor, stored: int, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    which = chosen.clone()
    which[len(chosen) if counted is None else int(counted) :] = stored
    in_order, order = which.flatten().sort(stable=True)
    return order.int(), torch.searchsorted(in_order, torch.arange(stored + 1)).int()


def multiply_grouped(
    experts: Experts,
    x: ScaledFp16,
    order: Tensor,
    ends: Tensor,
    each: int,
    bias: Tensor | None = None,
    *,
    zeros: bool = False,
) -> Product:
    y = torch.full((len(order), experts.all.rows), 0.0 if zeros else torch.nan)
    assert zeros or int(ends[-1]) == len(order)
    for number, matrix in enumerate(experts.each):
        places = order[ends[number] : ends[number + 1]]
        rows = x.values[places // each].float() @ (matrix.weight * matrix.fp16_scale).half().float().t()
        y[places] = rows * (x.factor[places // each] / matrix.fp16_scale)[:, None]
        if bias is not None:
            y[places] += bias[number]
    return Product(y, torch.ones(len(y)), 1.0, None)


def decode_experts(experts: Experts, first: int, count: int, parts: int, scratch: Tensor) -> list[Tensor]:
    assert count * experts.all.rows * experts.all.columns <= len(scratch)
    weights = torch.stack([matrix.weight.t() * matrix.fp16_scale for matrix in experts.each[first : first + count]])
    return [part.half() for part in weights.chunk(parts, dim=2)]


def expert_blocks(experts: Experts, texts: int = 1) -> int:
    return zigzag_products.blocks(experts.expert(0)) * len(experts.together.slots)


def route(router: Tensor, input: Input, logits: Tensor, bias: Tensor | None = None) -> None:
    if input.flag_in_data:
        assert_written(input.x)
        assert_written(input.squares)
    x = input.x.view(-1, router.shape[1])
    torch.testing.assert_close(input.squares.view(len(x), -1).sum(1), x.square().sum(1))
    products = reference.rms_norm(x, input.norm, input.eps) @ router.t()
    write(logits, (products if bias is None else products + bias).view_as(logits))


def multiply_experts(experts: Experts, input: Input, output: Output, *, logits: Tensor) -> None:
    together = experts.together
    if logits.dim() > 1:
        for text, row in enumerate(logits):
            residual, squares = (None if each is None else each[text] for each in (output.residual, output.squares))
            of = input.of_texts(slice(text, text + 1), len(logits))
            of = replace(of, x=of.x[0], squares=None if of.squares is None else of.squares[0])
            of_text = replace(output, y=output.y[text], residual=residual, squares=squares)
            multiply_experts(experts, of, of_text, logits=row)
        return
    assert output.bias is None or output.bias.shape == (together.stored, experts.all.rows)
    if input.flag_in_data:
        assert_written(logits)
    assert len(logits) == together.logits
    of_router, of_shared = logits[None, : together.experts], logits[None, together.experts :]
    one = torch.eye(together.experts)
    how = together.used, together.normalised, None, together.routing, experts.correction, experts.scale
    chosen, weights = reference_experts.route(of_router, one, *how)
    if together.shared:
        every, gate = range(together.experts, together.stored), torch.eye(1) if together.shared_gate else None
        chosen, weights = reference_experts.with_shared(of_shared, gate, every, chosen, weights)
    here = slice(together.slots.start, together.slots.stop)
    chosen, weights = chosen[:, here], weights[:, here]
    inputs = input.x.view(together.of_token, -1)[here] if together.added else [input.x] * together.of_token
    y, residual, squares, reset = output.y, output.residual, output.squares, output.reset
    rows = experts.all.rows // (1 if output.activation is None else 2)
    made = torch.zeros(len(together.slots), rows)
    for number, x, of in zip(chosen[0].tolist(), inputs, made, strict=True):
        bias = None if output.bias is None else output.bias[number]
        of_one = Output(of, bias, activation=output.activation, active=output.active)
        threshold = input.threshold
        if together.added and threshold is not None and threshold.dim() == 3:
            threshold = threshold[number]
        gemv(experts.expert(number), replace(input, x=x, threshold=threshold), of_one)
    if reset is not None:
        reset.copy_(torch.tensor(SENTINEL))
    if not together.added:
        write(y, made.view_as(y))
        return
    assert residual is not None
    product = weights[0] @ made + residual
    write(y, product)
    if squares is not None:
        assert len(squares) == expert_blocks(experts)  # of any number of texts
        write(squares, torch.nn.functional.pad(product.square().sum()[None], (0, len(squares) - 1)))
