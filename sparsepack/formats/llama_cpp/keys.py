"""The keys that tell stock llama.cpp of a model: its `llama.*`, `qwen2.*`, `phi3.*` keys and rotary factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gguf import GGUFValueType

from sparsepack.errors import PackingError
from sparsepack.formats.containers.gguf import KeyValue, f32, string, u32
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.gguf_config import ROTARY_FACTORS, epsilon_key
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family
from sparsepack.models.hf_config import rotary_settings
from sparsepack.models.llama_cpp import LlamaCpp

_INSTEAD = "pack as zigzag-q4_k, which sparsepack itself runs"


_WITH_FACTORS = ("llama3", "longrope")
"""The types of rotary scaling that need factors."""
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def llama_cpp(family: Family) -> LlamaCpp:
    """What llama.cpp knows of a family. Raises `PackingError` where that is nothing."""
    if family.gguf is None:
        raise PackingError(f"{family.model_type} models have no name in llama.cpp's table here; {_INSTEAD}")
    return family.gguf


def architecture_keys(architecture: Architecture, config: Any) -> tuple[dict[str, KeyValue], list[str]]:
    """The keys from which llama.cpp builds the model, and notes on what it does otherwise.

    Raises `PackingError` where llama.cpp would compute something else in every text.
    """
    family = FAMILIES[architecture.model_type]
    runs = llama_cpp(family)
    kind = runs.architecture
    if architecture.activation != runs.activation:
        raise PackingError(
            f"activation {architecture.activation!r}: llama.cpp runs {kind} models with {runs.activation} only; "
            f"{_INSTEAD}"
        )
    if not architecture.tied and not runs.untied:
        raise PackingError(f"an output matrix beside the embedding: llama.cpp reads none in {kind} models; {_INSTEAD}")
    wide = architecture.layers == runs.wide
    scale = (architecture.hidden // architecture.heads if wide else architecture.head_dim) ** -0.5
    if (
        "attention.scale" not in runs.keys
        and abs((architecture.attention_scale or architecture.head_dim**-0.5) / scale - 1) > 1e-6
    ):
        raise PackingError(
            f"attention scores times {architecture.attention_scale:.6g}: llama.cpp takes {scale:.6g} in {kind} models "
            f"of {architecture.layers} layers; {_INSTEAD}"
        )
    notes = []
    keys = {
        "context_length": u32(architecture.named_context),
        "embedding_length": u32(architecture.hidden),
        "block_count": u32(architecture.layers),
        "feed_forward_length": u32(architecture.intermediate),
        "attention.head_count": u32(architecture.heads),
        "attention.head_count_kv": u32(architecture.kv_heads),
        "attention.key_length": u32(architecture.head_dim),
        "attention.value_length": u32(architecture.head_dim),
        epsilon_key(family): f32(architecture.norm_eps),
        "rope.dimension_count": u32(2 * len(architecture.inv_freq)),
        "vocab_size": u32(architecture.vocabulary),
    }
    if architecture.experts is not None:
        keys |= _expert_keys(architecture, config, runs)
    if architecture.delta_net is not None:
        keys |= _state_keys(architecture, kind)
    if architecture.conv_layers:
        of_blocks = [
            0 if layer in architecture.conv_layers else architecture.kv_heads for layer in range(architecture.layers)
        ]
        keys["attention.head_count_kv"] = (of_blocks, GGUFValueType.ARRAY, GGUFValueType.INT32)
        keys["shortconv.l_cache"] = u32(architecture.short_conv)
    window = max(architecture.sliding_windows, default=0)
    keys |= {key: f32(_field(config, name) or 0.0) for key, name in runs.keys.items()}
    if "final_logit_softcapping" not in runs.keys and (architecture.attention_cap or architecture.logit_cap):
        raise PackingError(f"soft caps: llama.cpp has none in {kind} models; {_INSTEAD}")
    if runs.window_every:
        keys["attention.sliding_window"] = u32(window or architecture.context)
        every, layers = runs.window_every, range(architecture.layers)
        if architecture.sliding_windows != tuple(0 if layer % every == every - 1 else window for layer in layers):
            raise PackingError(
                f"layers with a sliding window: in {kind} models llama.cpp gives one to all but one in {every}; "
                f"{_INSTEAD}"
            )
    elif 0 < window < architecture.context:
        keys["attention.sliding_window"] = u32(window)
        notes.append(
            f"llama.cpp ignores the sliding window of {window} tokens in {kind} models: longer texts attend to all"
        )
    if (long := architecture.long_texts) is not None:
        notes.append(
            f"llama.cpp turns texts by the room that it makes for them, not by their length: give it more than "
            f"{long.tokens} tokens (-c) only for texts that are longer"
            if long.turns_all
            else f"llama.cpp turns texts of more than {long.tokens} tokens as shorter ones"
        )
    rope, local = rotary_settings(config)
    if local:
        keys["rope.freq_base_swa"] = f32(local["rope_theta"])
    every = runs.rope_every or architecture.layers + 1
    if runs.rope_switch and len(architecture.ropeless) == architecture.layers:
        keys["rope.scaling.finetuned"] = (False, GGUFValueType.BOOL, None)
    elif architecture.ropeless != tuple(range(every - 1, architecture.layers, every)):
        raise PackingError(
            f"layers {list(architecture.ropeless)} without rotary embedding: in {kind} models llama.cpp turns queries "
            f"and keys of all layers{f' but every {every}th' if runs.rope_every else ''}; {_INSTEAD}"
        )
    keys |= _rotary_keys(architecture, rope, runs)
    if not rope.get("truncate", True):
        notes.append(
            f"llama.cpp rounds the bounds between which 'yarn' scales frequencies in {kind} models: logits differ a "
            "little from the model's"
        )
    return {f"{kind}.{key}": value for key, value in keys.items()}, notes


def _field(config: Any, name: str) -> Any:
    within, _, last = name.rpartition(".")
    return (getattr(config, within, None) or {}).get(last) if within else getattr(config, last, None)


def _expert_keys(architecture: Architecture, config: Any, runs: LlamaCpp) -> dict[str, KeyValue]:
    numbers, of_family = architecture.experts, FAMILIES[architecture.model_type].experts
    assert numbers is not None
    assert of_family is not None
    kind = runs.architecture
    if numbers.normalised != runs.normalised:
        does = "makes the weights of the chosen experts add up to one"
        raise PackingError(
            f"{of_family.normalised} {str(numbers.normalised).lower()}: llama.cpp "
            f"{'always' if runs.normalised else 'never'} {does} in {kind} models; {_INSTEAD}"
        )
    if architecture.blocks[0].qk_norm == "rows" and architecture.heads != architecture.kv_heads:
        raise PackingError(
            f"{architecture.heads} heads, {architecture.kv_heads} of keys: llama.cpp norms as many of them in {kind} "
            f"models; {_INSTEAD}"
        )
    shared = {"expert_shared_feed_forward_length": u32(numbers.shared * architecture.intermediate)}
    return {
        **(shared if numbers.shared else {}),
        "expert_count": u32(numbers.count),
        "expert_used_count": u32(numbers.used),
        "expert_feed_forward_length": u32(architecture.intermediate),
        "feed_forward_length": u32(getattr(config, "intermediate_size", architecture.intermediate)),
    }


def _state_keys(architecture: Architecture, kind: str) -> dict[str, KeyValue]:
    """The keys of blocks that keep a state, and of the others how many there are."""
    numbers, layers = architecture.delta_net, range(architecture.layers)
    assert numbers is not None
    if numbers.key_dim != numbers.value_dim:
        raise PackingError(
            f"heads of {numbers.key_dim} and {numbers.value_dim} channels in a delta net: in {kind} models llama.cpp "
            f"has one number for both; {_INSTEAD}"
        )
    every = architecture.attention_layers[0] + 1
    if architecture.attention_layers != tuple(layers[every - 1 :: every]):
        raise PackingError(
            f"attention in layers {', '.join(map(str, architecture.attention_layers))}: in {kind} models llama.cpp has "
            f"it in one layer of so many; {_INSTEAD}"
        )
    turned = len(architecture.inv_freq)
    # Channels in turns by time, height and width, which are the same in text.
    sections = [(turned + 2 - axis) // 3 for axis in range(3)]
    return {
        "ssm.conv_kernel": u32(numbers.taps),
        "ssm.state_size": u32(numbers.key_dim),
        "ssm.group_count": u32(numbers.key_heads),
        "ssm.time_step_rank": u32(numbers.value_heads),
        "ssm.inner_size": u32(numbers.values),
        "full_attention_interval": u32(every),
        "rope.dimension_sections": ([*sections, 0], GGUFValueType.ARRAY, GGUFValueType.INT32),
    }


def rotary_factors(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    """What llama.cpp divides each rotary frequency by, by the names of its tensors: float32 [n / 2] of the n channels
    of a head that turn.

    Only Llama 3's scaling and longrope need them; the other kinds are keys.
    """
    rope, long = rotary_settings(config)[0], architecture.long_texts
    of_all, short, of_long = ROTARY_FACTORS
    dims = 2 * len(architecture.inv_freq)

    def factors(inv_freq: Sequence[float]) -> torch.Tensor:
        unscaled = 1 / float(rope["rope_theta"]) ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        return (unscaled / torch.tensor(inv_freq, dtype=torch.float64)).float()

    if rope.get("rope_type", "default") == "llama3":
        return {of_all: factors(architecture.inv_freq)}
    if long is None or not long.turns_all:
        return {}
    return {short: factors(architecture.inv_freq), of_long: factors(long.inv_freq)}


def _rotary_keys(architecture: Architecture, rope: Mapping[str, Any], runs: LlamaCpp) -> dict[str, KeyValue]:
    keys = {"rope.freq_base": f32(rope["rope_theta"])}
    scaling, kind = rope.get("rope_type", "default"), runs.architecture
    if 2 * len(architecture.inv_freq) != architecture.head_dim and not runs.parts_of_heads:
        raise PackingError(f"partial rotary embedding: llama.cpp turns whole heads in {kind} models; {_INSTEAD}")
    if scaling in _WITH_FACTORS and scaling not in runs.scalings:
        able = next(f.gguf for f in FAMILIES.values() if f.gguf is not None and scaling in f.gguf.scalings)
        raise PackingError(
            f"rotary scaling {scaling!r}: llama.cpp has it for {able.architecture} models only, not {kind}; {_INSTEAD}"
        )
    if (long := architecture.long_texts) is not None and long.turns_all:
        keys["rope.scaling.original_context_length"] = u32(long.tokens)
        keys["rope.scaling.attn_factor"] = f32(architecture.rotary_scale)
    if scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": string(scaling), "rope.scaling.factor": f32(_factor(architecture, rope))}
    if scaling == "yarn":
        keys |= _yarn_keys(architecture, rope, runs)
    return keys


def _yarn_keys(architecture: Architecture, rope: Mapping[str, Any], runs: LlamaCpp) -> dict[str, KeyValue]:
    if not rope.get("truncate", True) and not runs.whole_bounds:
        raise PackingError(f"rotary scaling 'yarn' without truncation: llama.cpp always truncates; {_INSTEAD}")
    keys = {
        "rope.scaling.original_context_length": u32(rope["original_max_position_embeddings"]),
        "rope.scaling.finetuned": (True, GGUFValueType.BOOL, None),
    }
    for name, usual in _YARN_BETAS.items():
        if (value := rope.get(name) or usual) != usual:
            raise PackingError(f"rotary scaling 'yarn' with {name} {value}: llama.cpp uses {usual}; {_INSTEAD}")
    own = 0.1 * math.log(_factor(architecture, rope)) + 1  # what llama.cpp multiplies with by itself
    if abs(architecture.rotary_scale / own - 1) > 1e-6:
        keys["rope.scaling.attn_factor"] = f32(architecture.rotary_scale / own)
    return keys


def _factor(architecture: Architecture, rope: Mapping[str, Any]) -> float:
    return float(rope.get("factor") or architecture.context / rope["original_max_position_embeddings"])
