"""Inputs that each token has for each block (Gemma 4 E2B and E4B): where they come from, and what a block adds by its
own, in a step and in prefill.

    p = RMSNorm(projection x) + scale * table[token]      [layers * width], x the embedding of the token
    y = (x + RMSNorm(out (activation(gate x) * p))) * scalar
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedPerLayer, PackedPerLayerInputs
from sparsepack.runtime.cuda.decoder.buffers import Launch
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.cuda.products.rows import RowsMatrix
from sparsepack.runtime.decoder import load_vector


@dataclass(frozen=True)
class PerLayer:
    """What a block adds by its input; the fields are as `PackedPerLayer` has them.

    number     -- of the block; activation: the number under which kernels know the gate's function
    """

    number: int
    gate: RowsMatrix
    out: RowsMatrix
    norm: Tensor
    eps: float
    activation: int

    def prefill(self, x: Tensor, inputs: Tensor, kernels: Kernels) -> Product:
        """What is normed and added to x [S, hidden], by the inputs [S, layers, width] of all blocks."""
        gates = kernels.matmul(self.gate, x)
        gated = torch.empty_like(gates)
        kernels.gate_inputs(gates, inputs[:, self.number], self.activation, gated)
        return Product(kernels.matmul(self.out, gated), torch.ones(len(x), device=x.device), 1.0, None)


@dataclass(frozen=True)
class PerLayerInputs:
    """Where the inputs come from; the fields are as `PackedPerLayerInputs` has them, norms scaled for the sum.

    eps -- of the norm of a product that is not scaled
    """

    embedding: RowsMatrix
    projection: RowsMatrix
    norm: Tensor
    scale: float
    eps: float

    def prefill(self, ids: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
        """The inputs of tokens int32 [S] whose embeddings are x [S, hidden]: float32 [S, layers, width]."""
        rows = torch.empty(len(ids), self.embedding.columns, device=x.device)
        kernels.embed(self.embedding, ids, rows, self.scale)
        width = len(self.norm)
        rows, made = rows.view(-1, width), kernels.matmul(self.projection, x).view(-1, width)
        kernels.post_norm(made, rows, self.norm, self.eps, rows)
        return rows.view(len(ids), -1, width)


class PerLayerStep:
    """The kernels of a step that make inputs, and that add what blocks make of them: those of `stored` launches.

    ids      -- int32 [B]; embedded: float32 [B, hidden], their embeddings
    unadded  -- float32 [B, hidden]: what a block's other parts leave
    """

    def __init__(self, of: PerLayerInputs, ids: Tensor, embedded: Tensor, kernels: Kernels) -> None:
        self._of, self._ids, self._embedded, self._kernels = of, ids, embedded, kernels
        rows, device = of.embedding.columns, embedded.device
        self._table, self._inputs = (torch.empty(len(ids), rows, device=device) for _ in range(2))
        self._gates, self._gated = (torch.empty(len(ids), len(of.norm), device=device) for _ in range(2))
        self.unadded, self._update = torch.empty_like(embedded), torch.empty_like(embedded)

    def begin(self) -> Iterator[Launch]:
        """The kernels that make the inputs of all blocks, once there are embeddings."""
        of, kernels, width = self._of, self._kernels, len(self._of.norm)
        yield partial(kernels.embed, of.embedding, self._ids, self._table, of.scale)
        yield partial(kernels.product, of.projection, self._embedded, self._inputs)
        table, inputs = self._table.view(-1, width), self._inputs.view(-1, width)
        yield partial(kernels.post_norm, inputs, table, of.norm, of.eps, inputs)

    def add(self, of: PerLayer, y: Tensor, squares: Tensor | None, scale: float) -> Iterator[Launch]:
        """The kernels that leave in y [B, hidden], times `scale`, what `unadded` and a block make."""
        kernels, width = self._kernels, len(self._of.norm)
        own = self._inputs.view(len(self._ids), -1, width)[:, of.number]
        yield partial(kernels.product, of.gate, self.unadded, self._gates)
        yield partial(kernels.gate_inputs, self._gates, own, of.activation, self._gated)
        yield partial(kernels.product, of.out, self._gated, self._update)
        last = partial(kernels.post_norm, self._update, self.unadded, of.norm, of.eps, y, squares=squares)
        yield partial(last, scale=scale)


def load_per_layer(
    of: PackedPerLayer, number: int, eps: float, activation: int, device: torch.device, kernels: Kernels
) -> PerLayer:
    """Copy what a block adds by its input to a GPU."""
    gate, out = (kernels.load_rows(matrix, device) for matrix in (of.gate, of.out))
    return PerLayer(number, gate, out, load_vector(of.norm, device), eps, activation)


def load_per_layer_inputs(
    of: PackedPerLayerInputs, eps: float, device: torch.device, kernels: Kernels
) -> PerLayerInputs:
    """Copy where inputs come from to a GPU. eps -- of the model's norms"""
    embedding, projection = (kernels.load_rows(matrix, device) for matrix in (of.embedding, of.projection))
    return PerLayerInputs(embedding, projection, load_vector(of.sum_norm, device), of.row_scale, of.norm_eps(eps))
