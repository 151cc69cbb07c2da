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
from sparsepack.models.checkpoint.gguf_blocks import block_values, decimal, is_sigmoid, without_predicted
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import HEAD, Family
from sparsepack.models.llama_cpp import LlamaCpp

ROUTER = "ffn_gate_inp"
"""llama.cpp's name of what chooses among experts, which it never quantises."""

SHARED_GATE = "ffn_gate_inp_shexp"
"""llama.cpp's name of what says how much of a shared expert a token has."""

UNQUANTISED = (
    f"{ROUTER}.weight",
    f"{SHARED_GATE}.weight",
    "ssm_alpha.weight",
    "ssm_beta.weight",
    "ssm_ba.weight",
    "ssm_conv1d.weight",
    "ssm_norm.weight",
    "shortconv.conv.weight",
)
"""These matrices of blocks stay in F32."""

ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""llama.cpp divides rotary frequencies by these: in all texts, or in short and in long ones."""


def gguf_names(family: Family, layers: int) -> dict[str, str]:
    """llama.cpp name -> Hugging Face name, of every tensor that a model of the family may have; those of experts
    are the parts that `checkpoint.experts` has."""
    last_norm = "output_norm" if family.gguf is None else family.gguf.last_norm
    names = {"token_embd.weight": family.embedding, "output.weight": HEAD, f"{last_norm}.weight": family.last_norm}
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


LARGEST_FACTOR = 1e29
"""Channels whose rotary factor is larger do not turn."""

OWN_CONFIG = "sparsepack.config"
"""The config.json that sparsepack puts into the GGUFs it writes."""

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
    gguf, family = _row(file, kind, name)
    try:
        check_fields({"num_hidden_layers": file.metadata[f"{kind}.block_count"]}, f"{name}: ")  # lists are as long
        values = _values(file, f"{kind}.", family, gguf)
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
    if (family.per_layer is not None and family.per_layer.of(config)) or (
        family.shared_kv is not None and getattr(config, family.shared_kv.count, 0)
    ):
        raise CheckpointError(
            f"{name}: a GGUF of a {family.model_type} model with an input of each layer, or with layers that read keys "
            "and values of another, is not read yet; expected its folder of safetensors"
        )
    if "rope_freqs.weight" in file.tensors and not gguf.window_pattern:
        _take_factors(config, file, name)
    return config


def _row(file: GgufFile, kind: Any, name: str) -> tuple[LlamaCpp, Family]:
    """What llama.cpp calls the models that a GGUF is one of, and their family. Raises `CheckpointError` where there is
    none."""
    rows = [row for family in FAMILIES.values() for row in (family, family.mixture) if row is not None]
    known_as = [(gguf, row) for row in rows if (gguf := row.gguf) is not None]
    mixture = f"{kind}.expert_count" in file.metadata
    of_kind = [
        (gguf, row)
        for gguf, row in known_as
        if gguf.name(mixture) == kind and ((row.experts is not None) == mixture or (row.mlp_kinds and not mixture))
    ]
    keys = _keys(file, f"{kind}.")
    windows, sigmoid = "attention.sliding_window" in keys, is_sigmoid(keys)

    def differs(of: tuple[LlamaCpp, Family]) -> tuple[bool, bool]:
        routing = None if of[1].experts is None else of[1].experts.routing
        has_windows = bool(of[0].window_every or of[0].window_pattern)
        return has_windows != windows, (routing is not None and routing.sigmoid) != sigmoid

    if not of_kind:
        known = sorted({name for gguf, _ in known_as for name in (gguf.name(True), gguf.name(False))})
        with_experts = " with experts" * mixture
        raise CheckpointError(
            f"{name}: a GGUF of architecture {str(kind)[:60]!r}{with_experts}; expected one of {', '.join(known)}"
        )
    return min(of_kind, key=differs)  # of those that differ in that alone


def _keys(file: GgufFile, prefix: str) -> dict[str, Any]:
    """A file's keys that begin so, without that."""
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _values(file: GgufFile, prefix: str, family: Family, gguf: LlamaCpp) -> dict[str, Any]:
    keys, of_all = without_predicted(_keys(file, prefix)), FAMILIES[family.model_type]
    heads, hidden = keys["attention.head_count"], keys["embedding_length"]
    kv_heads = keys.get("attention.head_count_kv", heads)  # of all blocks, or of each
    tokenizer, embedding = "tokenizer.ggml.", "token_embd.weight"
    # In models with fused matrices a part of each head may turn.
    turns = None if "blk.0.attn_qkv.weight" in file.tensors else keys.get("rope.dimension_count")
    head_dim = keys.get("attention.key_length", turns or hidden // heads)
    if family.latent:
        head_dim = keys["rope.dimension_count"]
    width = keys.get("feed_forward_length")
    if gguf.rope_switch and keys.get("rope.scaling.finetuned") is False:
        raise TypeError("rope.scaling.finetuned = false: no rotary embedding")
    rope = _rope(keys, file, head_dim)
    rope |= {name.rpartition(".")[2]: keys[key] for key, name in gguf.keys.items() if key in keys and "." in name}
    if gguf.whole_bounds and rope["rope_type"] == "yarn":
        rope["truncate"] = False
    if gguf.window_pattern:
        turned = (_factors(file, "rope_freqs.weight") < LARGEST_FACTOR).mean()
        rope |= {"rope_type": "proportional", "partial_rotary_factor": float(turned)}
    if family.local_rotary:
        base = keys.get("rope.freq_base_swa", gguf.local_base or rope["rope_theta"])
        local = {"rope_type": "default", "rope_theta": base}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {
        **{name: keys[key] or None for key, name in gguf.keys.items() if key in keys and "." not in name},
        **({gguf.head_field: head_dim} if gguf.head_field else {}),
        **({of_all.mixes: of_all.mixture is family} if of_all.mixes else {}),
        "hidden_size": hidden,
        **({"intermediate_size": width} if type(width) is int else {}),
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
        **({} if family.rotary == "none" else {"rope_parameters": rope}),
        # where transformers looks first
        **{name: rope[name] for name in ("original_max_position_embeddings",) if rope.get("rope_type") == "longrope"},
        **({"sliding_window": keys.get("attention.sliding_window")} if family.slides else {}),
        "bos_token_id": file.metadata.get(f"{tokenizer}bos_token_id"),
        "eos_token_id": file.metadata.get(f"{tokenizer}eos_token_id"),
        "pad_token_id": file.metadata.get(f"{tokenizer}padding_token_id"),
        **block_values(keys, file, family, gguf),
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
    if scaling == "yarn" and "rope.scaling.yarn_log_multiplier" in keys:
        sharper = 10 * decimal(keys["rope.scaling.yarn_log_multiplier"])
        rope |= {"mscale": sharper, "mscale_all_dim": sharper}
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
