"""A packed model on the GPU, at its stored size."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedLayer, PackedModel
from sparsepack.models.architecture import Architecture
from sparsepack.models.families import ATTENTION_SITES
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp, LoadMlp, load_mlp
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_sites, load_vector
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.rows import RowsMatrix
from sparsepack.runtime.kv_cache import AttentionShape, attention_shape
from sparsepack.runtime.reference.attention import rotary_table

ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}
"""The activations have the numbers that `kernels/common/activations.cuh` gives them."""


@dataclass(frozen=True)
class CudaLayer:
    """A decoder block without its cache. `basis` is what its input is multiplied by first; None: nothing."""

    attention: Mapping[str, CudaSite]
    mlp: CudaMlp
    attn_norm: Tensor
    mlp_norm: Tensor
    basis: RowsMatrix | None


@dataclass(frozen=True)
class CudaModel:
    """The tensors of a model, which never change. `output` is the embedding itself where the two are tied.

    names -- those of a block's matrices under which steps count what they read, in the order of their products
    """

    architecture: Architecture
    names: tuple[str, ...]
    device: torch.device
    layers: tuple[CudaLayer, ...]
    embedding: RowsMatrix
    output: RowsMatrix
    output_norm: Tensor

    @property
    def activation(self) -> int:
        """The number under which kernels know the gate's function."""
        return ACTIVATIONS[self.architecture.activation]


def load_model(packed: PackedModel, device: torch.device, kernels: Kernels, load_mlp: LoadMlp = load_mlp) -> CudaModel:
    """Copy a model to a GPU, its MLPs by a function of its own, and wait until it is there."""
    embedding = kernels.load_rows(packed.embedding, device)
    tied = packed.output is packed.embedding
    model = CudaModel(
        architecture=packed.architecture,
        names=(*ATTENTION_SITES, *packed.mlp_kind.counted),
        device=device,
        layers=tuple(_layer(layer, device, kernels, load_mlp) for layer in packed.layers),
        embedding=embedding,
        output=embedding if tied else kernels.load_rows(packed.output, device),
        output_norm=load_vector(packed.output_norm, device),
    )
    kernels.synchronize(device)  # kernels read weights before they wait for what is ahead
    return model


def load_attention(packed: PackedModel, device: torch.device, context: int, sequences: int) -> AttentionShape:
    """The shape from which a model's cache is made, with norms and rotary tables on a GPU."""
    a = packed.architecture
    cos, sin = rotary_table(torch.tensor(a.inv_freq), a.rotary_scale, context)
    norms = [
        {name: load_vector(norm, device) for name, norm in layer.norms.items() if name in ("q_norm", "k_norm")}
        for layer in packed.layers
    ]
    pairs = [(of.get("q_norm"), of.get("k_norm")) for of in norms]
    return attention_shape(a, pairs, cos.to(device), sin.to(device), sequences, packed.attention)


def _layer(layer: PackedLayer, device: torch.device, kernels: Kernels, load_mlp: LoadMlp) -> CudaLayer:
    attn_norm, mlp_norm = (load_vector(layer.norms[name], device) for name in ("attn_norm", "mlp_norm"))
    basis = None if layer.basis is None else kernels.load_rows(layer.basis, device)
    attention, mlp = load_sites(layer.attention, device, kernels), load_mlp(layer.mlp, device, kernels)
    return CudaLayer(attention, mlp, attn_norm, mlp_norm, basis)
