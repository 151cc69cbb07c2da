"""Families whose MLPs are mixtures of experts: Mixtral, Qwen's, OLMoE."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sparsepack.models.family import (
    GGUF_PARTS,
    NORMS,
    PROJECTIONS,
    QK_NORMS,
    Experts,
    Family,
    LlamaCpp,
    SharedExpert,
)
from sparsepack.models.llama import LLAMA_CPP
from sparsepack.models.qwen import QWEN3_HEAD

_ROW_NORMS = MappingProxyType({**NORMS, "q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"})

_PARTS = MappingProxyType(
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
        **_PARTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_APART = ("gate_proj", "up_proj", "down_proj")
_SOME_DENSE = MappingProxyType({"mlp_only_layers": [], "decoder_sparse_step": 1})
_WIDTH = {"intermediate_size": "moe_intermediate_size"}


def _family(model_type: str, gguf: LlamaCpp, experts: Experts, **fields: Any) -> Family:
    in_, mid = experts.parameters
    shared: tuple[tuple[str, ...], ...] = ((), ()) if experts.shared is None else experts.shared.projections
    sites: Mapping[str, tuple[str, ...]] = {"mlp_in": (in_, *shared[0]), "mlp_mid": (mid, *shared[1])}
    return Family(model_type, gguf, MappingProxyType({**PROJECTIONS, **sites}), experts=experts, **fields)


FAMILIES = (
    _family(
        "mixtral",
        LlamaCpp("llama", permuted=True, parts=_PARTS, scalings=LLAMA_CPP.scalings),
        Experts("mlp.experts", "mlp.gate", "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
        slides=True,
    ),
    _family(
        "qwen3_moe",
        LlamaCpp("qwen3moe", parts=_PARTS, biases=(), head=QWEN3_HEAD),
        Experts("mlp.experts", "mlp.gate", "mlp", _APART, normalised="norm_topk_prob", dense=_SOME_DENSE),
        norms=QK_NORMS,
        fields=MappingProxyType(_WIDTH),
    ),
    _family(
        "olmoe",
        LlamaCpp("olmoe", parts=_PARTS, biases=(), normalised=False),
        Experts("mlp.experts", "mlp.gate", "mlp", _APART, normalised="norm_topk_prob"),
        norms=_ROW_NORMS,
        clips="clip_qkv",
    ),
    _family(
        "qwen2_moe",
        LlamaCpp("qwen2moe", parts=_SHARED_PARTS, normalised=False),
        Experts(
            "mlp.experts",
            "mlp.gate",
            "mlp",
            _APART,
            normalised="norm_topk_prob",
            dense=_SOME_DENSE,
            shared=SharedExpert(),
        ),
        fields=MappingProxyType({**_WIDTH, "attention_bias": "qkv_bias"}),
    ),
)
