"""The keys that tell stock llama.cpp of a model: its `llama.*`, `qwen2.*`, `phi3.*` keys and rotary factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gguf import GGUFValueType

from sparsepack.errors import PackingError
from sparsepack.formats.containers.gguf import KeyValue, f32, string, u32
from sparsepack.formats.llama_cpp.block_keys import INSTEAD, block_keys
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.gguf_config import ROTARY_FACTORS, epsilon_key
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family
from sparsepack.models.hf_config import rotary_settings
from sparsepack.models.llama_cpp import LlamaCpp

_WITH_FACTORS = ("llama3", "longrope")
"""The types of rotary scaling that need factors."""
_STILL = 1e30
"""The factor of channels that do not turn."""
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def llama_cpp(family: Family) -> LlamaCpp:
    """What llama.cpp knows of a family. Raises `PackingError` where that is nothing."""
    if family.gguf is None:
        raise PackingError(f"{family.model_type} models have no name in llama.cpp's table here; {INSTEAD}")
    return family.gguf


def architecture_keys(architecture: Architecture, config: Any) -> tuple[dict[str, KeyValue], list[str]]:
    """The keys from which llama.cpp builds the model, and notes on what it does otherwise.

    Raises `PackingError` where llama.cpp would compute something else in every text.
    """
    family = architecture.row
    runs = llama_cpp(family)
    kind = runs.name(architecture.experts is not None)
    if architecture.per_layer or architecture.kv_sources:
        raise PackingError(
            f"an input of each layer, or layers that read keys and values of another: GGUFs for llama.cpp of {kind} "
            f"models with these are not written yet; {INSTEAD}"
        )
    if architecture.activation != runs.activation:
        raise PackingError(
            f"activation {architecture.activation!r}: llama.cpp runs {kind} models with {runs.activation} only; "
            f"{INSTEAD}"
        )
    if not architecture.tied and not runs.untied:
        raise PackingError(f"an output matrix beside the embedding: llama.cpp reads none in {kind} models; {INSTEAD}")
    wide = architecture.layers == runs.wide
    scale = runs.scale or (architecture.hidden // architecture.heads if wide else architecture.head_dim) ** -0.5
    if (
        "attention.scale" not in runs.keys
        and architecture.latent is None
        and abs((architecture.attention_scale or architecture.head_dim**-0.5) / scale - 1) > 1e-6
    ):
        raise PackingError(
            f"attention scores times {architecture.attention_scale:.6g}: llama.cpp takes {scale:.6g} in {kind} models "
            f"of {architecture.layers} layers; {INSTEAD}"
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
    keys |= block_keys(architecture, config, runs)
    window = max(architecture.sliding_windows, default=0)
    keys |= {key: f32(_field(config, name) or 0.0) for key, name in runs.keys.items()}
    if "final_logit_softcapping" not in runs.keys and (architecture.attention_cap or architecture.logit_cap):
        raise PackingError(f"soft caps: llama.cpp has none in {kind} models; {INSTEAD}")
    if runs.window_every:
        keys["attention.sliding_window"] = u32(window or architecture.context)
        every, layers = runs.window_every, range(architecture.layers)
        if architecture.sliding_windows != tuple(0 if layer % every == every - 1 else window for layer in layers):
            raise PackingError(
                f"layers with a sliding window: in {kind} models llama.cpp gives one to all but one in {every}; "
                f"{INSTEAD}"
            )
    elif 0 < window < architecture.context and not runs.window_pattern:
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
            f"and keys of all layers{f' but every {every}th' if runs.rope_every else ''}; {INSTEAD}"
        )
    if family.rotary != "none":
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


def rotary_factors(architecture: Architecture, config: Any) -> dict[str, torch.Tensor]:
    """What llama.cpp divides each rotary frequency by, by the names of its tensors: float32 [n / 2] of the n channels
    of a head that turn.

    Only Llama 3's scaling, longrope and Gemma 4's, by which few channels turn, need them; the other kinds are keys.
    """
    rope, long = rotary_settings(config)[0], architecture.long_texts
    of_all, short, of_long = ROTARY_FACTORS
    dims = 2 * len(architecture.inv_freq)

    def factors(inv_freq: Sequence[float]) -> torch.Tensor:
        unscaled = 1 / float(rope["rope_theta"]) ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        frequencies = torch.tensor(inv_freq, dtype=torch.float64)
        return torch.where(frequencies == 0, _STILL, unscaled / frequencies).float()

    if rope.get("rope_type", "default") in ("llama3", "proportional"):
        return {of_all: factors(architecture.inv_freq)}
    if long is None or not long.turns_all:
        return {}
    return {short: factors(architecture.inv_freq), of_long: factors(long.inv_freq)}


def _rotary_keys(architecture: Architecture, rope: Mapping[str, Any], runs: LlamaCpp) -> dict[str, KeyValue]:
    keys = {"rope.freq_base": f32(rope["rope_theta"])}
    scaling, kind = rope.get("rope_type", "default"), runs.architecture
    turned, of_all = 2 * len(architecture.inv_freq), architecture.global_heads[1:] or (architecture.head_dim,)
    if turned != of_all[0] and not runs.parts_of_heads:
        raise PackingError(f"partial rotary embedding: llama.cpp turns whole heads in {kind} models; {INSTEAD}")
    if scaling in _WITH_FACTORS and scaling not in runs.scalings:
        able = next(f.gguf for f in FAMILIES.values() if f.gguf is not None and scaling in f.gguf.scalings)
        raise PackingError(
            f"rotary scaling {scaling!r}: llama.cpp has it for {able.architecture} models only, not {kind}; {INSTEAD}"
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
        raise PackingError(f"rotary scaling 'yarn' without truncation: llama.cpp always truncates; {INSTEAD}")
    kind = runs.architecture
    keys = {
        "rope.scaling.original_context_length": u32(rope["original_max_position_embeddings"]),
        "rope.scaling.finetuned": (True, GGUFValueType.BOOL, None),
    }
    for name, usual in _YARN_BETAS.items():
        if (value := rope.get(name) or usual) != usual:
            raise PackingError(f"rotary scaling 'yarn' with {name} {value}: llama.cpp uses {usual}; {INSTEAD}")
    if architecture.latent is not None:
        # Scores of stretched texts are sharper by this; what turns is not scaled then.
        if not (sharper := rope.get("mscale_all_dim")) or abs(architecture.rotary_scale - 1) > 1e-6:
            raise PackingError(
                f"rotary scaling 'yarn' with mscale {rope.get('mscale')} and mscale_all_dim {sharper}: in {kind} "
                f"models llama.cpp takes both for the same number; {INSTEAD}"
            )
        return keys | {"rope.scaling.yarn_log_multiplier": f32(0.1 * sharper)}
    own = 0.1 * math.log(_factor(architecture, rope)) + 1  # what llama.cpp multiplies with by itself
    if abs(architecture.rotary_scale / own - 1) > 1e-6:
        keys["rope.scaling.attn_factor"] = f32(architecture.rotary_scale / own)
    return keys


def _factor(architecture: Architecture, rope: Mapping[str, Any]) -> float:
    return float(rope.get("factor") or architecture.context / rope["original_max_position_embeddings"])
