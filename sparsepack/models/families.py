"""Model families as data: which submodules of a decoder block sit at which site, which are norms.

A family is a row here and nothing else: calibration and evaluation hook the stock transformers model, the packers
read tensors by the names below, and the engine is told the numbers (`models/architecture.py`). A row whose models
formats and engines have no place for says so; everything that works on the stock model works with it all the same.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from sparsepack.errors import CheckpointError

SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
"""A site is where one hidden vector enters one or more projections of a decoder block; the sites stand in order of
execution."""

ATTENTION_SITES, MLP_SITES = SITES[:2], SITES[2:]

BASIS = "residual_basis"
"""The module of a decoder block that changes the basis of the residual stream before anything else in it: h' = h W^T.
No stock model has such a module (`models.stock.basis`)."""

ATTN_OUT = "attn_out"
"""The site whose channels are those of the attention heads' outputs, head by head."""
MLP_MID = "mlp_mid"
"""The site whose channels are the neurons of the MLP."""

Rotary = Literal["half-split", "interleaved", "none"]
"""Channel c of the n of a head that turn, the first ones, turns with c + n / 2 ("half-split", also called neox), 2 c
with 2 c + 1, or none turns."""


@dataclass(frozen=True)
class LearnedPositions:
    """A table of vectors that are added to the embedding: its module, and the row of a text's first token."""

    module: str
    first: int


@dataclass(frozen=True)
class ResidualStream:
    """The sites that read the residual stream and write to it, in a family whose norms divide the stream by its root
    mean square and do no more. Such a stream may be written in any orthonormal basis (`models.checkpoint.rotated`).

    readers -- site -> our name of the norm through which its projections read the stream
    writers -- the sites whose outputs are added to the stream, which the embedding begins
    last    -- the norm, a module of the backbone, through which the output matrix reads the stream
    """

    readers: Mapping[str, str]
    writers: tuple[str, ...]
    last: str


_STREAM = ResidualStream(
    MappingProxyType({"attn_in": "attn_norm", "mlp_in": "mlp_norm"}), ("attn_out", "mlp_mid"), "norm"
)


_GGUF_PARTS = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


@dataclass(frozen=True)
class Family:
    """A model family. Names of projections and norms are relative to a decoder block, others to the backbone.

    model_type     -- `model_type` of config.json
    gguf           -- llama.cpp's architecture name; empty: it has none
    projections    -- site -> its projections, in the order in which their output rows are stacked; an MLP with a gate
                      has gate and up at `mlp_in`, one without has one matrix there. A family that stores the matrices
                      of a site fused has one projection there, whose rows are the same
    norms          -- our name -> module; `attn_post_norm` and `mlp_post_norm` norm what attention and MLP add
    norm_offset    -- what is added to the weights of norms before they multiply
    gguf_permuted  -- llama.cpp stores q and k rows with rotary pairs adjacent; Hugging Face keeps the halves apart
    gguf_biases    -- llama.cpp knows biases in such models
    gguf_head      -- transformers takes this for the head size, whatever a GGUF says; None: it reads the head size
    gguf_parts     -- llama.cpp's name of a part of a block -> module
    rotary         -- which channels of a head the stock model turns together
    qk_norm        -- q and k are RMS-normalised per head before the rotary embedding
    slides         -- a window in config.json holds for all layers where it does not say for which
    backbone       -- the module with the blocks, within the causal language model
    widening       -- the matrix behind an embedding that is not as wide as the blocks
    positions      -- that are learned; None: there are none
    after          -- modules after the last block, as far as a model has them; the output matrix comes then
    fields         -- of the configuration: Llama's name -> its own, where they differ
    unpackable     -- what formats and engines have no place for in such a model; empty: they have for everything
    attention      -- transformers' implementation of attention that computes all of it
    attention_cap  -- of the configuration: the bound of soft-capped scores, by its name; empty: they have none
    logit_cap      -- likewise of the output
    local_rotary   -- layers with a sliding window have rotary frequencies of their own
    embedding_scaled -- the embedding is multiplied by the root of its width
    residual       -- who reads the residual stream and who writes to it; None: it cannot be rotated
    unrotatable    -- why it cannot
    """

    model_type: str
    gguf: str
    projections: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, str]
    gguf_permuted: bool
    rotary: Rotary
    qk_norm: bool = False
    slides: bool = False
    backbone: str = "model"
    widening: str = ""
    positions: LearnedPositions | None = None
    after: tuple[str, ...] = ("norm",)
    fields: Mapping[str, str] = field(default_factory=dict)
    unpackable: str = ""
    gguf_biases: bool = True
    gguf_head: int | None = None
    gguf_parts: Mapping[str, str] = field(default_factory=lambda: _GGUF_PARTS)
    norm_offset: float = 0.0
    attention: Literal["sdpa", "eager"] = "sdpa"
    attention_cap: str = ""
    logit_cap: str = ""
    local_rotary: bool = False
    embedding_scaled: bool = False
    residual: ResidualStream | None = _STREAM
    unrotatable: str = ""

    @property
    def decoder(self) -> str:
        """The module of the base model that is the backbone; empty where the base model is that itself."""
        return self.backbone.partition(".")[2]

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return f"{self.backbone}.embed_tokens.weight"

    def block(self, layer: int | str) -> str:
        """The name of a decoder block; "" for what the names of all begin with."""
        return f"{self.backbone}.layers.{layer}"

    def basis(self, layer: int) -> str:
        """The name of the tensor [hidden, hidden] that changes the basis of the residual stream before a block."""
        return f"{self.block(layer)}.{BASIS}.weight"

    def norm_offset_of(self, name: str) -> float:
        """What is added to a tensor before it multiplies: `norm_offset` for the weights of norms, else 0."""
        module = name.removesuffix(".weight")
        outside = tuple(f"{self.backbone}.{after}" for after in self.after)
        inside = tuple(f".{norm}" for norm in self.norms.values())
        return self.norm_offset if module in outside or module.endswith(inside) else 0.0

    def setting(self, config: Any, name: str) -> Any:
        """What a stock configuration of the family says under Llama's `name`; None where it says nothing."""
        return getattr(config, self.fields.get(name, name), None)


_PROJECTIONS = MappingProxyType(
    {
        "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn_out": ("self_attn.o_proj",),
        "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_mid": ("mlp.down_proj",),
    }
)
_NORMS = MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
_QK_NORMS = MappingProxyType({**_NORMS, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"})

_PHI3 = Family(
    "phi3",
    "phi3",
    MappingProxyType(
        {
            "attn_in": ("self_attn.qkv_proj",),
            "attn_out": ("self_attn.o_proj",),
            "mlp_in": ("mlp.gate_up_proj",),
            "mlp_mid": ("mlp.down_proj",),
        }
    ),
    _NORMS,
    False,
    "half-split",
    slides=True,
    gguf_parts=MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
)

_GEMMA2 = Family(
    "gemma2",
    "gemma2",
    _PROJECTIONS,
    MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    ),
    False,
    "half-split",
    fields=MappingProxyType({"hidden_act": "hidden_activation"}),
    slides=True,
    gguf_biases=False,
    gguf_parts=MappingProxyType(
        {
            **_GGUF_PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    norm_offset=1.0,
    attention="eager",
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
    embedding_scaled=True,
    residual=None,
    unrotatable="norms stand between its matrices and what they add to",
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    gguf="gemma3",
    norms=MappingProxyType({**_GEMMA2.norms, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}),
    qk_norm=True,
    attention="sdpa",
    local_rotary=True,
    attention_cap="",  # the stock model does not look at the configuration's
)

_OPT = Family(
    "opt",
    "",
    MappingProxyType(
        {
            "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn_out": ("self_attn.out_proj",),
            "mlp_in": ("fc1",),
            "mlp_mid": ("fc2",),
        }
    ),
    MappingProxyType({"attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}),
    False,
    "none",
    backbone="model.decoder",
    widening="project_in",
    positions=LearnedPositions("embed_positions", 2),
    after=("final_layer_norm", "project_out"),
    fields=MappingProxyType(
        {
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "num_key_value_heads": "num_attention_heads",
        }
    ),
    unpackable="learned positions, norms that subtract the mean, and an MLP without a gate",
    residual=None,
    unrotatable="its norms subtract the mean, which is not the same in another basis",
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("llama", "llama", _PROJECTIONS, _NORMS, True, "half-split"),
            Family("mistral", "llama", _PROJECTIONS, _NORMS, True, "half-split", slides=True),
            Family("qwen2", "qwen2", _PROJECTIONS, _NORMS, False, "half-split"),
            Family(
                "qwen3",
                "qwen3",
                _PROJECTIONS,
                _QK_NORMS,
                False,
                "half-split",
                qk_norm=True,
                gguf_biases=False,
                gguf_head=128,
            ),
            _PHI3,
            _GEMMA2,
            _GEMMA3,
            _OPT,
        )
    }
)


@dataclass(frozen=True)
class TextPart:
    """The text part of a model that also takes images, as far as transformers has it as a model of its own.

    model_type -- of the text part
    names      -- what the names of its tensors begin with in the whole model -> in the text model
    others     -- what the names of all other tensors begin with
    """

    model_type: str
    names: Mapping[str, str]
    others: tuple[str, ...]


TEXT_PARTS: Mapping[str, TextPart] = MappingProxyType(
    {
        "gemma3": TextPart(
            "gemma3_text",
            MappingProxyType({"language_model.": "", "model.language_model.": "model."}),
            ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        )
    }
)
"""By the `model_type` of the whole model."""

PACKABLE = tuple(name for name, family in FAMILIES.items() if not family.unpackable)
"""Formats and engines have a place for these model types."""


def family_of(model_type: str, where: str) -> Family:
    """The family of a `model_type`; raises `CheckpointError` naming the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        model_type = str(model_type)[:60]
        near = difflib.get_close_matches(model_type, FAMILIES, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise CheckpointError(
            f"{where}: model type {model_type!r} is not supported{hint}; expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def check_packable(family: Family, where: str) -> None:
    """Raise `CheckpointError` for a model that no format holds and no engine runs, naming what is in their way."""
    if family.unpackable:
        raise CheckpointError(
            f"{where}: no format holds and no engine runs {family.model_type} models ({family.unpackable}); expected "
            f"one of {', '.join(PACKABLE)}; calibrate, trace, simulate, thresholds, prune and eval work with it"
        )


def stream_of(family: Family, where: str) -> ResidualStream:
    """Return the sites that read and write the residual stream. Raises `CheckpointError` for a model that cannot be
    rotated."""
    if family.residual is None:
        able = ", ".join(name for name, other in FAMILIES.items() if other.residual is not None)
        raise CheckpointError(
            f"{where}: {family.model_type} models cannot be rotated ({family.unrotatable}); expected one of {able}"
        )
    return family.residual
