"""What llama.cpp's file of a Gemma 4 has, for random weights of its shape: `pack` writes none yet."""

from typing import Any

from gguf import GGUFValueType

from sparsepack.formats.containers.gguf import KeyValue, f32, u32
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Attention
from sparsepack.models.hf_config import rotary_settings

KIND = "gemma4"


def keys(a: Architecture, config: Any) -> dict[str, KeyValue]:
    """The keys from which llama.cpp builds the model."""
    mixers = [block.mixer for block in a.blocks if isinstance(block.mixer, Attention)]
    rope, local = rotary_settings(config)
    wide = max(mixer.head_dim for mixer in mixers)
    kv_heads = [mixer.kv_heads for mixer in mixers]
    found: dict[str, KeyValue] = {
        "context_length": u32(a.context),
        "embedding_length": u32(a.hidden),
        "embedding_length_per_layer_input": u32(0),
        "block_count": u32(a.layers),
        "feed_forward_length": u32(config.intermediate_size),
        "attention.head_count": u32(a.heads),
        "attention.head_count_kv": (kv_heads, GGUFValueType.ARRAY, GGUFValueType.INT32),
        "attention.key_length": u32(wide),
        "attention.value_length": u32(wide),
        "attention.key_length_swa": u32(a.head_dim),
        "attention.value_length_swa": u32(a.head_dim),
        "attention.layer_norm_rms_epsilon": f32(a.norm_eps),
        "attention.sliding_window": u32(max(a.sliding_windows)),
        "attention.sliding_window_pattern": (
            [window > 0 for window in a.sliding_windows],
            GGUFValueType.ARRAY,
            GGUFValueType.BOOL,
        ),
        "rope.dimension_count": u32(wide),
        "rope.dimension_count_swa": u32(a.head_dim),
        "rope.freq_base": f32(rope["rope_theta"]),
        "rope.freq_base_swa": f32(local["rope_theta"]),
        "final_logit_softcapping": f32(a.logit_cap),
        "vocab_size": u32(a.vocabulary),
    }
    if a.experts is not None:
        found["expert_count"] = u32(a.experts.count)
        found["expert_used_count"] = u32(a.experts.used)
        found["expert_feed_forward_length"] = u32(a.intermediate)
    return {f"{KIND}.{key}": value for key, value in found.items()}


def shapes(a: Architecture, config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor, rows first."""
    wide = max(block.mixer.head_dim for block in a.blocks if isinstance(block.mixer, Attention))
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (a.vocabulary, a.hidden),
        "output_norm.weight": (a.hidden,),
        "rope_freqs.weight": (wide // 2,),
    }
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    width, experts = config.intermediate_size, a.experts
    for layer, block in enumerate(a.blocks):
        mixer = block.mixer
        assert isinstance(mixer, Attention)
        of_keys = mixer.kv_heads * mixer.head_dim
        parts: dict[str, tuple[int, ...]] = {f"{norm}.weight": (a.hidden,) for norm in norms}
        parts |= {f"attn_{part}_norm.weight": (mixer.head_dim,) for part in "qk"}
        parts["attn_q.weight"] = (a.heads * mixer.head_dim, a.hidden)
        parts["attn_k.weight"] = (of_keys, a.hidden)
        if not mixer.k_eq_v:
            parts["attn_v.weight"] = (of_keys, a.hidden)
        parts["attn_output.weight"] = (a.hidden, a.heads * mixer.head_dim)
        parts |= {f"ffn_{part}.weight": (width, a.hidden) for part in ("gate", "up")}
        parts["ffn_down.weight"] = (a.hidden, width)
        parts["layer_output_scale.weight"] = (1,)
        if experts is not None:
            parts |= {
                f"{norm}.weight": (a.hidden,) for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            }
            parts["ffn_gate_inp.weight"] = (experts.count, a.hidden)
            parts["ffn_gate_inp.scale"] = (a.hidden,)
            parts["ffn_gate_up_exps.weight"] = (experts.count, 2 * a.intermediate, a.hidden)
            parts["ffn_down_exps.weight"] = (experts.count, a.hidden, a.intermediate)
            parts["ffn_down_exps.scale"] = (experts.count,)
        found |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    return found
