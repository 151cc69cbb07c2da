"""What the row of a model family says, as data: which submodules of a decoder block sit at which site, which are norms,
what its configuration means, and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparsepack.models.blocks import Multipliers, Rotary
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import (
    NORMS,
    PROJECTIONS,
    STREAM,
    DeltaNetNames,
    DenseMlps,
    Experts,
    LearnedPositions,
    MambaNames,
    PerLayerNames,
    ResidualStream,
    SharedKv,
    ShortConvNames,
)


@dataclass(frozen=True)
class FamilyFields:
    """What the row of a model family may say. Names of projections and norms are relative to a decoder block, others to
    the backbone.

    model_type     -- `model_type` of config.json
    projections    -- site -> its projections, in the order in which their output rows are stacked; an MLP with a gate
                      has gate and up at `mlp_in`, one without has one matrix there. A family that stores the matrices
                      of a site fused has one projection there, whose rows are the same
    norms          -- our name -> module; `attn_post_norm` and `mlp_post_norm` norm what attention and MLP add,
                      `q_row_norm` and `k_row_norm` the queries and keys of all heads together, `attn_sub_norm` and
                      `mlp_sub_norm` what enters attn_out and mlp_mid
    layer_norms    -- norms of the stream subtract the mean first, and add the bias of their module last
    bare_norms     -- these have neither weights nor biases: a checkpoint gives ones and zeros for them
    norm_biases    -- LayerNorms have biases; else a checkpoint gives zeros for them
    norm_eps       -- of all its models; 0: the configuration says it
    norm_offset    -- what is added to the weights of norms before they multiply
    gguf           -- what llama.cpp knows of it; None: nothing
    rotary         -- which channels of a head the stock model turns together
    rotary_module  -- of the backbone, that computes the frequencies
    embedding_module -- of the backbone, that holds the embedding
    renamed        -- what names of tensors begin with in some checkpoints -> what they begin with in the stock model
    slides         -- a window in config.json holds for all layers where it does not say for which
    backbone       -- the module with the blocks, within the causal language model
    widening       -- the matrix behind an embedding that is not as wide as the blocks
    positions      -- that are learned; None: there are none
    after          -- modules after the last block, as far as a model has them; the output matrix comes then
    fields         -- of the configuration: Llama's name -> its own, where they differ
    sinks          -- the parameter of each block with a score of each query head (`blocks.Attention.sinks`); empty:
                      there are none
    activation     -- the one that all its models have, whatever their configuration says; empty: what that says
    activation_parameters -- tensors of a block, of its activation: those of xIELU, in the order in which
                      `activations.xielu_coefficients` has them
    unpackable     -- what formats and engines have no place for in such a model; empty: they have for everything
    attention      -- transformers' implementation of attention that computes all of it
    multipliers    -- what a configuration's models multiply by
    local_rotary   -- layers with a sliding window have rotary frequencies of their own
    rope_layers    -- of the configuration: whether each layer turns queries and keys; empty: all do
    rope_field     -- of the configuration: "rope" where layers turn them; empty: they do
    rope_in_windows -- in models with sliding windows, layers without one turn nothing
    rope_only_in_windows -- layers without a sliding window turn nothing
    parallel       -- attention and MLP read one norm of what enters the block, and both are added to it
    scales_input   -- of the configuration: by what the stock backbone multiplies whatever comes in, embedded or not
    divides_logits -- of the configuration: by what the stock model divides or multiplies its logits
    residual       -- who reads the residual stream and who writes to it; None: it cannot be rotated
    unrotatable    -- why it cannot
    experts        -- of MLPs that are mixtures of experts; None: MLPs are dense
    split          -- projection -> the modules beside it that llama.cpp has in its place, whose rows it stacks
    only           -- fields of the configuration -> the one value that anything here has a place for
    clips          -- of the configuration: the bound of queries, keys and values, which no engine has a place for
    delta_net, short_conv, mamba -- what some blocks have in place of attention; None: all blocks have attention
    mlp_kinds      -- what the configuration's `layer_types` call blocks that are an MLP alone; where there are such
                      types, blocks of the others have no MLP. () : every block has both
    block_kind     -- the attribute of a stock block that says its type then
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
    per_layer      -- an input that each token has for each block; None: no model has one
    shared_kv      -- the last blocks, as far as they read keys and values of earlier ones; None: all have their own
    predicts       -- what blocks behind the last one are that a checkpoint may have, as many as
                      `num_nextn_predict_layers` says; nothing here computes them. "": there are none
    latent         -- attention has latents (`blocks.Latent`); where queries have none, attn_in has `LATENT_QUERIES`
    dense_mlps     -- the blocks whose MLPs have no experts; None: all blocks are alike
    mixes          -- of the configuration: whether a model has them
    """

    model_type: str
    gguf: LlamaCpp | None = None
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROJECTIONS)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    rotary: Rotary = "half-split"
    rotary_module: str = "rotary_emb"
    embedding_module: str = "embed_tokens"
    renamed: Mapping[str, str] = field(default_factory=dict)
    slides: bool = False
    backbone: str = "model"
    widening: str = ""
    positions: LearnedPositions | None = None
    after: tuple[str, ...] = ("norm",)
    fields: Mapping[str, str] = field(default_factory=dict)
    sinks: str = ""
    activation: str = ""
    activation_parameters: tuple[str, ...] = ()
    unpackable: str = ""
    norm_offset: float = 0.0
    layer_norms: bool = False
    bare_norms: bool = False
    norm_biases: bool = True
    norm_eps: float = 0.0
    attention: Literal["sdpa", "eager"] = "sdpa"
    multipliers: Callable[[Any], Multipliers] = lambda config: Multipliers()
    local_rotary: bool = False
    rope_layers: str = ""
    rope_field: str = ""
    rope_in_windows: bool = False
    rope_only_in_windows: bool = False
    parallel: bool = False
    scales_input: str = ""
    divides_logits: str = ""
    residual: ResidualStream | None = STREAM
    unrotatable: str = ""
    experts: Experts | None = None
    clips: str = ""
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    delta_net: DeltaNetNames | None = None
    short_conv: ShortConvNames | None = None
    mamba: MambaNames | None = None
    mlp_kinds: tuple[str, ...] = ()
    block_kind: str = ""
    mlp_width: Callable[[Any], int] | None = None
    gated_attention: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    reads_attn_in: tuple[str, ...] = ()
    global_heads: bool = False
    k_eq_v: str = ""
    value_norm: bool = False
    layer_scalar: str = ""
    per_layer: PerLayerNames | None = None
    shared_kv: SharedKv | None = None
    predicts: str = ""
    latent: bool = False
    dense_mlps: DenseMlps | None = None
    mixes: str = ""
