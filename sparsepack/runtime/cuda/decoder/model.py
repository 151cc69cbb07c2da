"""A packed model on the GPU, at its stored size."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import Architecture
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.rows import RowsMatrix
from sparsepack.runtime.cuda.products.tile_config import BAND_ROWS
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag, Input
from sparsepack.runtime.kv_cache import AttentionShape, attention_shape
from sparsepack.runtime.reference.attention import rotary_table

ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}
"""The activations have the numbers that `kernels/common/activations.cuh` gives them."""


@dataclass(frozen=True)
class Columns:
    """The columns that a site's product reads, and what the product lacks without the others.

    threshold -- float32 [1] or [columns]; None: every column
    offset    -- taken from the input first: float32 [columns] or None
    bias      -- to add to the product: the site's own and, with an offset, W offset; float32 [rows] or None
    """

    threshold: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class CudaSite:
    """A site on the GPU: the matrix, and the columns that products read in dense and in sparse steps, which are the
    same without a rule. Prefill is dense."""

    matrix: CudaZigzag
    dense: Columns
    sparse: Columns


@dataclass(frozen=True)
class CudaLayer:
    """A decoder block without its attention. `basis` is what its input is multiplied by first; None: nothing."""

    sites: Mapping[str, CudaSite]
    attn_norm: Tensor
    mlp_norm: Tensor
    basis: RowsMatrix | None


@dataclass(frozen=True)
class CudaModel:
    """The tensors of a model, which never change. `output` is the embedding itself where the two are tied."""

    architecture: Architecture
    device: torch.device
    layers: tuple[CudaLayer, ...]
    embedding: RowsMatrix
    output: RowsMatrix
    output_norm: Tensor

    @property
    def activation(self) -> int:
        """The number under which kernels know the gate's function."""
        return ACTIVATIONS[self.architecture.activation]


def load_model(packed: PackedModel, device: torch.device, kernels: Kernels) -> CudaModel:
    """Copy a model to a GPU, and wait until it is there.

    Rows of gate and up are interleaved where they fill whole bands: a product can then finish both.
    """
    embedding = kernels.load_rows(packed.embedding, device)
    tied = packed.output is packed.embedding
    model = CudaModel(
        architecture=packed.architecture,
        device=device,
        layers=tuple(_layer(layer, device, kernels) for layer in packed.layers),
        embedding=embedding,
        output=embedding if tied else kernels.load_rows(packed.output, device),
        output_norm=_vector(packed.output_norm, device),
    )
    kernels.synchronize(device)  # kernels read weights before they wait for what is ahead
    return model


def load_attention(packed: PackedModel, device: torch.device, context: int, sequences: int) -> AttentionShape:
    """The shape from which a model's cache is made, with norms and rotary tables on a GPU."""
    a = packed.architecture
    cos, sin = rotary_table(torch.tensor(a.inv_freq), a.rotary_scale, context)
    norms = [
        {name: _vector(norm, device) for name, norm in layer.norms.items() if name in ("q_norm", "k_norm")}
        for layer in packed.layers
    ]
    pairs = [(of.get("q_norm"), of.get("k_norm")) for of in norms]
    return attention_shape(a, pairs, cos.to(device), sin.to(device), sequences, packed.attention)


def _layer(layer: PackedLayer, device: torch.device, kernels: Kernels) -> CudaLayer:
    sites = {name: _site(site, device, name == "mlp_in", kernels) for name, site in layer.sites.items()}
    attn_norm, mlp_norm = (_vector(layer.norms[name], device) for name in ("attn_norm", "mlp_norm"))
    basis = None if layer.basis is None else kernels.load_rows(layer.basis, device)
    return CudaLayer(sites, attn_norm, mlp_norm, basis)


def _site(site: PackedSite, device: torch.device, gate: bool, kernels: Kernels) -> CudaSite:
    gate = gate and site.matrix.rows % (2 * BAND_ROWS) == 0
    load = partial(kernels.load_zigzag, site.matrix, device)
    bias = None if site.bias is None else _vector(site.bias, device)
    dense = Columns(bias=bias)
    if site.rule is None:
        return CudaSite(load(gate=gate), dense, dense)
    threshold = _vector(site.rule.limits, device)
    if site.rule.offset is None:
        return CudaSite(load(gate=gate), dense, Columns(threshold, bias=bias))
    offset = _vector(site.rule.offset, device)
    matrix = load()
    with_offset = torch.empty(site.matrix.rows, device=device)
    kernels.synchronize(device)
    kernels.gemv(matrix, Input(offset), with_offset, bias=bias)
    if gate:  # rows of such a matrix come in pairs from the product that was just made
        matrix = load(gate=True)
    return CudaSite(matrix, dense, Columns(threshold, offset, with_offset))


def _vector(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device, torch.float32).reshape(-1).contiguous()
