"""Families whose MLPs are mixtures of experts: Mixtral, Qwen's, OLMoE."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sparsepack.models.family import Family
from sparsepack.models.llama import LLAMA_CPP
from sparsepack.models.llama_cpp import EXPERT_PARTS, SHARED_EXPERT_PARTS, LlamaCpp
from sparsepack.models.parts import NORMS, PROJECTIONS, QK_NORMS, Experts, SharedExpert
from sparsepack.models.qwen import QWEN3_HEAD

_ROW_NORMS = MappingProxyType({**NORMS, "q_row_norm": "self_attn.q_norm", "k_row_norm": "self_attn.k_norm"})

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
        LlamaCpp("llama", permuted=True, parts=EXPERT_PARTS, scalings=LLAMA_CPP.scalings),
        Experts("mlp.experts", "mlp.gate", "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
        slides=True,
    ),
    _family(
        "qwen3_moe",
        LlamaCpp("qwen3moe", parts=EXPERT_PARTS, biases=(), head=QWEN3_HEAD),
        Experts("mlp.experts", "mlp.gate", "mlp", _APART, normalised="norm_topk_prob", dense=_SOME_DENSE),
        norms=QK_NORMS,
        fields=MappingProxyType(_WIDTH),
    ),
    _family(
        "olmoe",
        LlamaCpp("olmoe", parts=EXPERT_PARTS, biases=(), normalised=False),
        Experts("mlp.experts", "mlp.gate", "mlp", _APART, normalised="norm_topk_prob"),
        norms=_ROW_NORMS,
        clips="clip_qkv",
    ),
    _family(
        "qwen2_moe",
        LlamaCpp("qwen2moe", parts=SHARED_EXPERT_PARTS, normalised=False),
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
