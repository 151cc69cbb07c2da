"""Model families as data: which submodules of a decoder block sit at which site, which are norms.

A family is a row here and nothing else: calibration and evaluation hook the stock transformers model, the packers
read tensors by the names below, and the engine is told the numbers (`models/architecture.py`). A row whose models
formats and engines have no place for says so; everything that works on the stock model works with it all the same.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

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


@dataclass(frozen=True)
class SharedExpert:
    """An MLP with a gate that every token has beside the experts that are chosen, as much of it as the sigmoid of one
    more product of the router's input says. Names are relative to a decoder block.

    Everywhere but in the stock model it is so many experts more as it is as wide as one of the others; they stand after
    these.

    module -- that holds its projections, of the usual names
    gate   -- the module whose `weight` is [1, hidden]
    width  -- the field of the configuration that says how wide it is
    """

    module: str = "mlp.shared_expert"
    gate: str = "mlp.shared_expert_gate"
    width: str = "shared_expert_intermediate_size"

    @property
    def projections(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Its gate and up, and its down."""
        return (f"{self.module}.gate_proj", f"{self.module}.up_proj"), (f"{self.module}.down_proj",)


@dataclass(frozen=True)
class Experts:
    """MLPs that are mixtures of experts: a router chooses a few of them for each token, by the softmax of its logits.

    The stock model holds them as parameters of one module, `GATE_UP` [experts, 2 * width, hidden], the gate's rows
    first, and `DOWN` [experts, hidden, width]. Names are relative to a decoder block.

    module     -- that holds them
    router     -- the module whose `weight` is [experts, hidden]
    stored     -- how a checkpoint names the module, which the stock model may call otherwise
    parts      -- how a checkpoint names gate, up and down of one expert, within `stored` and the expert's number
    count      -- the field of the configuration that says how many there are
    normalised -- the field that says whether the weights of the chosen ones are made to add up to one; "": they are
    gguf_normalised -- whether llama.cpp makes them so
    dense      -- fields that make the MLPs of some blocks dense, which nothing here has a place for, and what each of
                  them is where there are none
    shared     -- the expert that all tokens have; None: there is none
    """

    module: str
    router: str
    stored: str
    parts: tuple[str, str, str]
    count: str = "num_experts"
    normalised: str = ""
    gguf_normalised: bool = True
    dense: Mapping[str, Any] = field(default_factory=dict)
    shared: SharedExpert | None = None

    GATE_UP: ClassVar[str] = "gate_up_proj"
    DOWN: ClassVar[str] = "down_proj"

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of the two parameters: what stands at mlp_in, and what stands at mlp_mid."""
        return f"{self.module}.{self.GATE_UP}", f"{self.module}.{self.DOWN}"


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
    norms          -- our name -> module; `attn_post_norm` and `mlp_post_norm` norm what attention and MLP add,
                      `q_row_norm` and `k_row_norm` the queries and keys of all heads together
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
    experts        -- of MLPs that are mixtures of experts; None: MLPs are dense
    clips          -- of the configuration: the bound of queries, keys and values, which no engine has a place for
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
    experts: Experts | None = None
    clips: str = ""

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

    def weight(self, projection: str) -> str:
        """The name of a projection's tensor: what `projections` names is a module, but for experts, whose projections
        are parameters."""
        of_experts = self.experts is not None and projection in self.experts.parameters
        return projection if of_experts else f"{projection}.weight"

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

_ROW_NORMS = MappingProxyType({**_NORMS, "q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"})

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


_EXPERT_PARTS = MappingProxyType(
    {
        **{ours: theirs for ours, theirs in _GGUF_PARTS.items() if not ours.startswith("ffn_") or ours == "ffn_norm"},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
_SHARED_PARTS = MappingProxyType(
    {
        **_EXPERT_PARTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)


def _of_experts(experts: Experts, norms: Mapping[str, str] = _NORMS, **fields: Any) -> dict[str, Any]:
    """What rows of families with experts have in common."""
    in_, mid = experts.parameters
    of_shared = ((), ()) if experts.shared is None else experts.shared.projections
    return {
        "projections": MappingProxyType(
            {**_PROJECTIONS, "mlp_in": (in_, *of_shared[0]), "mlp_mid": (mid, *of_shared[1])}
        ),
        "norms": norms,
        "rotary": "half-split",
        "experts": experts,
        "gguf_parts": _EXPERT_PARTS,
        "residual": None,
        "unrotatable": "the router reads the residual stream, too, and experts are not rotated yet",
        **fields,
    }


_EXPERTS_APART = ("gate_proj", "up_proj", "down_proj")
_SOME_DENSE = MappingProxyType({"mlp_only_layers": [], "decoder_sparse_step": 1})

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
            Family(
                "mixtral",
                "llama",
                gguf_permuted=True,
                slides=True,
                **_of_experts(
                    Experts("mlp.experts", "mlp.gate", "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts")
                ),
            ),
            Family(
                "qwen3_moe",
                "qwen3moe",
                gguf_permuted=False,
                qk_norm=True,
                gguf_biases=False,
                gguf_head=128,
                fields=MappingProxyType({"intermediate_size": "moe_intermediate_size"}),
                **_of_experts(
                    Experts(
                        "mlp.experts",
                        "mlp.gate",
                        "mlp",
                        _EXPERTS_APART,
                        normalised="norm_topk_prob",
                        dense=_SOME_DENSE,
                    ),
                    _QK_NORMS,
                ),
            ),
            Family(
                "olmoe",
                "olmoe",
                gguf_permuted=False,
                gguf_biases=False,
                **_of_experts(
                    Experts(
                        "mlp.experts",
                        "mlp.gate",
                        "mlp",
                        _EXPERTS_APART,
                        normalised="norm_topk_prob",
                        gguf_normalised=False,
                    ),
                    _ROW_NORMS,
                    clips="clip_qkv",
                ),
            ),
            Family(
                "qwen2_moe",
                "qwen2moe",
                gguf_permuted=False,
                fields=MappingProxyType({"intermediate_size": "moe_intermediate_size", "attention_bias": "qkv_bias"}),
                **_of_experts(
                    Experts(
                        "mlp.experts",
                        "mlp.gate",
                        "mlp",
                        _EXPERTS_APART,
                        normalised="norm_topk_prob",
                        gguf_normalised=False,
                        dense=_SOME_DENSE,
                        shared=SharedExpert(),
                    ),
                    gguf_parts=_SHARED_PARTS,
                ),
            ),
        )
    }
)
_OTHER_ROUTERS = "its router has sigmoid scores, a bias for each expert, or groups of experts"
_LATENT = "its attention keeps keys and values compressed (MLA), and " + _OTHER_ROUTERS
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite"), _LATENT),
        **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2"), _OTHER_ROUTERS),
        "gpt_oss": "its experts are stored transposed in MXFP4, with biases, and its attention has sinks",
        **dict.fromkeys(("qwen3_next", "minimax"), "most of its layers have linear attention"),
        "phimoe": "its router chooses by sparse mixing",
        "jamba": "most of its layers are state-space models",
        "granitemoe": "its embedding, attention and residual sums are scaled",
        "llama4": "its experts are scaled on the way in, and not each of its layers turns queries and keys",
        "llama4_text": "its experts are scaled on the way in, and not each of its layers turns queries and keys",
    }
)
"""Model types that are known and not supported, and why: users ask for them by name."""


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
        if model_type in REFUSED:
            raise CheckpointError(
                f"{where}: {model_type} models are not supported: {REFUSED[model_type]}; expected one of "
                f"{', '.join(FAMILIES)}"
            )
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


def check_without_experts(family: Family, where: str, verb: str) -> None:
    """Raise `CheckpointError` for a model with experts; `verb` is what does not take them."""
    if family.experts is not None:
        able = ", ".join(name for name, other in FAMILIES.items() if other.experts is None)
        raise CheckpointError(
            f"{where}: {verb} does not take {family.model_type} models yet, whose MLPs are mixtures of experts; "
            f"expected one of {able}"
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
