"""Small random checkpoints of every family, with a byte-level tokenizer, as Hugging Face folders."""

import json
import pydoc_data.topics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family
from sparsepack.models.hf_model.model import placed_in

VOCABULARY = 512
END = "<|endoftext|>"

TEXT = "\n".join(pydoc_data.topics.topics.values())

# What each family is small with; `tie_word_embeddings` and head_dim cover both ways.
_GEMMA_4 = {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "head_dim": 48,
    "global_head_dim": 96,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 20.0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
INPUTS_OF_EACH_LAYER = "gemma4_text, inputs of each layer"
_GRANITE_4 = {
    "num_key_value_heads": 2,
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
GRANITE_WITH_STATES = "granitemoehybrid, states"
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mistral": {"num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": None, "head_dim": 64},
    "ministral": {"num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": 512, "head_dim": 64},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 128},
    "gemma2": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "pad_token_id": 0,
    },
    "gemma3_text": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 24,
        "pad_token_id": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 2.0},
        },
    },
    "gemma4_text": {**_GEMMA_4, "hidden_size_per_layer_input": 0},
    INPUTS_OF_EACH_LAYER: {
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text": {**_GEMMA_4, "attention_k_eq_v": False},
    "gemma": {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 64, "pad_token_id": 0},
    "vaultgemma": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "query_pre_attn_scalar": 48,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "pad_token_id": 0,
    },
    "granite": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
    },
    "granitemoehybrid": {**_GRANITE_4, "position_embedding_type": "rope"},
    GRANITE_WITH_STATES: {
        **_GRANITE_4,
        "model_type": "granitemoehybrid",
        "position_embedding_type": "nope",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
    },
    "hyperclovax": {
        "num_key_value_heads": 2,
        "embedding_multiplier": 10.0,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.25,
        "tie_word_embeddings": False,
    },
    "smollm3": {"num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    "olmo": {"tie_word_embeddings": False, "pad_token_id": 0},
    "olmo2": {"tie_word_embeddings": False, "pad_token_id": 0},
    "olmo3": {"num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 24, "pad_token_id": 0},
    "exaone4": {
        "num_key_value_heads": 2,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "pad_token_id": 0,
    },
    "glm": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "glm4": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "tie_word_embeddings": True},
    "helium": {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0},
    "cwm": {"num_key_value_heads": 2, "bos_token_id": 0, "head_dim": 64, "sliding_window": 24, "pad_token_id": 0},
    "arcee": {"num_key_value_heads": 2},
    "nemotron": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0},
    "cohere2": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "apertus": {"num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0},
    "bitnet": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "ministral3": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {"num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "partial_rotary_factor": 0.75},
    "lfm2": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "qwen3_5_text": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "tie_word_embeddings": True,
    },
}

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 96,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
_DELTA_MIXTURE: dict[str, Any] = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "olmoe": {
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        **LATENTS,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v2": {
        **LATENTS,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {**LATENTS, "n_shared_experts": 1, "v_head_dim": 96},
    "nemotron_h": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
    "lfm2_moe": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "gemma4_text, mixture": {
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 256,
    },
    "qwen3_5_moe_text": _DELTA_MIXTURE,
    "qwen3_next": {**_DELTA_MIXTURE, "norm_topk_prob": True},
}
"""The same of families whose MLPs are mixtures of experts, which some verbs do not take."""
UNLIKE_MIXTURES = ("qwen2_moe", "gpt_oss", "deepseek_v2", "nemotron_h")
"""Mixtures that together have shared experts, biases, sinks, latents, routers of groups, dense blocks and states."""
EVERY_MIXTURE = [pytest.param(name, marks=[pytest.mark.long][: name not in UNLIKE_MIXTURES]) for name in EXPERTS]
"""Parameters of a test: all mixtures, those that are like another among the `long` tests."""


def row(name: str) -> Family:
    """The row of a family by its name in these tables."""
    changes = (SMALL | EXPERTS)[name]
    family = FAMILIES[changes.get("model_type", name)]
    if family.shared_kv is not None and changes.get(family.shared_kv.count):
        return replace(family, gguf=None)  # llama.cpp's part is not of such models
    if name == GRANITE_WITH_STATES:
        return replace(family, gguf=None, residual=None)  # nor is this, and no basis
    return family.mixture if changes.get(family.mixes) and family.mixture is not None else family


LLAMA_CPP = [family for family in SMALL if row(family).gguf is not None]
"""The families of SMALL that llama.cpp knows."""
_STATES = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_ALL = {"num_experts_per_tok": 8}
AS_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "cwm": {"sliding_window": 512},
    **{family: {"head_dim": 64, "global_head_dim": 128} for family in ("gemma4_text", "gemma4_unified_text")},
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": {**_STATES, **_ALL},
    "qwen3_next": {**_STATES, **_ALL},
    "lfm2_moe": _ALL,
    "nemotron_h": {**_ALL, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "deepseek_v2": _ALL,
    "deepseek_v3": {**_ALL, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": _ALL,
    "gpt_oss": {
        "head_dim": 64,
        "rope_parameters": {**EXPERTS["gpt_oss"]["rope_parameters"], "truncate": True},
    },
}
"""The changes to small models without which llama.cpp refuses them, or computes something else: it knows no windows in
Llamas, has one number for heads of keys and values in a state, rounds YaRN's bounds, and takes every MLP of a
Nemotron-H for a mixture where one is. All experts where of random ones rounding decides which are chosen."""
ROTATED = [family for family in SMALL if row(family).residual is not None]
"""The families whose residual stream may be written in another basis."""

WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 10},
    "ministral": {"sliding_window": 10},
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3": {},
    "phi3": {"sliding_window": 10},
    "gemma2": {"sliding_window": 10},
    "gemma3_text": {"sliding_window": 10},
    **{
        family: {"sliding_window": 10}
        for family in (
            "olmo3",
            "cohere2",
            "vaultgemma",
            "cwm",
            "gemma4_text",
            "gemma4_unified_text",
            INPUTS_OF_EACH_LAYER,
        )
    },
    "exaone4": {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]},
    **{family: {} for family in ("gemma", "hyperclovax", "lfm2", "qwen3_5_text", "glm", "glm4", "ernie4_5", "helium")},
    **{
        family: {}
        for family in ("granite", "granitemoehybrid", GRANITE_WITH_STATES, "smollm3", "olmo", "olmo2", "arcee")
    },
    **{family: {} for family in ("nemotron", "seed_oss", "ministral3", "bitnet", "apertus")},
}
"""The changes to each family that make its layers look back a few tokens, where the family has such layers."""
UNLIKE = (
    *("qwen2", "gemma3_text", "gemma4_text", "lfm2", "granite", "phi3", "smollm3", "qwen3_5_text"),
    INPUTS_OF_EACH_LAYER,
)
"""Families that together have windows in some layers, two rotary tables, heads of two sizes, multipliers, matrices in
one, layers without a rotary embedding, states, and inputs of each layer with keys and values that others read."""
EVERY_FAMILY = [pytest.param(name, marks=[pytest.mark.long][: name not in UNLIKE]) for name in WINDOWED]
"""Parameters of a test or a fixture: all families, those that are like another among the `long` tests."""
ONLY_ATTENTION = [
    each for each in EVERY_FAMILY if (family := row(str(each.values[0]))).state is None and not family.global_heads
]
"""The same of those that have attention in every block, with heads of one size."""

OPT: dict[str, dict[str, Any]] = {
    "opt": {},
    "opt, narrow embedding, norms after": {"word_embed_proj_dim": 96, "do_layer_norm_before": False},
    "opt, wide embedding": {"word_embed_proj_dim": 320},
    "opt, untied, no biases, plain norms, none at the end": {
        "tie_word_embeddings": False,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
    },
    "opt, odd sizes": {"hidden_size": 90, "ffn_dim": 203, "num_attention_heads": 3, "word_embed_proj_dim": 51},
}
"""The configurations of OPT, a family that is no format's: changes for `make_opt`."""


@cache
def tokenizer() -> Any:
    """A byte-level BPE of `VOCABULARY` tokens without BOS, trained on Python's own documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT.splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def make_model(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Save a random model of `family` in bfloat16, changed by `changes` to its configuration; returns the folder.

    Norms and biases are random too, so that a lost one shows.
    """
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        **(SMALL | EXPERTS)[family],
        **changes,
    }
    if values["num_hidden_layers"] == 1 and family in EXPERTS:  # and so has experts
        dense = row(family).dense_mlps
        values |= {} if dense is None or family == "nemotron_h" else {dense.key: dense.setting(False)}
        values |= {"layers_block_type": ["moe"]} if family == "nemotron_h" else {}
        values |= {"layer_types": ["full_attention"]} if values.get("layer_types") else {}
    if family == "granitemoehybrid" and "layer_types" not in changes:  # states, if it is not said
        values["layer_types"] = ["attention"] * values["num_hidden_layers"]
    return _saved(folder, family, values, seed)


def make_opt(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """The same of OPT, whose configuration has names of its own."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        **changes,
    }
    return _saved(folder, "opt", values, seed)


def edit_config(folder: Path, **changes: Any) -> None:
    """Other values in a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _saved(folder: Path, family: str, values: dict[str, Any], seed: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**{"model_type": family, **values})
    generator = torch.Generator().manual_seed(seed)
    with no_init_weights():  # each of them gets a value below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in placed_in(model):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith("scale"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise)  # states forget within a few tokens, or hundreds
            elif "embed_" in name:
                parameter.copy_(noise)
            elif ".act_fn." in name:
                parameter.add_(0.1 * noise * ("alpha" in name))
            elif name.endswith("layer_scalar"):
                parameter.copy_(0.5 + noise.abs())
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
