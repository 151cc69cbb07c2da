"""Nemotron before 3 (Nemotron-4, Minitron, Nemotron-Mini): LayerNorm that multiplies by (1 + w), a rotary embedding of
a part of each head, squared ReLU without a gate. Nemotron-H and 3: blocks that are a state-space model, attention
without a rotary embedding, or an MLP alone, of which many are mixtures, with squared ReLU and no gate."""

from math import inf
from types import MappingProxyType
from typing import Any

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import GGUF_PARTS, LlamaCpp
from sparsepack.models.parts import PROJECTIONS, DenseMlps, Experts, MambaNames, RouterNames, SharedExpert


def _width(config: Any) -> int:
    """The neurons of an MLP, or of an expert where some blocks have experts."""
    mixtures = "moe" in config.layer_types
    width: int = config.moe_intermediate_size if mixtures else config.intermediate_size
    return width


_SHARED = SharedExpert("mixer.shared_experts", gate="", width="moe_shared_expert_intermediate_size", gated=False)
_EXPERTS = Experts(
    "mixer.experts",
    "mixer.gate",
    "mixer",
    ("", "up_proj", "down_proj"),
    "n_routed_experts",
    normalised="norm_topk_prob",
    shared=_SHARED,
    gated=False,
    routing=RouterNames(sigmoid=True, correction="mixer.gate.e_score_correction_bias"),
)
_IN, _MID = _EXPERTS.parameters
_SHARED_IN, _SHARED_MID = _SHARED.projections

FAMILIES = (
    Family(
        "nemotron",
        LlamaCpp(
            "nemotron",
            transformers=False,
            parts=MappingProxyType({ours: theirs for ours, theirs in GGUF_PARTS.items() if ours != "ffn_gate"}),
            activation="relu2",
            parts_of_heads=True,
        ),
        projections=MappingProxyType({**PROJECTIONS, "mlp_in": ("mlp.up_proj",)}),
        layer_norms=True,
        norm_offset=1.0,
        fields=MappingProxyType({"rms_norm_eps": "norm_eps"}),
        residual=None,
        unrotatable="its norms subtract the mean, which is not the same in another basis",
    ),
    Family(
        "nemotron_h",
        LlamaCpp(
            "nemotron_h",
            "nemotron_h_moe",
            parts=MappingProxyType(
                {
                    "attn_norm": "norm",
                    "attn_q": "mixer.q_proj",
                    "attn_k": "mixer.k_proj",
                    "attn_v": "mixer.v_proj",
                    "attn_output": "mixer.o_proj",
                    "ssm_in": "mixer.in_proj",
                    "ssm_conv1d": "mixer.conv1d",
                    "ssm_norm": "mixer.norm",
                    "ssm_out": "mixer.out_proj",
                    "ffn_up": "mixer.up_proj",
                    "ffn_down": "mixer.down_proj",
                    "ffn_gate_inp": "mixer.gate",
                    "ffn_up_exps": "mixer.experts.up_proj",
                    "ffn_down_exps": "mixer.experts.down_proj",
                    "ffn_up_shexp": "mixer.shared_experts.up_proj",
                    "ffn_down_shexp": "mixer.shared_experts.down_proj",
                }
            ),
            tensors=MappingProxyType(
                {
                    "ssm_a": "mixer.A_log",
                    "ssm_d": "mixer.D",
                    "ssm_dt.bias": "mixer.dt_bias",
                    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
                }
            ),
            biases=("attn_output", "ssm_conv1d"),
            transformers=False,
            activation="relu2",
            router=("norm", "scale"),
        ),
        projections=MappingProxyType(
            {
                "attn_in": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
                "attn_out": ("mixer.o_proj",),
                "mlp_in": (_IN, *_SHARED_IN),
                "mlp_mid": (_MID, *_SHARED_MID),
            }
        ),
        norms=MappingProxyType({"attn_norm": "norm", "mlp_norm": "norm"}),
        rotary="none",
        after=("norm_f",),
        embedding_module="embeddings",
        renamed=MappingProxyType({"backbone.": "model."}),
        fields=MappingProxyType({"rms_norm_eps": "layer_norm_epsilon"}),
        activation="relu2",
        residual=None,
        unrotatable="state-space models stand between its matrices",
        only=MappingProxyType(
            {
                "mlp_hidden_act": "relu2",
                "mamba_hidden_act": "silu",
                "use_conv_bias": True,
                "use_bias": False,
                "mlp_bias": False,
                "moe_latent_size": None,
                "time_step_limit": [0.0, inf],
            }
        ),
        left_out=MappingProxyType({"mtp.": "a head for the prediction of several tokens"}),
        experts=_EXPERTS,
        mamba=MambaNames(
            "linear_attention",
            "mixer",
            ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
            norms=True,
        ),
        mlp_kinds=("moe", "mlp"),
        block_kind="block_type",
        mlp_width=_width,
        dense_mlps=DenseMlps(
            "layer_types",
            projections=MappingProxyType({"mlp_in": ("mixer.up_proj",), "mlp_mid": ("mixer.down_proj",)}),
            kind="mlp",
        ),
    ),
)
