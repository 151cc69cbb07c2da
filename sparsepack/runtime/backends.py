"""The table of backends: what can run a packed model, a row for each. Importing it costs nothing: the command line
takes its choices from here. docs/backends.md says how to add one. And the traits of models, what a decoder computes for
some models only: a backend's row says which of them it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from sparsepack.errors import UserError
from sparsepack.formats.blocks.table import ZIGZAG_BLOCKS
from sparsepack.formats.kinds import DENSE, EXPERTS, NEURONS, PLAIN_NEURONS, MlpKind
from sparsepack.models.blocks import XIELU, Attention

if TYPE_CHECKING:
    import torch

    from sparsepack.models.architecture import Architecture


PARTS_OF_HEADS = "a rotary embedding of a part of each head"
LONG_TEXTS = "texts so long that they turn by other frequencies"
LOCAL_FREQUENCIES = "rotary frequencies of their own in layers with a sliding window"
SOFT_CAPS = "soft caps"
SCALES = "scaled embeddings or attention scores of their own scale"
POST_NORMS = "norms after attention and MLP"
ROW_NORMS = "norms of the queries and keys of all heads together"
SHARED_EXPERTS = "a shared expert"
ROPELESS = "layers without rotary embedding"
PLAIN_MLPS = "MLPs without a gate"
SINKS = "attention sinks"
BIASED_EXPERTS = "experts with biases and a clamped SwiGLU"
NEIGHBOURS = "a rotary embedding that turns neighbouring channels together"
QUERY_GROWTH = "texts so long that later queries are scaled"
DELTA_NETS = "gated delta nets, which keep a state in place of keys and values"
STATE_SPACES = "state-space models (Mamba-2), which keep a state in place of keys and values"
ALONE = "blocks that are attention or an MLP alone"
LATENTS = "attention by latents (MLA)"
ROUTERS = "routers of sigmoids or groups, or that scale what experts give"
DENSE_BLOCKS = "dense MLPs beside mixtures of experts"
SHORT_CONVS = "short convolutions in place of attention"
ATTENTION_GATES = "attention with an output gate"
LAYER_NORMS = "norms that subtract the mean"
HEAD_SIZES = "heads of two sizes"
VALUE_NORMS = "normed values, or keys in their place"
LAYER_SCALARS = "scaled layers"
PER_LAYER = "an input of each layer"
SHARED_KV = "layers that read keys and values of another"
NORMED_EXPERTS = "norms of what experts make, and scales of each"
SUB_NORMS = "norms before attn_out and mlp_mid"
RELU2_GATES = "a gate with ReLU^2"
XIELUS = "MLPs of xIELU"
PARALLEL = "blocks whose MLP reads what attention reads"

TRAITS: Mapping[str, Callable[[Architecture, int], bool]] = MappingProxyType(
    {
        PARTS_OF_HEADS: lambda a, context: 2 * len(a.local_inv_freq or a.inv_freq) != a.head_dim,
        LONG_TEXTS: lambda a, context: a.long_texts is not None and context > a.long_texts.tokens,
        LOCAL_FREQUENCIES: lambda a, context: bool(a.local_inv_freq),
        SOFT_CAPS: lambda a, context: bool(a.attention_cap or a.logit_cap),
        SCALES: lambda a, context: (
            a.embedding_scale != 1 or a.logit_scale != 1 or a.attention_scale not in (0, a.head_dim**-0.5)
        ),
        POST_NORMS: lambda a, context: any(block.norms_after for block in a.blocks),
        ROW_NORMS: lambda a, context: any(block.qk_norm == "rows" for block in a.blocks),
        ROPELESS: lambda a, context: bool(a.ropeless),
        QUERY_GROWTH: lambda a, context: bool(a.query_growth) and context > a.query_growth[1],
        NEIGHBOURS: lambda a, context: a.heads_and_rope.rotary.convention == "interleaved",
        SINKS: lambda a, context: any(isinstance(of.mixer, Attention) and of.mixer.sinks for of in a.blocks),
        BIASED_EXPERTS: lambda a, context: any(block.mlp is not None and block.mlp.biased for block in a.blocks),
        PLAIN_MLPS: lambda a, context: not all(block.mlp is None or block.mlp.gated for block in a.blocks),
        STATE_SPACES: lambda a, context: a.mamba is not None,
        ALONE: lambda a, context: bool(a.mlp_layers),
        DELTA_NETS: lambda a, context: a.delta_net is not None,
        SHORT_CONVS: lambda a, context: bool(a.conv_layers),
        ATTENTION_GATES: lambda a, context: a.gated_attention,
        LAYER_NORMS: lambda a, context: a.blocks[0].layer_norms,
        HEAD_SIZES: lambda a, context: bool(a.global_heads),
        VALUE_NORMS: lambda a, context: any(
            isinstance(of.mixer, Attention) and (of.mixer.value_norm or of.mixer.k_eq_v) for of in a.blocks
        ),
        LAYER_SCALARS: lambda a, context: any(block.scaled for block in a.blocks),
        PER_LAYER: lambda a, context: a.per_layer > 0,
        SHARED_KV: lambda a, context: bool(a.kv_sources),
        LATENTS: lambda a, context: a.latent is not None,
        ROUTERS: lambda a, context: a.experts is not None and a.experts.router is not None,
        NORMED_EXPERTS: lambda a, context: any(block.norms_of_experts for block in a.blocks),
        SUB_NORMS: lambda a, context: any(block.sub_norms for block in a.blocks),
        RELU2_GATES: lambda a, context: any(
            of.mlp is not None and of.mlp.gated and of.mlp.activation == "relu2" for of in a.blocks
        ),
        XIELUS: lambda a, context: a.activation == XIELU,
        PARALLEL: lambda a, context: any(block.parallel for block in a.blocks),
        DENSE_BLOCKS: lambda a, context: bool(a.dense_layers),
        SHARED_EXPERTS: lambda a, context: a.experts is not None and a.experts.shared > 0,
    }
)
"""Each trait, in words, and what tells whether a model has it in sequences of up to so many tokens."""


def traits_of(architecture: Architecture, context: int) -> list[str]:
    """The traits that a model has in sequences of up to `context` tokens."""
    return [trait for trait, has in TRAITS.items() if has(architecture, context)]


@dataclass(frozen=True)
class Backend:
    """One way to run a packed model.

    name        -- as `--backend` takes it
    says        -- what runs, for people
    hardware    -- what it runs on, for people
    devices     -- torch's types of devices that it is made for, and taken for unless told otherwise; none: any device
    module      -- what offers the functions of `decoder.BackendModule`
    cache_types -- of keys and values, of "f32", "f16" and "bf16": the first unless told otherwise
    sequences   -- how many it decodes together at most
    offloads    -- whether keys and values can lie in the host's memory, away from the device
    tunes       -- the types of superblocks with which `sparsepack tune` can measure what suits the machine
    mlps        -- the kinds of MLPs that it runs
    blocks      -- the types of superblocks in zigzag order that it has kernels for
    slots       -- whether some of these neurons can have slots of their own
    budgets     -- whether what has no room in a device's memory can lie in the host's
    gate_copies -- whether copies of gates can take the place of those that have no room in a device's memory
    scales_thresholds -- whether it can keep the skipped share at the target (`--hold`)
    steps_positions -- of one sequence, that a step computes at most (`decoder.PositionsDecoder`)
    scores_rows -- whether the given tokens of several sequences are computed together (`decoder.RowsDecoder`)
    selects     -- whether decoded tokens of models with sparse attention read a part of the cached ones
    pads_tails  -- whether it lays out tails of matrices as whole bands, and reads them so
    latent_width -- of attention by latents, the widest row of these that it keeps in place of keys and values; 0: it
                   keeps these
    traits      -- of `traits.TRAITS`, those that it computes
    """

    name: str
    says: str
    hardware: str
    devices: tuple[str, ...]
    module: str
    cache_types: tuple[str, ...]
    sequences: int = 1
    offloads: bool = False
    tunes: tuple[str, ...] = ()
    mlps: tuple[MlpKind, ...] = (DENSE,)
    blocks: tuple[str, ...] = ("Q4_K",)
    slots: bool = False
    budgets: bool = False
    gate_copies: bool = False
    scales_thresholds: bool = False
    steps_positions: int = 1
    scores_rows: bool = False
    selects: bool = True
    pads_tails: bool = False
    latent_width: int = 0
    traits: frozenset[str] = frozenset()

    def divides(self, option: str) -> bool:
        """Whether some neurons can have slots: a share of them (`cached`), or what a budget has room for (`vram`)."""
        return self.budgets if option == "vram" else self.slots

    def check_device(self, device: torch.device | str) -> None:
        """Raise `UserError` for a device of a type that it is not made for."""
        if self.devices and str(device).partition(":")[0] not in self.devices:
            raise UserError(
                f"device {device}: the {self.name} backend runs on {self.hardware}; "
                f"use device {self.devices[0]} or the reference backend"
            )

    def choose_cache_type(self, requested: str | None) -> str:
        """The type of keys and values to keep; raises `UserError` for one that it does not have."""
        if requested is not None and requested not in self.cache_types:
            raise UserError(f"cache type {requested!r}: the {self.name} backend has {', '.join(self.cache_types)}")
        return requested or self.cache_types[0]


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        row.name: row
        for row in (
            Backend(
                "reference",
                says="plain torch on matrices decoded to float32, made to be right, not to be fast",
                hardware="any device of torch's",
                devices=(),
                module="sparsepack.runtime.reference.backend",
                cache_types=("f32",),
                sequences=8,
                mlps=(DENSE, NEURONS, PLAIN_NEURONS, EXPERTS),
                blocks=ZIGZAG_BLOCKS,
                scales_thresholds=True,
                traits=frozenset(TRAITS),
            ),
            Backend(
                "cpu",
                says="native kernels on the weights as they are stored, multiplied in 16 bits within tiles of columns",
                hardware="the CPU",
                devices=("cpu",),
                module="sparsepack.runtime.cpu.backend",
                cache_types=("f16",),
                sequences=8,
                tunes=("Q4_K", "Q6_P"),
                mlps=(DENSE, NEURONS, PLAIN_NEURONS, EXPERTS),
                blocks=ZIGZAG_BLOCKS,
                scales_thresholds=True,
                steps_positions=8,
                scores_rows=True,
                traits=frozenset(TRAITS),
            ),
            Backend(
                "cuda",
                says="CUDA kernels on the weights as they are stored, a token a CUDA graph; prefill in float16 on "
                "tensor cores",
                hardware="NVIDIA GPUs",
                devices=("cuda",),
                module="sparsepack.runtime.cuda.backend",
                cache_types=("bf16", "f16", "f32"),
                sequences=8,
                offloads=True,
                tunes=("Q4_K", "Q6_P"),
                mlps=(DENSE, NEURONS, PLAIN_NEURONS, EXPERTS),
                blocks=ZIGZAG_BLOCKS,
                slots=True,
                budgets=True,
                gate_copies=True,
                scales_thresholds=True,
                pads_tails=True,
                latent_width=640,
                traits=frozenset(TRAITS),
            ),
            Backend(
                "metal",
                says="Metal kernels on the weights as they are stored; prefill in float32 by torch",
                hardware="Apple GPUs",
                devices=("mps",),
                module="sparsepack.runtime.metal.backend",
                cache_types=("f16",),
                blocks=("Q4_K", "Q6_P"),
                tunes=("Q4_K",),
                scales_thresholds=True,
                selects=False,
                pads_tails=True,
            ),
        )
    }
)
"""Each backend stands under its name."""


def find_backend(name: str) -> Backend:
    """A backend's row; raises `UserError` naming the known ones."""
    if name not in BACKENDS:
        raise UserError(f"backend {name!r}: unknown; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def backend_for(device: torch.device | str) -> Backend:
    """The backend that is made for a device, by the device's type; the reference where there is none."""
    kind = str(device).partition(":")[0]
    return next((row for row in BACKENDS.values() if kind in row.devices), BACKENDS["reference"])


def most_sequences() -> int:
    """Texts that any backend decodes together at most."""
    return max(row.sequences for row in BACKENDS.values())
