"""What llama.cpp calls the models of a family, their parts and their settings, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sparsepack.models.parts import POST_NORMS

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
POST_NORM_PARTS = MappingProxyType(
    {
        **{ours: theirs for ours, theirs in GGUF_PARTS.items() if ours not in ("attn_norm", "ffn_norm")},
        "post_attention_norm": POST_NORMS["attn_post_norm"],
        "post_ffw_norm": POST_NORMS["mlp_post_norm"],
    }
)
"""Parts where attention and MLP have a norm behind them, and none before."""
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
class LlamaCpp:
    """What llama.cpp calls models of a family, and what it computes in them.

    architecture   -- its name there
    mixtures       -- that of models with experts, where it is another
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
    router         -- what a file may say of weights of experts: "norm" in place of that, "scale"; of others it knows no
                      scale
    scale          -- what it multiplies scores by; 0: 1 / sqrt(head_dim)
    window_pattern -- a file says which layers have a window, and heads of a size of their own
    whole_bounds   -- models have YaRN's ramp between bounds as they are, it between whole numbers
    """

    architecture: str
    mixtures: str = ""
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
    router: tuple[str, ...] = ()
    scale: float = 0.0
    window_pattern: bool = False
    whole_bounds: bool = False

    def name(self, mixture: bool) -> str:
        """Its name of a model with experts, or of one without."""
        return (mixture and self.mixtures) or self.architecture
