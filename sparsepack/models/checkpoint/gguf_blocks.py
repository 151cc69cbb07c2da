"""What a stock configuration says of the blocks of a GGUF: experts and their router, states, latents, heads of two
sizes. `keys` are a file's keys without the architecture."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsepack.files.gguf import GgufFile
from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import DeltaNetNames, Experts, MambaNames, RouterNames, ShortConvNames

STATE_INTERVAL = 4
"""llama.cpp takes one block of so many for one with attention where a file does not say it."""
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of what makes an expert's score of its logit; where a file does not say it, it is the first."""

# What routers of other kinds have: one group is no groups.
_PLAIN_ROUTER = {"expert_gating_func": SOFTMAX, "expert_group_count": 1}
PREDICTED = "nextn_predict_layers"
"""The key of how many blocks behind the last one predict further tokens, which `block_count` has among the others."""
Keys = Mapping[str, Any]


def block_values(keys: Keys, file: GgufFile, family: Family, gguf: LlamaCpp) -> dict[str, Any]:
    """These values. Raises `KeyError` for a key that is missing, `TypeError` and `ValueError` for what is not
    understood."""
    values: dict[str, Any] = {}
    if family.experts is not None:
        values |= _expert_values(keys, family, family.experts, gguf)
    if family.delta_net is not None:
        values |= _delta_values(keys, family.delta_net)
    if family.short_conv is not None:
        values |= _conv_values(keys, family.short_conv)
    if family.mamba is not None:
        values |= _mamba_values(keys, family, family.mamba)
    if family.latent:
        values |= _latent_values(keys)
    if family.global_heads:
        values |= _window_values(keys, file, family)
    return values


def without_predicted(keys: Keys) -> dict[str, Any]:
    """The same keys of the blocks alone that are not there to predict further tokens."""
    layers, predicted = keys["block_count"], keys.get(PREDICTED, 0)
    if not 0 <= predicted < layers:
        raise ValueError(f"{PREDICTED} is {predicted} of {layers}")
    shorter = {key: value[: layers - predicted] for key, value in keys.items() if isinstance(value, list)}
    return {**keys, **shorter, "block_count": layers - predicted}


def decimal(value: float) -> float:
    """The shortest decimal that a float32 of a file stands for, which a configuration has."""
    return float(str(np.float32(value)))


def is_sigmoid(keys: Keys) -> bool:
    """Whether scores of experts are sigmoids."""
    return bool(keys.get("expert_gating_func") == SIGMOID)


def _expert_values(keys: Keys, family: Family, experts: Experts, gguf: LlamaCpp) -> dict[str, Any]:
    if "expert_count" not in keys:
        return {}
    values = {
        family.fields.get("intermediate_size", "intermediate_size"): keys.get(
            "expert_feed_forward_length", keys["feed_forward_length"]
        ),
        experts.count: keys["expert_count"],
        experts.used: keys["expert_used_count"],
        **({experts.normalised: gguf.normalised} if experts.normalised else {}),
    }
    if family.mlp_width is not None:
        values["moe_intermediate_size"] = values.pop("intermediate_size")
    if experts.shared is not None:
        if experts.shared.count:
            values[experts.shared.count] = keys["expert_shared_count"]
        elif experts.shared.width != "intermediate_size":
            values[experts.shared.width] = keys["expert_shared_feed_forward_length"]
    if family.dense_mlps is not None and not family.mlp_kinds:
        values[family.dense_mlps.key] = keys.get("leading_dense_block_count", 0)
    if family.predicts:
        values["num_nextn_predict_layers"] = keys.get(PREDICTED, 0)
    if experts.routing is not None:
        return values | _router_values(keys, experts, experts.routing, gguf)
    for name, plain in _PLAIN_ROUTER.items():
        if (value := keys.get(name)) not in (None, 0, plain):
            raise ValueError(
                f"{gguf.architecture}.{name} is {value}, a router of another kind than the softmax of its logits"
            )
    return values


def _router_values(keys: Keys, experts: Experts, names: RouterNames, gguf: LlamaCpp) -> dict[str, Any]:
    """What a configuration says of a router of another kind than the softmax of all logits."""
    if is_sigmoid(keys) != names.sigmoid:
        raise ValueError(f"{gguf.architecture}.expert_gating_func is {keys.get('expert_gating_func')}")
    normalised = keys.get("expert_weights_norm", False) if "norm" in gguf.router else gguf.normalised
    if normalised and not (experts.normalised or names.sigmoid):
        raise ValueError(f"{gguf.architecture}.expert_weights_norm is true, of a softmax")
    groups = keys.get("expert_group_count") or 1
    values = {
        names.groups: groups,
        names.groups_used: keys.get("expert_group_used_count") or 1,
        names.scale: decimal(keys.get("expert_weights_scale") or 1.0),
        **({experts.normalised: normalised} if experts.normalised else {}),
    }
    return values | ({names.method: "greedy" if groups == 1 else "group_limited_greedy"} if names.method else {})


def _delta_values(keys: Keys, names: DeltaNetNames) -> dict[str, Any]:
    head = keys["ssm.state_size"]
    numbers = keys["ssm.group_count"], keys["ssm.time_step_rank"], head, head, keys["ssm.conv_kernel"]
    every = keys.get("full_attention_interval", STATE_INTERVAL)
    kinds = [names.kind if (layer + 1) % every else "full_attention" for layer in range(keys["block_count"])]
    return {**dict(zip(names.fields, numbers, strict=True)), "layer_types": kinds}


def _conv_values(keys: Keys, names: ShortConvNames) -> dict[str, Any]:
    """Blocks without heads of keys have a convolution."""
    kinds = ["full_attention" if heads else names.kind for heads in keys["attention.head_count_kv"]]
    return {names.taps: keys["shortconv.l_cache"], "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _mamba_values(keys: Keys, family: Family, names: MambaNames) -> dict[str, Any]:
    """Blocks with heads of keys have attention, those with a width are an MLP, the others have a state."""
    heads, inner = keys["ssm.time_step_rank"], keys["ssm.inner_size"]
    numbers = heads, inner // heads, keys["ssm.group_count"], keys["ssm.state_size"], keys["ssm.conv_kernel"]
    of_blocks = zip(keys["attention.head_count_kv"], keys["feed_forward_length"], strict=True)
    mixture, dense = family.mlp_kinds[0], family.mlp_kinds[-1]
    mlp = mixture if "expert_count" in keys else dense
    kinds = ["full_attention" if kv else mlp if width else names.kind for kv, width in of_blocks]
    widths = [width for width in keys["feed_forward_length"] if width]
    return {
        **dict(zip(names.fields, numbers, strict=True)),
        "layers_block_type": kinds,
        "intermediate_size": max(widths, default=keys["embedding_length"]),
        "attention_bias": False,
    }


def _latent_values(keys: Keys) -> dict[str, Any]:
    turning = keys["rope.dimension_count"]
    return {
        "num_key_value_heads": keys["attention.head_count"],
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "kv_lora_rank": keys["attention.kv_lora_rank"],
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": keys["attention.key_length_mla"] - turning,
        "v_head_dim": keys["attention.value_length_mla"],
        "head_dim": turning,
    }


def _window_values(keys: Keys, file: GgufFile, family: Family) -> dict[str, Any]:
    """Layers without a window have heads of their own, and perhaps as many of keys as they like."""
    windows, kv_heads = keys["attention.sliding_window_pattern"], keys["attention.head_count_kv"]
    layers = range(keys["block_count"])
    of_layers = [kv_heads] * len(layers) if type(kv_heads) is int else list(kv_heads)
    local = [kv for kv, window in zip(of_layers, windows, strict=True) if window]
    of_all = [kv for kv, window in zip(of_layers, windows, strict=True) if not window]
    values = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "head_dim": keys["attention.key_length_swa"],
        "global_head_dim": keys["attention.key_length"],
        "num_key_value_heads": max(local or of_all),
        "num_global_key_value_heads": max(of_all or local),
        "hidden_size_per_layer_input": keys["embedding_length_per_layer_input"],
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
    }
    if family.k_eq_v:
        values[family.k_eq_v] = any(f"blk.{layer}.attn_v.weight" not in file.tensors for layer in layers)
    return values
