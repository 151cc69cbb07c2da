"""A packed model on the GPU, at its stored size."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedLayer, PackedModel
from sparsepack.models.activations import xielu_coefficients
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import CLAMPED_SWIGLU, EXPERT_NORMS, SUB_NORMS, XIELU, Attention, Latent
from sparsepack.models.family import ATTENTION_SITES, LATENT_SITES
from sparsepack.models.parts import LATENT_NORMS
from sparsepack.placement.budget import Plan
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.attention.latents import LatentWeights, latent_weights
from sparsepack.runtime.cuda.decoder.expert_mlp import ExpertMlp
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp, DenseMlp, load_mlp
from sparsepack.runtime.cuda.decoder.per_layer import (
    PerLayer,
    PerLayerInputs,
    load_per_layer,
    load_per_layer_inputs,
)
from sparsepack.runtime.cuda.decoder.sites import CudaSite, load_sites
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import DividedPlace, Place
from sparsepack.runtime.cuda.products.rows import RowsMatrix
from sparsepack.runtime.decoder import kept_latents, load_vector
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu

ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "relu2": 4, CLAMPED_SWIGLU: 5}
PLAIN_ACTIVATIONS = {"relu2": 1, XIELU: 1}
"""The activations have the numbers that `kernels/common/activations.cuh` gives them; an MLP without a gate takes its
rows for both, and relu(h) h is relu2(h); of xIELU nobody looks at the number."""


@dataclass(frozen=True)
class CudaLayer:
    """A decoder block without its cache.

    attention  -- the sites of its token mixer; empty: it is an MLP alone
    mlp        -- None: it is a token mixer alone
    attn_norm, mlp_norm -- the RMSNorms of what attention and the MLP read; None: they read it as it is
    layer_norms -- weight and bias of the LayerNorms in their place, twice the same where both read one; None: there are
                   none
    basis      -- what its input is multiplied by first; None: nothing
    post_norms -- the norms of what attention and the MLP add; None: they add it as it is
    row_norms  -- those of the queries and of the keys of all heads together; None: there are none
    activation -- the number under which kernels know the gate's function
    latent_norms -- those of the latents of queries, None where these have none, and of keys and values; None: there
                    are no latents
    scalar     -- what all that leaves the block is multiplied by; 1 where nothing is normed before it is added
    expert_norms -- the norms of what the chosen experts make, and of what the shared ones make; None: there are none
    sub_norm   -- the norm of what enters attn_out; None: there is none
    parallel   -- the MLP reads what attn_in reads
    latents    -- attn_kv_b as steps multiply with it where latents are cached; None: keys and values are
    per_layer  -- what it adds by an input of its own; None: it has none
    """

    attention: Mapping[str, CudaSite]
    mlp: CudaMlp | None
    attn_norm: Tensor | None
    mlp_norm: Tensor | None
    basis: RowsMatrix | None
    post_norms: tuple[Tensor, Tensor] | None = None
    row_norms: tuple[Tensor, Tensor] | None = None
    activation: int = 0
    layer_norms: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    latent_norms: tuple[Tensor | None, Tensor] | None = None
    scalar: float = 1.0
    expert_norms: tuple[Tensor, Tensor] | None = None
    latents: LatentWeights | None = None
    per_layer: PerLayer | None = None
    sub_norm: Tensor | None = None
    parallel: bool = False


@dataclass(frozen=True)
class CudaModel:
    """The tensors of a model, which never change. `output` is the embedding itself where the two are tied.

    names -- those of a block's matrices under which steps count what they read, in the order of their products
    per_layer -- where inputs of each block come from; None: there are none
    """

    architecture: Architecture
    names: tuple[str, ...]
    device: torch.device
    layers: tuple[CudaLayer, ...]
    embedding: RowsMatrix
    output: RowsMatrix
    output_norm: Tensor
    output_norm_bias: Tensor | None = None
    per_layer: PerLayerInputs | None = None

    @cached_property
    def own_layers(self) -> int:
        """The layers from this number on read keys and values of others alone: their positions leave nothing behind."""
        mixers = [block.mixer for block in self.architecture.blocks]
        return max(n for n, of in enumerate(mixers, 1) if not isinstance(of, Attention) or of.source is None)

    @property
    def per_sequence(self) -> Collection[tuple[int, str]]:
        """The units of each text of a step are counted of these layers, and of `names`."""
        layers = [n for n, layer in enumerate(self.layers) if layer.mlp is not None and layer.mlp.per_sequence]
        of_attention = {*ATTENTION_SITES, *LATENT_SITES}
        return {(layer, name) for layer in layers for name in self.names if name not in of_attention}

    @property
    def mlps(self) -> list[CudaMlp]:
        """The MLPs of the blocks that have one."""
        return [layer.mlp for layer in self.layers if layer.mlp is not None]

    @property
    def absent(self) -> Collection[tuple[int, str]]:
        """The layers without what has one of `names`."""
        of_attention = {*ATTENTION_SITES, *LATENT_SITES}
        return {
            (n, name)
            for n, layer in enumerate(self.layers)
            for name in self.names
            if (not layer.attention if name in of_attention else layer.mlp is None)
        }

    @property
    def alone(self) -> bool:
        """Whether blocks are a token mixer or an MLP alone."""
        return any(block.mixer is None or block.mlp is None for block in self.architecture.blocks)

    @property
    def post_norms(self) -> bool:
        """Whether blocks norm what they add."""
        return any(block.norms_after for block in self.architecture.blocks)

    @property
    def normed_experts(self) -> bool:
        """Whether blocks norm what their experts make, the chosen and the shared ones apart."""
        return any(block.norms_of_experts for block in self.architecture.blocks)

    @property
    def layer_norms(self) -> bool:
        """Whether blocks read LayerNorms."""
        return any(block.layer_norms for block in self.architecture.blocks)

    @property
    def activation_norms(self) -> bool:
        """Whether a kernel stands between products of an MLP."""
        return self.architecture.activation == XIELU or any(block.sub_norms for block in self.architecture.blocks)

    @property
    def parallel(self) -> bool:
        """Whether the MLPs of blocks read what attention reads."""
        return any(block.parallel for block in self.architecture.blocks)

    @property
    def row_norms(self) -> bool:
        """Whether queries and keys of all heads are normed together."""
        return any(block.qk_norm == "rows" for block in self.architecture.blocks)


def load_model(
    packed: PackedModel,
    device: torch.device,
    kernels: Kernels,
    plan: Plan | None = None,
    cpu_gpu: CpuGpu | None = None,
) -> CudaModel:
    """Copy a model to a GPU, and wait until it is there.

    plan    -- what of it lies in the host's memory; None: nothing
    cpu_gpu -- loads the matrices that the processor may have part in; None: it has none
    """
    load_attention = load_sites if cpu_gpu is None else cpu_gpu.load_attention
    load_any_mlp = load_mlp if cpu_gpu is None else cpu_gpu.load_mlp

    here_of = kernels.on_card if plan is None else kernels.apart_on_card()

    def place(on_card: bool) -> Place:
        return here_of if on_card else kernels.in_host_memory

    def place_of(kind: str, block: int) -> Place:
        """The place of a kind of matrices of a block."""
        if plan is None or not plan.parts.together:
            return place(plan is None or kind == "records" or block < plan.matrices[kind][1])
        planes, whole = plan.on_card(kind, block), len(plan.parts.levels)
        if planes == whole or whole == 1:
            return place(planes > 0)
        return DividedPlace(max(planes, 1), place(planes > 0), kernels.in_host_memory)

    def layer(number: int, of: PackedLayer) -> CudaLayer:
        block = packed.architecture.blocks[number]

        def norm(name: str) -> Tensor | None:
            return load_vector(of.norms[name], device) if name in of.norms else None

        def norms(first: str, second: str) -> tuple[Tensor, Tensor] | None:
            one, other = norm(first), norm(second)
            return None if one is None or other is None else (one, other)

        first, second = norms("attn_norm", "attn_norm_bias"), norms("mlp_norm", "mlp_norm_bias")
        second = first if block.parallel else second
        layer_norms = None if first is None or second is None else (first, second)
        before = (None, None) if block.layer_norms else (norm("attn_norm"), norm("mlp_norm"))
        post_norms, row_norms = norms("attn_post_norm", "mlp_post_norm"), norms("q_row_norm", "k_row_norm")
        of_attention = place_of("attention", number)
        of_basis = here_of if isinstance(of_attention, DividedPlace) else of_attention
        basis = None if of.basis is None else kernels.load_rows(of.basis, device, place=of_basis)
        attention = load_attention(of.attention, device, kernels, of_attention)
        mlp: CudaMlp | None = None
        if block.mlp is not None:
            mlp = load_any_mlp(of.mlp, device, kernels, place_of("gates", number), place_of("records", number))
        q_norm, kv_norm = (norm(name) for name in LATENT_NORMS)
        latent_norms = None if kv_norm is None else (q_norm, kv_norm)
        expert_norms = norms(*EXPERT_NORMS)
        if expert_norms is not None and isinstance(mlp, ExpertMlp):
            mlp = replace(mlp, norms=expert_norms, eps=float(packed.architecture.norm_eps))
        if block.sub_norms and isinstance(mlp, DenseMlp):
            mlp = replace(mlp, norm=norm(SUB_NORMS[1]), eps=float(packed.architecture.norm_eps))
        if of.xielu is not None and isinstance(mlp, DenseMlp):
            mlp = replace(mlp, xielu=xielu_coefficients(of.xielu).to(device, torch.float32))
        plain = block.mlp is not None and not block.mlp.gated
        numbers_of = {**ACTIVATIONS, **PLAIN_ACTIVATIONS} if plain else ACTIVATIONS
        found = CudaLayer(
            attention,
            mlp,
            *before,
            basis,
            post_norms,
            row_norms,
            0 if block.mlp is None else numbers_of[block.mlp.activation],
            layer_norms,
            latent_norms,
            1.0 if of.scalar is None else float(of.scalar),
            expert_norms,
            sub_norm=norm(SUB_NORMS[0]),
            parallel=block.parallel,
        )
        if (own := of.per_layer) is not None:
            numbers = number, float(packed.architecture.norm_eps), found.activation
            found = replace(found, per_layer=load_per_layer(own, *numbers, device, kernels))
        return found if latent is None else replace(found, latents=weights_of(latent, of, attention["attn_kv_b"]))

    def weights_of(latent: Latent, of: PackedLayer, site: CudaSite) -> LatentWeights:
        multiply = partial(kernels.multiply, site.matrix, scratch=kernels.new_scratch([site.matrix], device))
        units = of.attention["attn_kv_b"].matrix.units
        return latent_weights(latent, packed.architecture.heads, multiply, site.dense.bias, units, device)

    latent, inputs = kept_latents(packed, find_backend("cuda")), packed.per_layer
    eps = float(packed.architecture.norm_eps)
    latent_sites = [name for name in LATENT_SITES if name in packed.layers[0].attention]
    tied, output_bias = packed.output is packed.embedding, packed.scaled_output_norm_bias
    output_here = plan is None or plan.output
    embedding_here = output_here if tied else plan is None or plan.embedding
    embedding = kernels.load_rows(packed.embedding, device, place=place(embedding_here))
    model = CudaModel(
        architecture=packed.architecture,
        names=(*ATTENTION_SITES, *packed.mlp_kind.counted, *latent_sites),
        device=device,
        layers=tuple(layer(number, of) for number, of in enumerate(packed.layers)),
        embedding=embedding,
        output=embedding if tied else kernels.load_rows(packed.output, device, place=place(output_here)),
        output_norm=load_vector(packed.scaled_output_norm, device),
        output_norm_bias=None if output_bias is None else load_vector(output_bias, device),
        per_layer=None if inputs is None else load_per_layer_inputs(inputs, eps, device, kernels),
    )
    kernels.synchronize(device)  # kernels read weights before they wait for what is ahead
    if plan is not None:
        torch.cuda.empty_cache()  # or what comes next would lie in what loading took, and keep it
    return model
