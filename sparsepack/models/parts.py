"""The parts of a model family as data: where experts, routers, states and norms have their tensors, and which names
llama.cpp gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from sparsepack.errors import CheckpointError


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
    norm   -- the module that norms what it gives before anything is added to it; "": there is none
    width  -- the field of the configuration that says how wide it is
    count  -- the field that says how many times as wide as the others it is, in place of that
    gated  -- as the other experts (`Experts.gated`)
    """

    module: str = "mlp.shared_expert"
    gate: str = "mlp.shared_expert_gate"
    norm: str = ""
    width: str = "shared_expert_intermediate_size"
    count: str = ""
    gated: bool = True

    @property
    def projections(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Its gate and up, and its down."""
        into = (f"{self.module}.gate_proj", f"{self.module}.up_proj")
        return into if self.gated else into[1:], (f"{self.module}.down_proj",)


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
    grouped     -- checkpoints have the projections and gates head by head in two matrices (`checkpoint.delta_net`)
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
    grouped: bool = False

    @property
    def tensors(self) -> Mapping[str, str]:
        """Our name -> its tensor, of all but the projections."""
        return {**{name: f"{module}.weight" for name, module in self.gates.items()}, **self.parameters}


@dataclass(frozen=True)
class MambaNames:
    """Blocks that have a state-space model (`blocks.Mamba`) in place of attention. The fields are as of
    `DeltaNetNames`; the convolution is [channels, 1, taps], its bias [channels], the norm [inner], the rest [heads].

    norms -- RMSNorm of the output is of each group of channels apart, else of all together
    """

    kind: str = "mamba"
    module: str = "mamba"
    fields: tuple[str, str, str, str, str] = (
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
    )
    norms: bool = False
    gates: Mapping[str, str] = field(default_factory=dict)

    @property
    def projections(self) -> Mapping[str, tuple[str, ...]]:
        """Site -> its projections."""
        return {"attn_in": (f"{self.module}.in_proj",), "attn_out": (f"{self.module}.out_proj",)}

    @property
    def tensors(self) -> Mapping[str, str]:
        """Our name -> its tensor, of all but the projections."""
        names = {
            "mamba_conv": "conv1d.weight",
            "mamba_conv_bias": "conv1d.bias",
            "mamba_a_log": "A_log",
            "mamba_dt_bias": "dt_bias",
            "mamba_skip": "D",
            "mamba_norm": "norm.weight",
        }
        return {ours: f"{self.module}.{theirs}" for ours, theirs in names.items()}


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
class OwnNorms:
    """Norms of their own by which a router and a shared expert read the stream that experts read by mlp_norm, and what
    else the router multiplies by. Here all of them read mlp_norm: the rest is in their matrices
    (`checkpoint.experts.folded_source`).

    shared   -- the module of the shared expert's
    channels -- the parameter [hidden] by which the router multiplies the normed stream, and by 1 / sqrt(hidden)
    experts  -- the parameter [experts] by which the weights of the chosen ones are multiplied in the end
    """

    shared: str = "pre_feedforward_layernorm"
    channels: str = "router.scale"
    experts: str = "router.per_expert_scale"


@dataclass(frozen=True)
class PerLayerNames:
    """An input that each token has for each block (`blocks.Block.per_layer`): p = (norm(projection x / sqrt(hidden)) +
    sqrt(width) row) / sqrt(2) of its embedding x and its row of a table, block after block.

    width      -- of the configuration: channels for a block; 0 where a model has no such input
    vocabulary -- the field that says how many rows the table has
    embedding, projection, norm -- modules of the backbone: the table [vocabulary, layers * width], the projection
                  [layers * width, hidden], and the norm of each block's part
    gate, out, out_norm -- modules of a block: [width, hidden], [hidden, width], and the norm of what is added
    """

    width: str = "hidden_size_per_layer_input"
    vocabulary: str = "vocab_size_per_layer_input"
    embedding: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"

    @property
    def outside(self) -> tuple[str, str, str]:
        """Its modules of the backbone."""
        return self.embedding, self.projection, self.norm

    def of(self, config: Any) -> int:
        """Channels of the input for a block in a stock configuration's model; 0: there is none."""
        return getattr(config, self.width, None) or 0


@dataclass(frozen=True)
class SharedKv:
    """The last blocks, as far as they read keys and values of earlier ones: each those of the last block of its type
    that has its own.

    count -- of the configuration: how many these blocks are
    wide  -- the field that says whether their MLPs are twice as wide
    """

    count: str = "num_kv_shared_layers"
    wide: str = "use_double_wide_mlp"

    def sources(self, config: Any) -> tuple[int, ...]:
        """The blocks whose keys and values the last ones read, in a stock configuration's model.

        Raises `CheckpointError` where there are none for a type.
        """
        own = config.num_hidden_layers - (getattr(config, self.count, None) or 0)
        kinds = config.layer_types
        last = {kind: number for number, kind in enumerate(kinds[:own])}
        if missing := {*kinds[own:]} - last.keys():
            raise CheckpointError(
                f"{config.model_type}: {self.count} is {str(getattr(config, self.count))[:60]}, and no layer before "
                f"has keys and values for those of type {min(missing)}"
            )
        return tuple(last[kind] for kind in kinds[own:])


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
    stored     -- how a checkpoint names the module, which the stock model may call otherwise; "": it has what the stock
                  model has
    parts      -- how a checkpoint names gate, up and down of one expert, within `stored` and the expert's number
    count      -- the field of the configuration that says how many there are
    used       -- the field that says how many a token has
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
    own_norms  -- by which norms the router and the shared expert read; None: by that of the others
    """

    module: str
    router: str
    stored: str
    parts: tuple[str, str, str]
    count: str = "num_experts"
    used: str = "num_experts_per_tok"
    normalised: str = ""
    dense: Mapping[str, Any] = field(default_factory=dict)
    shared: SharedExpert | None = None
    biased: bool = False
    alternate: bool = False
    gated: bool = True
    routing: RouterNames | None = None
    own_norms: OwnNorms | None = None

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
DENSE_PROJECTIONS = MappingProxyType({site: names for site, names in PROJECTIONS.items() if site.startswith("mlp_")})
NORMS = MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
QK_NORMS = MappingProxyType({**NORMS, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"})
"""The modules of a block in most families, and where each head's queries and keys are normed."""

LATENT_NORMS = ("q_a_norm", "kv_a_norm")
"""Our names of the norms of latents: of queries, and of keys and values."""
LATENT_QUERIES = "self_attn.q_proj"
"""The projection that gives queries where they have no latent."""

STREAM = ResidualStream(
    MappingProxyType({"attn_in": "attn_norm", "mlp_in": "mlp_norm"}), ("attn_out", "mlp_mid"), "norm"
)
POST_NORMS = MappingProxyType(
    {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
)
"""Norms where attention and MLP have one behind them, and none before."""


@dataclass(frozen=True)
class DenseMlps:
    """The blocks of a family with experts whose MLPs are dense.

    key         -- of the configuration: a list that names each block's MLP, these `kind`, or how many of the first
                   blocks they are in
    width       -- the field that says how wide they are
    projections -- site -> their projections
    """

    key: str
    width: str = "intermediate_size"
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DENSE_PROJECTIONS)
    kind: str = "dense"

    def layers(self, config: Any) -> tuple[int, ...]:
        """The numbers of these blocks."""
        value = getattr(config, self.key)
        if isinstance(value, list):
            return tuple(layer for layer, kind in enumerate(value) if kind == self.kind)
        return tuple(range(min(value or 0, config.num_hidden_layers)))

    def setting(self, dense: bool) -> Any:
        """What `key` is in a configuration of one block."""
        return ["dense" if dense else "sparse"] if self.key.endswith("types") else int(dense)


@dataclass(frozen=True)
class TextPart:
    """The text part of a model that also takes images, as far as transformers has it as a model of its own: the one
    that its `text_config` describes, of a family that is known here.

    names  -- what the names of its tensors begin with in the whole model -> in the text model
    others -- what the names of all other tensors begin with
    """

    names: Mapping[str, str]
    others: tuple[str, ...]
