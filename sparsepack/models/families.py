"""The model families, a row for each (`models/family.py`).

A family is a row here and nothing else: calibration and evaluation hook the stock transformers model, the packers
read tensors by the names below, and the engine is told the numbers (`models/architecture.py`). A row whose models
formats and engines have no place for says so; everything that works on the stock model works with it all the same.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.models.family import GGUF_PARTS, Experts, Family, LearnedPositions, SharedExpert

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
            **GGUF_PARTS,
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
        **{ours: theirs for ours, theirs in GGUF_PARTS.items() if not ours.startswith("ffn_") or ours == "ffn_norm"},
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
        **dict.fromkeys(
            ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            "its rotary positions are of time, height and width, and transformers has its text part as no model of its "
            "own",
        ),
        "phi4_multimodal": "its text part has adapters for each kind of input",
        "mllama": "some of its layers look at images alone",
        "gemma3n": "its layers have an embedding each and keep several streams",
        "llama4_text": "its experts are scaled on the way in, and not each of its layers turns queries and keys",
    }
)
"""Model types that are known and not supported, and why: users ask for them by name."""


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
