"""The stock configuration of a model that is a GGUF.

transformers' own reader of GGUF configurations leaves out head sizes that differ from hidden / heads, rotary scaling,
sliding windows and biases: such models would load, and be others. Here every key that llama.cpp's converter writes for
the supported families is read, and what cannot be expressed is refused.

llama.cpp's tensor names beside Hugging Face's; what it has in those tensors is in `llama_cpp_tensors`.
"""

import json
import math
from typing import Any

import numpy as np

from sparsepack.errors import CheckpointError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.config_files import check_fields, config_of
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import DeltaNetNames, Experts, ShortConvNames

_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}

ROUTER = "ffn_gate_inp"
"""llama.cpp's name of what chooses among experts, which it never quantises."""

SHARED_GATE = "ffn_gate_inp_shexp"
"""llama.cpp's name of what says how much of a shared expert a token has."""

UNQUANTISED = (
    f"{ROUTER}.weight",
    f"{SHARED_GATE}.weight",
    "ssm_alpha.weight",
    "ssm_beta.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
)
"""These matrices of blocks stay in F32."""

ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""llama.cpp divides rotary frequencies by these: in all texts, or in short and in long ones."""


def gguf_names(family: Family, layers: int) -> dict[str, str]:
    """llama.cpp name -> Hugging Face name, of every tensor that a model of the family may have; those of experts
    are the parts that `checkpoint.experts` has."""
    last_norm = "output_norm" if family.gguf is None else family.gguf.last_norm
    names = {**_OUTSIDE, f"{last_norm}.weight": family.last_norm}
    if family.layer_norms:
        names[f"{last_norm}.bias"] = family.last_norm_bias
    parts = {} if family.gguf is None else family.gguf.parts
    for layer in range(layers):
        for ours, theirs in parts.items():
            for part in ("weight", "bias"):
                names[f"blk.{layer}.{ours}.{part}"] = f"{family.block(layer)}.{theirs}.{part}"
        for ours, theirs in ({} if family.gguf is None else family.gguf.tensors).items():
            names[f"blk.{layer}.{ours}"] = f"{family.block(layer)}.{theirs}"
    return names


def epsilon_key(family: Family) -> str:
    """llama.cpp's key of what norms add to the mean square, without the architecture."""
    return f"attention.layer_norm_{'' if family.layer_norms else 'rms_'}epsilon"


STATE_INTERVAL = 4
"""llama.cpp takes one block of so many for one with attention where a file does not say it."""

OWN_CONFIG = "sparsepack.config"
"""The config.json that sparsepack puts into the GGUFs it writes."""

# What routers of other kinds have: 1 is the softmax in llama.cpp, and one group is no groups.
_PLAIN_ROUTER = {"expert_gating_func": 1, "expert_group_count": 1}
# Llama 3.1's rotary scaling; the factor (8, in Llama 3.2 32) is the largest in the tensor.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_config(file: GgufFile, name: str) -> Any:
    """The configuration of a GGUF.

    Raises `CheckpointError` for other architectures, missing keys and rotary scalings that are not understood.
    """
    from transformers import AutoConfig

    if OWN_CONFIG in file.metadata:
        try:
            values = json.loads(file.metadata[OWN_CONFIG])
            check_fields(values, f"{name}: {OWN_CONFIG}: ")
            return config_of(values)
        except CheckpointError:
            raise
        except Exception as error:  # transformers checks fields in several ways, each with its own kind
            raise CheckpointError(
                f"{name}: {OWN_CONFIG} inside is not understood ({shown(error)}); pack it again"
            ) from error
    kind = file.metadata.get("general.architecture")
    known_as = [(gguf, family) for family in FAMILIES.values() if (gguf := family.gguf) is not None]
    mixture = f"{kind}.expert_count" in file.metadata
    of_kind = [of for of in known_as if of[0].architecture == kind and (of[1].experts is not None) == mixture]
    windows = f"{kind}.attention.sliding_window" in file.metadata
    of_kind.sort(key=lambda of: bool(of[0].window_every) != windows)  # of those that differ in that alone
    gguf, family = next(iter(of_kind), (None, None))
    if gguf is None or family is None:
        known = sorted({gguf.architecture for gguf, _ in known_as})
        with_experts = " with experts" * mixture
        raise CheckpointError(
            f"{name}: a GGUF of architecture {str(kind)[:60]!r}{with_experts}; expected one of {', '.join(known)}"
        )
    try:
        check_fields({"num_hidden_layers": file.metadata[f"{kind}.block_count"]}, f"{name}: ")  # lists are as long
        values = _values(file, f"{kind}.", family, gguf)
        if family.experts is not None:
            values |= _expert_values(file, f"{kind}.", family, family.experts, gguf.normalised)
        check_fields({**values, "model_type": family.model_type}, f"{name}: ")
        config = AutoConfig.for_model(family.model_type, **values)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{name}: the key {error} is missing; convert the model again") from error
    except Exception as error:  # transformers checks fields in several ways, each with its own kind
        raise CheckpointError(
            f"{name}: its keys are not understood ({shown(error)}); convert the model again"
        ) from error
    if "rope_freqs.weight" in file.tensors:
        _take_factors(config, file, name)
    return config


def _values(file: GgufFile, prefix: str, family: Family, gguf: LlamaCpp) -> dict[str, Any]:
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    heads, hidden = keys["attention.head_count"], keys["embedding_length"]
    kv_heads = keys.get("attention.head_count_kv", heads)  # of all blocks, or of each
    tokenizer, embedding = "tokenizer.ggml.", "token_embd.weight"
    # In models with fused matrices a part of each head may turn.
    turns = None if "blk.0.attn_qkv.weight" in file.tensors else keys.get("rope.dimension_count")
    head_dim = keys.get("attention.key_length", turns or hidden // heads)
    if gguf.rope_switch and keys.get("rope.scaling.finetuned") is False:
        raise TypeError("rope.scaling.finetuned = false: no rotary embedding")
    rope = _rope(keys, file, head_dim)
    rope |= {name.rpartition(".")[2]: keys[key] for key, name in gguf.keys.items() if key in keys and "." in name}
    if gguf.whole_bounds and rope["rope_type"] == "yarn":
        rope["truncate"] = False
    if family.local_rotary:
        base = keys.get("rope.freq_base_swa", gguf.local_base or rope["rope_theta"])
        local = {"rope_type": "default", "rope_theta": base}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {
        **{name: keys[key] or None for key, name in gguf.keys.items() if key in keys and "." not in name},
        **({gguf.head_field: head_dim} if gguf.head_field else {}),
        **_state_values(keys, family.delta_net),
        **_conv_values(keys, family.short_conv),
        "hidden_size": hidden,
        **({"intermediate_size": keys["feed_forward_length"]} if "feed_forward_length" in keys else {}),
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if type(kv_heads) is int else max(kv_heads),
        "head_dim": head_dim,
        family.fields.get("rms_norm_eps") or "rms_norm_eps": keys[epsilon_key(family)],
        "max_position_embeddings": keys["context_length"],
        "vocab_size": file.tensors[embedding if embedding in file.tensors else "output.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        family.fields.get("attention_bias", "attention_bias"): "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "rope_parameters": rope,
        # where transformers looks first
        **{name: rope[name] for name in ("original_max_position_embeddings",) if rope.get("rope_type") == "longrope"},
        **({"sliding_window": keys.get("attention.sliding_window")} if family.slides else {}),
        "bos_token_id": file.metadata.get(f"{tokenizer}bos_token_id"),
        "eos_token_id": file.metadata.get(f"{tokenizer}eos_token_id"),
        "pad_token_id": file.metadata.get(f"{tokenizer}padding_token_id"),
    }


def _state_values(keys: dict[str, Any], names: DeltaNetNames | None) -> dict[str, Any]:
    """What a configuration says of blocks that keep a state."""
    if names is None:
        return {}
    head = keys["ssm.state_size"]
    numbers = keys["ssm.group_count"], keys["ssm.time_step_rank"], head, head, keys["ssm.conv_kernel"]
    every = keys.get("full_attention_interval", STATE_INTERVAL)
    kinds = [names.kind if (layer + 1) % every else "full_attention" for layer in range(keys["block_count"])]
    return {**dict(zip(names.fields, numbers, strict=True)), "layer_types": kinds}


def _conv_values(keys: dict[str, Any], names: ShortConvNames | None) -> dict[str, Any]:
    """What a configuration says of blocks that have a short convolution: those without heads of keys."""
    if names is None:
        return {}
    kinds = ["full_attention" if heads else names.kind for heads in keys["attention.head_count_kv"]]
    return {names.taps: keys["shortconv.l_cache"], "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _expert_values(file: GgufFile, prefix: str, family: Family, experts: Experts, normalised: bool) -> dict[str, Any]:
    own = f"{prefix}expert_feed_forward_length"
    width = file.metadata[own if own in file.metadata else f"{prefix}feed_forward_length"]
    shared = experts.shared
    for name, plain in _PLAIN_ROUTER.items():
        if (value := file.metadata.get(f"{prefix}{name}")) not in (None, 0, plain):
            raise ValueError(f"{prefix}{name} is {value}, a router of another kind than the softmax of its logits")
    return {
        family.fields.get("intermediate_size", "intermediate_size"): width,
        experts.count: file.metadata[f"{prefix}expert_count"],
        "num_experts_per_tok": file.metadata[f"{prefix}expert_used_count"],
        **({experts.normalised: normalised} if experts.normalised else {}),
        **({} if shared is None else {shared.width: file.metadata[f"{prefix}expert_shared_feed_forward_length"]}),
    }


def _rope(keys: dict[str, Any], file: GgufFile, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10000.0)}
    if (dims := keys.get("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    if "rope_factors_long.weight" in file.tensors:
        return rope | {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight").tolist(),
            "long_factor": _factors(file, "rope_factors_long.weight").tolist(),
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "attention_factor": keys.get("rope.scaling.attn_factor", 1.0),
        }
    scaling = keys.get("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": keys["rope.scaling.factor"]}
    elif scaling != "none":
        raise TypeError(f"rope.scaling.type = {scaling}")
    if scaling == "yarn" and "rope.scaling.attn_factor" in keys:
        # llama.cpp multiplies it with the usual factor.
        rope["attention_factor"] = keys["rope.scaling.attn_factor"] * (0.1 * math.log(rope["factor"]) + 1)
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = keys["rope.scaling.original_context_length"]
        rope |= {
            n: keys[f"rope.scaling.yarn_{n}"] for n in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{n}" in keys
        }
    return rope


def _take_factors(config: Any, file: GgufFile, name: str) -> None:
    """Llama 3's scaling from the factors that llama.cpp's converter made of it, if it is Llama 3's."""
    try:
        factors = _factors(file, "rope_freqs.weight")
    except TypeError as error:
        raise CheckpointError(f"{name}: {error}; convert the model again") from error
    scaling = {**_LLAMA3, "factor": float(factors.max(initial=1.0)), "rope_theta": config.rope_parameters["rope_theta"]}
    config.rope_parameters = scaling
    unscaled = scaling["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if not _same(factors, unscaled / _frequencies(config)):
        raise CheckpointError(
            f"{name}: rope_freqs.weight is not Llama 3's scaling; expected the Hugging Face folder here"
        )


def _factors(file: GgufFile, tensor: str) -> np.ndarray:
    if (kind := file.tensors[tensor].type) != "F32":
        raise TypeError(f"{tensor} is {kind}, expected F32")
    return np.frombuffer(file.bytes(tensor).tobytes(), dtype="<f4")


def _frequencies(config: Any) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies: np.ndarray = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
    return frequencies


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and bool(np.allclose(found, expected, rtol=1e-4))
