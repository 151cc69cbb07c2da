"""What a model family is, as data: which submodules of a decoder block sit at which site, which are norms, what its
configuration means, and the names of its tensors. Each family is a file (`models/llama.py`), which `models/families.py`
collects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from sparsepack.models.blocks import Multipliers, Rotary

SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
"""A site is where one hidden vector enters one or more projections of a decoder block; the sites stand in order of
execution."""

ATTENTION_SITES, MLP_SITES = SITES[:2], SITES[2:]
LATENT_SITES = ("attn_q_b", "attn_kv_b")
"""The sites between these of attention by latents (`blocks.Latent`), which stand before attn_out."""
ALL_SITES = (SITES[0], *LATENT_SITES, *SITES[1:])
"""Every site that a block of some family has, in order of execution."""

BASIS = "residual_basis"
"""The module of a decoder block that changes the basis of the residual stream before anything else in it: h' = h W^T.
No Hugging Face model has such a module (`hf_model.model.add_basis`)."""

ATTN_OUT = "attn_out"
"""The site whose channels are those of the attention heads' outputs, head by head."""
MLP_MID = "mlp_mid"
"""The site whose channels are the neurons of the MLP."""


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
    gate   -- the module whose `weight` is [1, hidden]; "": every token has all of it
    width  -- the field of the configuration that says how wide it is
    count  -- the field that says how many times as wide as the others it is, in place of that
    """

    module: str = "mlp.shared_expert"
    gate: str = "mlp.shared_expert_gate"
    width: str = "shared_expert_intermediate_size"
    count: str = ""

    @property
    def projections(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Its gate and up, and its down."""
        return (f"{self.module}.gate_proj", f"{self.module}.up_proj"), (f"{self.module}.down_proj",)


@dataclass(frozen=True)
class DeltaNetNames:
    """Blocks that have a gated delta net (`blocks.DeltaNet`) in place of attention. Names are relative to a decoder
    block.

    kind        -- what the configuration's `layer_types` call such a block
    module      -- that holds it
    projections -- site -> its projections: queries, keys and values in one, then what gates the output
    gates       -- modules [value_heads, hidden] that read what enters attn_in and stay float32, like routers: beta, and
                   what the decay is made of. They are few rows, and an error of a decay grows with the text
    parameters  -- our name -> its parameter: convolution [channels, 1, taps], log of the decay's rate and bias of the
                   decay [value_heads], RMSNorm of the output of each head [value_dim]
    fields      -- of the configuration, in the order of `blocks.DeltaNet`
    """

    kind: str = "linear_attention"
    module: str = "linear_attn"
    projections: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType(
            {
                "attn_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
                "attn_out": ("linear_attn.out_proj",),
            }
        )
    )
    gates: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType(
            {"delta_beta": "linear_attn.in_proj_b", "delta_alpha": "linear_attn.in_proj_a"}
        )
    )
    parameters: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType(
            {
                "delta_conv": "linear_attn.conv1d.weight",
                "delta_a_log": "linear_attn.A_log",
                "delta_dt_bias": "linear_attn.dt_bias",
                "delta_norm": "linear_attn.norm.weight",
            }
        )
    )
    fields: tuple[str, ...] = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )

    @property
    def tensors(self) -> Mapping[str, str]:
        """Our name -> its tensor, of all but the projections."""
        return {**{name: f"{module}.weight" for name, module in self.gates.items()}, **self.parameters}


@dataclass(frozen=True)
class RouterNames:
    """A router of another kind than the softmax of all logits (`blocks.Router`), by fields of the configuration.

    sigmoid    -- whether scores are sigmoids
    correction -- the parameter of each block, float32 [experts], that is added to scores to decide who is chosen
    method     -- the field that says "greedy" where groups do not count
    """

    sigmoid: bool = False
    correction: str = ""
    method: str = ""
    groups: str = "n_group"
    groups_used: str = "topk_group"
    scale: str = "routed_scaling_factor"


@dataclass(frozen=True)
class ShortConvNames:
    """Blocks that have a gated short convolution (`blocks.ShortConv`) in place of attention. The fields are as of
    `DeltaNetNames`; the parameter is the convolution [channels, 1, taps].

    taps -- the field of the configuration that says how many positions it sees
    """

    kind: str = "conv"
    module: str = "conv"
    projections: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({"attn_in": ("conv.in_proj",), "attn_out": ("conv.out_proj",)})
    )
    gates: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({"short_conv": "conv.conv.weight"}))
    taps: str = "conv_L_cache"


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
    dense      -- fields that make the MLPs of some blocks dense, which nothing here has a place for, and what each of
                  them is where there are none
    shared     -- the expert that all tokens have; None: there is none
    biased     -- the router and both parameters have biases: `router`.bias [experts], and `GATE_UP` and `DOWN` with
                  `_bias` behind, [experts, rows]
    alternate  -- the stock model holds the parameters transposed, and gate and up row by row in turns: [experts,
                  hidden, 2 * width]. Here they are as in other families (`checkpoint.experts.ordered_source`)
    gated      -- whether they have a gate; without one the first parameter is `UP` [experts, width, hidden]
    routing    -- how the router chooses; None: by the softmax of its logits
    """

    module: str
    router: str
    stored: str
    parts: tuple[str, str, str]
    count: str = "num_experts"
    normalised: str = ""
    dense: Mapping[str, Any] = field(default_factory=dict)
    shared: SharedExpert | None = None
    biased: bool = False
    alternate: bool = False
    gated: bool = True
    routing: RouterNames | None = None

    GATE_UP: ClassVar[str] = "gate_up_proj"
    UP: ClassVar[str] = "up_proj"
    DOWN: ClassVar[str] = "down_proj"

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of the two parameters: what stands at mlp_in, and what stands at mlp_mid."""
        return f"{self.module}.{self.GATE_UP if self.gated else self.UP}", f"{self.module}.{self.DOWN}"


PROJECTIONS = MappingProxyType(
    {
        "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn_out": ("self_attn.o_proj",),
        "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_mid": ("mlp.down_proj",),
    }
)
NORMS = MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
QK_NORMS = MappingProxyType({**NORMS, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"})
"""The modules of a block in most families, and where each head's queries and keys are normed."""

LATENT_NORMS = ("q_a_norm", "kv_a_norm")
"""Our names of the norms of latents: of queries, and of keys and values."""
LATENT_QUERIES = "self_attn.q_proj"
"""The projection that gives queries where they have no latent."""

_STREAM = ResidualStream(
    MappingProxyType({"attn_in": "attn_norm", "mlp_in": "mlp_norm"}), ("attn_out", "mlp_mid"), "norm"
)


GGUF_PARTS = MappingProxyType(
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
"""llama.cpp's name of a part of a block -> module, in most families."""
POST_NORMS = MappingProxyType(
    {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
)
POST_NORM_PARTS = MappingProxyType(
    {
        **{ours: theirs for ours, theirs in GGUF_PARTS.items() if ours not in ("attn_norm", "ffn_norm")},
        "post_attention_norm": POST_NORMS["attn_post_norm"],
        "post_ffw_norm": POST_NORMS["mlp_post_norm"],
    }
)
"""Norms and parts where attention and MLP have a norm behind them, and none before."""
EXPERT_PARTS = MappingProxyType(
    {
        **{ours: theirs for ours, theirs in GGUF_PARTS.items() if not ours.startswith("ffn_") or ours == "ffn_norm"},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
SHARED_EXPERT_PARTS = MappingProxyType(
    {
        **EXPERT_PARTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""Parts of blocks whose MLPs are mixtures of experts, without and with a shared one."""


@dataclass(frozen=True)
class DenseMlps:
    """The blocks of a family with experts whose MLPs are dense.

    key         -- of the configuration: a list that names each block's MLP, these "dense", or how many of the first
                   blocks they are in
    width       -- the field that says how wide they are
    projections -- site -> their projections
    """

    key: str
    width: str = "intermediate_size"
    projections: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({site: PROJECTIONS[site] for site in MLP_SITES})
    )

    def layers(self, config: Any) -> tuple[int, ...]:
        """The numbers of these blocks."""
        value = getattr(config, self.key)
        if isinstance(value, list):
            return tuple(layer for layer, kind in enumerate(value) if kind == "dense")
        return tuple(range(min(value or 0, config.num_hidden_layers)))

    def setting(self, dense: bool) -> Any:
        """What `key` is in a configuration of one block."""
        return ["dense" if dense else "sparse"] if self.key.endswith("types") else int(dense)


@dataclass(frozen=True)
class LlamaCpp:
    """What llama.cpp calls models of a family, and what it computes in them.

    architecture   -- its name there
    permuted       -- q and k rows have rotary pairs adjacent; Hugging Face keeps the halves apart
    parts          -- name of a part of a block -> module
    tensors        -- name of a tensor of a block -> the tensor, of what is no module's weight or bias
    last_norm      -- the module of the norm before the output matrix
    biases         -- parts of which it knows biases; None: all
    head           -- transformers takes this for the head size, whatever a GGUF says; None: it reads the head size
    transformers   -- transformers reads such GGUFs
    keys           -- key -> the field of the configuration with this number; "A.B" is B within A
    local_base     -- of rotary frequencies of layers with a window where a file does not say it; None: that of all
    head_field     -- of the configuration: what is the head size there
    activation     -- the one that it knows there
    parts_of_heads -- it turns a part of each head, where a model does
    window_every   -- of so many layers all but the last see a window alone; 0: it knows no windows
    rope_every     -- of so many layers all but the last turn queries and keys; 0: all layers do
    rope_switch    -- `rope.scaling.finetuned` says whether any does
    untied         -- it reads an output matrix beside the embedding
    wide           -- in models of so many layers it scales scores by 1 / sqrt(hidden / heads), in others by 1 /
                      sqrt(head_dim)
    scalings       -- types of rotary scaling that need factors, as far as it has them there
    normalised     -- it makes the weights of the chosen experts add up to one
    whole_bounds   -- models have YaRN's ramp between bounds as they are, it between whole numbers
    """

    architecture: str
    permuted: bool = False
    parts: Mapping[str, str] = field(default_factory=lambda: GGUF_PARTS)
    tensors: Mapping[str, str] = field(default_factory=dict)
    last_norm: str = "output_norm"
    biases: tuple[str, ...] | None = None
    head: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    head_field: str = ""
    local_base: float | None = None
    transformers: bool = True
    activation: str = "silu"
    parts_of_heads: bool = False
    window_every: int = 0
    rope_every: int = 0
    rope_switch: bool = False
    untied: bool = True
    wide: int = 0
    scalings: tuple[str, ...] = ()
    normalised: bool = True
    whole_bounds: bool = False


@dataclass(frozen=True)
class TextPart:
    """The text part of a model that also takes images, as far as transformers has it as a model of its own: the one
    that its `text_config` describes, of a family that is known here.

    names  -- what the names of its tensors begin with in the whole model -> in the text model
    others -- what the names of all other tensors begin with
    """

    names: Mapping[str, str]
    others: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A model family. Names of projections and norms are relative to a decoder block, others to the backbone.

    model_type     -- `model_type` of config.json
    projections    -- site -> its projections, in the order in which their output rows are stacked; an MLP with a gate
                      has gate and up at `mlp_in`, one without has one matrix there. A family that stores the matrices
                      of a site fused has one projection there, whose rows are the same
    norms          -- our name -> module; `attn_post_norm` and `mlp_post_norm` norm what attention and MLP add,
                      `q_row_norm` and `k_row_norm` the queries and keys of all heads together
    layer_norms    -- norms of the stream subtract the mean first, and add the bias of their module last
    norm_offset    -- what is added to the weights of norms before they multiply
    gguf           -- what llama.cpp knows of it; None: nothing
    rotary         -- which channels of a head the stock model turns together
    slides         -- a window in config.json holds for all layers where it does not say for which
    backbone       -- the module with the blocks, within the causal language model
    widening       -- the matrix behind an embedding that is not as wide as the blocks
    positions      -- that are learned; None: there are none
    after          -- modules after the last block, as far as a model has them; the output matrix comes then
    fields         -- of the configuration: Llama's name -> its own, where they differ
    sinks          -- the parameter of each block with a score of each query head (`blocks.Attention.sinks`); empty:
                      there are none
    activation     -- the one that all its models have, whatever their configuration says; empty: what that says
    unpackable     -- what formats and engines have no place for in such a model; empty: they have for everything
    attention      -- transformers' implementation of attention that computes all of it
    multipliers    -- what a configuration's models multiply by
    local_rotary   -- layers with a sliding window have rotary frequencies of their own
    rope_layers    -- of the configuration: whether each layer turns queries and keys; empty: all do
    rope_field     -- of the configuration: "rope" where layers turn them; empty: they do
    rope_in_windows -- in models with sliding windows, layers without one turn nothing
    scales_input   -- of the configuration: by what the stock backbone multiplies whatever comes in, embedded or not
    divides_logits -- of the configuration: by what the stock model divides or multiplies its logits
    residual       -- who reads the residual stream and who writes to it; None: it cannot be rotated
    unrotatable    -- why it cannot
    experts        -- of MLPs that are mixtures of experts; None: MLPs are dense
    split          -- projection -> the modules beside it that llama.cpp has in its place, whose rows it stacks
    only           -- fields of the configuration -> the one value that anything here has a place for
    covered        -- fields of the configuration -> the one value of models that the row is of; others are measured as
                      they are found (`models.found`)
    clips          -- of the configuration: the bound of queries, keys and values, which no engine has a place for
    delta_net, short_conv -- what some blocks have in place of attention; None: all blocks have attention
    mlp_width      -- the neurons of an MLP, by a configuration that does not say them
    gated_attention -- attention has an output gate, whose rows stand behind the queries of each head
    left_out       -- what the names of tensors begin with that a checkpoint may have and nothing here computes -> what
                      they are
    reads_attn_in  -- modules that read what enters attn_in beside its projections
    global_heads   -- layers without a window may have heads of another size, and as many of keys, as they like
    k_eq_v         -- of the configuration: whether the values of layers without a window are their keys before norm and
                      rotary embedding, so that they have no projection
    value_norm     -- each head's values are divided by their root mean square
    layer_scalar   -- the tensor of a block, one number, by which all that leaves it is multiplied; empty: there is none
    predicts       -- what blocks behind the last one are that a checkpoint may have, as many as
                      `num_nextn_predict_layers` says; nothing here computes them. "": there are none
    latent         -- attention has latents (`blocks.Latent`); where queries have none, attn_in has `LATENT_QUERIES`
    dense_mlps     -- the blocks whose MLPs have no experts; None: all blocks are alike
    dense_layers   -- the numbers of these in a configuration's model, which `of` fills in
    """

    model_type: str
    gguf: LlamaCpp | None = None
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROJECTIONS)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    rotary: Rotary = "half-split"
    slides: bool = False
    backbone: str = "model"
    widening: str = ""
    positions: LearnedPositions | None = None
    after: tuple[str, ...] = ("norm",)
    fields: Mapping[str, str] = field(default_factory=dict)
    sinks: str = ""
    activation: str = ""
    unpackable: str = ""
    norm_offset: float = 0.0
    layer_norms: bool = False
    attention: Literal["sdpa", "eager"] = "sdpa"
    multipliers: Callable[[Any], Multipliers] = lambda config: Multipliers()
    local_rotary: bool = False
    rope_layers: str = ""
    rope_field: str = ""
    rope_in_windows: bool = False
    scales_input: str = ""
    divides_logits: str = ""
    residual: ResidualStream | None = _STREAM
    unrotatable: str = ""
    experts: Experts | None = None
    clips: str = ""
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    covered: Mapping[str, Any] = field(default_factory=dict)
    delta_net: DeltaNetNames | None = None
    short_conv: ShortConvNames | None = None
    mlp_width: Callable[[Any], int] | None = None
    gated_attention: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    reads_attn_in: tuple[str, ...] = ()
    global_heads: bool = False
    k_eq_v: str = ""
    value_norm: bool = False
    layer_scalar: str = ""
    predicts: str = ""
    latent: bool = False
    dense_mlps: DenseMlps | None = None
    dense_layers: tuple[int, ...] = ()

    def of(self, config: Any) -> "Family":
        """The names in the model of a stock configuration, as far as these depend on it."""
        family = self.plain_queries if self.latent and config.q_lora_rank is None else self
        layers, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
        if self.predicts and more:
            behind = {f"{self.block(layer)}.": self.predicts for layer in range(layers, layers + more)}
            family = replace(family, left_out=MappingProxyType({**self.left_out, **behind}))
        if self.dense_mlps is None:
            return family
        return replace(family, dense_layers=self.dense_mlps.layers(config))

    @cached_property
    def plain_queries(self) -> "Family":
        """The names of a model with latents of keys and values alone."""
        projections = {site: names for site, names in self.projections.items() if site != LATENT_SITES[0]}
        norms = {name: module for name, module in self.norms.items() if name != LATENT_NORMS[0]}
        into = (LATENT_QUERIES, *projections["attn_in"][1:])
        return replace(
            self, projections=MappingProxyType({**projections, "attn_in": into}), norms=MappingProxyType(norms)
        )

    @cached_property
    def dense_block(self) -> "Family":
        """The names of a block whose MLP has no experts."""
        if self.dense_mlps is None:
            raise ValueError(f"{self.model_type} models have no blocks of their own with a dense MLP")
        projections = MappingProxyType({**self.projections, **self.dense_mlps.projections})
        return replace(self, projections=projections, experts=None, dense_mlps=None, dense_layers=())

    @cached_property
    def expert_block(self) -> "Family":
        """The names of a block whose MLP has experts, whatever its number."""
        return replace(self, dense_mlps=None, dense_layers=())

    @property
    def state(self) -> DeltaNetNames | ShortConvNames | None:
        """The names of what some blocks have in place of attention."""
        return self.delta_net or self.short_conv

    @cached_property
    def state_block(self) -> "Family":
        """The names of a block that keeps a state in place of keys and values."""
        names = self.state
        if names is None:
            raise ValueError(f"{self.model_type} models have attention in every block")
        norms = {name: module for name, module in self.norms.items() if name in NORMS}
        return replace(
            self,
            projections=MappingProxyType({**self.projections, **names.projections}),
            norms=MappingProxyType(norms),
            reads_attn_in=tuple(names.gates.values()),
        )

    @cached_property
    def k_eq_v_block(self) -> "Family":
        """The names of a block whose values are its keys."""
        without = self.projections["attn_in"][:-1]
        return replace(self, projections=MappingProxyType({**self.projections, "attn_in": without}))

    @property
    def kinds(self) -> tuple["Family", ...]:
        """The names of each kind of block that its models may have."""
        others = () if self.state is None else (self.state_block,)
        return (self, *others, *((self.k_eq_v_block,) if self.k_eq_v else ()))

    def covers(self, config: Any) -> bool:
        """Whether a stock configuration of its `model_type` means a model that the row is of."""
        return all(getattr(config, name, value) == value for name, value in self.covered.items())

    def at(self, config: Any, layer: int) -> "Family":
        """The names of a block of a stock configuration's model."""
        family = self.of(config)
        if layer in family.dense_layers:
            return family.dense_block
        if self.state is not None and config.layer_types[layer] == self.state.kind:
            return self.state_block
        if self.k_eq_v and getattr(config, self.k_eq_v) and config.layer_types[layer] == "full_attention":
            return self.k_eq_v_block
        return family

    def of_block(self, block: Any) -> "Family":
        """The names of a stock decoder block."""
        if self.state is not None and hasattr(block, self.state.module):
            return self.state_block
        if self.k_eq_v and block.self_attn.v_proj is None:
            return self.k_eq_v_block
        family = self
        if self.latent and getattr(block.self_attn, LATENT_QUERIES.rpartition(".")[2]) is not None:
            family = self.plain_queries
        if self.dense_mlps is None or self.experts is None:
            return family
        mlp, _, experts = self.experts.module.rpartition(".")
        return family.expert_block if hasattr(block.get_submodule(mlp), experts) else family.dense_block
        if self.state is not None and hasattr(block, self.state.module):
            return self.state_block
        return self.k_eq_v_block if self.k_eq_v and block.self_attn.v_proj is None else self

    @property
    def qk_norm(self) -> Literal["heads", "rows"] | None:
        """How queries and keys are RMS-normalised before the rotary embedding, as `blocks.Attention` has it."""
        return "heads" if "q_norm" in self.norms else "rows" if "q_row_norm" in self.norms else None

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        into = self.projections["mlp_in"]
        return len(into) > 1 or self.experts is not None or "gate" in into[0] or into[0] in self.split

    @property
    def has_row(self) -> bool:
        """Whether it is one of `families.FAMILIES`; the others are found in the stock model (`models.found`)."""
        return True

    def projections_of(self, layer: int) -> Mapping[str, tuple[str, ...]]:
        """The sites of a block, in order of execution, and the projections of each."""
        return self.dense_block.projections if layer in self.dense_layers else self.projections

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a block; None: its MLP is dense."""
        return None if layer in self.dense_layers else self.experts

    def readers(self, layer: int, site: str) -> tuple[str, ...]:
        """The modules of a block that are given what enters a site: its projections, or the module that has experts.
        What enters the down matrices of experts is given to no module."""
        experts = self.experts_of(layer)
        if experts is None or site not in MLP_SITES:
            return self.projections_of(layer)[site]
        if site == MLP_MID:
            return ()
        return (experts.module,)

    def of_experts(self, layer: int, site: str) -> bool:
        """Whether experts read a site of a block."""
        return self.experts_of(layer) is not None and site in MLP_SITES

    @property
    def head(self) -> str:
        """The name of the output matrix's tensor, where it is not the embedding."""
        return HEAD

    @property
    def last_norm(self) -> str:
        """The name of the last norm's tensor."""
        return f"{self.backbone}.{self.after[-1]}.weight"

    @property
    def last_norm_bias(self) -> str:
        """The name of that norm's bias, of a family that has `layer_norms`."""
        return f"{self.backbone}.{self.after[-1]}.bias"

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

    def bias(self, projection: str) -> str:
        """The name of the tensor that would be a projection's bias."""
        of_experts = self.experts is not None and projection in self.experts.parameters
        return f"{projection}_bias" if of_experts else f"{projection}.bias"

    def routers(self, site: str) -> tuple[str, ...]:
        """The modules that read what enters a site beside its projections: what says which experts a token has, and how
        much of a shared one; or what makes the gates of a delta net."""
        if site == SITES[0]:
            return self.reads_attn_in
        if self.experts is None or site != MLP_SITES[0]:
            return ()
        shared = self.experts.shared
        return self.experts.router, *(() if shared is None or not shared.gate else (shared.gate,))

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
        if name == "intermediate_size" and self.mlp_width is not None:
            return self.mlp_width(config)
        return config_value(config, self.fields.get(name, name))


def config_value(config: Any, name: str) -> Any:
    """What a stock configuration says of a model; of most layers where some have another value. None: nothing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers', of a field that differs among layers
        return vars(config).get(name)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The names of the tensors outside of the blocks in packable families; the last one is the output matrix in all of
them."""
