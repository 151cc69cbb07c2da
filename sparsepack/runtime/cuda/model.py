"""A packed model on the GPU, at its stored size."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.architecture import Architecture
from sparsepack.models.packed import PackedLayer, PackedModel, PackedSite
from sparsepack.runtime.cuda.attention import AttentionParameters, attention_parameters
from sparsepack.runtime.cuda.rows import RowsMatrix, load_rows
from sparsepack.runtime.cuda.tile_config import BAND_ROWS
from sparsepack.runtime.cuda.zigzag import Input, ZigzagMatrix, gemv, load_zigzag
from sparsepack.runtime.kv_cache import attention_shape
from sparsepack.runtime.reference import rotary_table

ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}
"""As `kernels/activations.cuh` numbers them."""

CACHE_NAMES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Types of cached keys and values, by the names that benchmarks print."""


@dataclass(frozen=True)
class Site:
    """A site on the GPU.

    bias      -- float32 [rows] or None
    threshold -- float32 [1] or [columns]; None: always dense
    offset    -- float32 [columns] or None
    constant  -- what the product of a sparse step lacks: bias + W offset, float32 [rows] or None
    """

    matrix: ZigzagMatrix
    bias: Tensor | None
    threshold: Tensor | None
    offset: Tensor | None
    constant: Tensor | None


@dataclass(frozen=True)
class Layer:
    """A decoder block.

    norms  -- attn_norm, mlp_norm and, where the model has them, q_norm and k_norm
    window -- positions that a query sees; 0: all
    """

    sites: Mapping[str, Site]
    norms: Mapping[str, Tensor]
    window: int


@dataclass(frozen=True)
class Model:
    """Everything that does not change. `output` is the embedding itself where the two are tied; cos and sin are the
    rotary tables, float32 [context, head_dim / 2]."""

    architecture: Architecture
    device: torch.device
    layers: tuple[Layer, ...]
    embedding: RowsMatrix
    output: RowsMatrix
    output_norm: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def activation(self) -> int:
        """The gate's function, as kernels take it."""
        return ACTIVATIONS[self.architecture.activation]


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer: [sequences, kv_heads, context, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def load_model(packed: PackedModel, device: torch.device, context: int) -> Model:
    """Copy a model to a GPU; waits until it is there.

    Rows of gate and up are interleaved where they fill whole bands: a product can then finish both.
    """
    a = packed.architecture
    windows = a.sliding_windows
    embedding = load_rows(packed.embedding, device)
    tied = packed.output is packed.embedding
    cos, sin = rotary_table(torch.tensor(a.inv_freq), a.rotary_scale, context)
    model = Model(
        architecture=a,
        device=device,
        layers=tuple(_layer(layer, window, device) for layer, window in zip(packed.layers, windows, strict=True)),
        embedding=embedding,
        output=embedding if tied else load_rows(packed.output, device),
        output_norm=_vector(packed.output_norm, device),
        cos=cos.to(device),
        sin=sin.to(device),
    )
    torch.cuda.synchronize(device)  # kernels read weights before they wait for what is ahead
    return model


def new_cache(architecture: Architecture, context: int, type: str, device: torch.device, sequences: int = 1) -> Cache:
    """Room for `context` positions of every sequence. Raises `UserError` for an unknown type."""
    if type not in CACHE_NAMES:
        raise UserError(f"cache type {type!r}: expected one of {', '.join(CACHE_NAMES)}")
    shape = (sequences, architecture.kv_heads, context, architecture.head_dim)
    # Each a tensor of its own, which begins at a multiple of 16 bytes whatever the context.
    keys, values = (
        tuple(torch.zeros(shape, dtype=CACHE_NAMES[type], device=device) for _ in range(architecture.layers))
        for _ in range(2)
    )
    return Cache(keys, values)


def attention_of(model: Model, cache: Cache) -> tuple[AttentionParameters, ...]:
    """What attention takes at every step, of every layer."""
    norms = [(layer.norms.get("q_norm"), layer.norms.get("k_norm")) for layer in model.layers]
    sequences = cache.keys[0].shape[0]
    shape = attention_shape(model.architecture, norms, model.cos, model.sin, sequences)
    return attention_parameters(shape, cache.keys, cache.values)


def _layer(layer: PackedLayer, window: int, device: torch.device) -> Layer:
    sites = {name: _site(site, device, gate=name == "mlp_in") for name, site in layer.sites.items()}
    return Layer(sites, {name: _vector(norm, device) for name, norm in layer.norms.items()}, window)


def _site(site: PackedSite, device: torch.device, gate: bool) -> Site:
    gate = gate and site.matrix.rows % (2 * BAND_ROWS) == 0
    bias = None if site.bias is None else _vector(site.bias, device)
    if site.rule is None:
        return Site(load_zigzag(site.matrix, device, gate=gate), bias, None, None, bias)
    threshold = _vector(site.rule.limits, device)
    if site.rule.offset is None:
        return Site(load_zigzag(site.matrix, device, gate=gate), bias, threshold, None, bias)
    offset = _vector(site.rule.offset, device)
    matrix = load_zigzag(site.matrix, device)
    constant = torch.empty(site.matrix.rows, device=device)
    torch.cuda.synchronize(device)
    gemv(matrix, Input(offset), constant, bias=bias)
    if gate:  # rows of such a matrix come in pairs from the product that was just made
        matrix = load_zigzag(site.matrix, device, gate=True)
    return Site(matrix, bias, threshold, offset, constant)


def _vector(x: Tensor, device: torch.device) -> Tensor:
    return x.detach().to(device, torch.float32).reshape(-1).contiguous()
