"""The keys that tell stock llama.cpp what is in the blocks of a model: experts and their router, states, latents, heads
of two sizes."""

from typing import Any

from gguf import GGUFValueType

from sparsepack.errors import PackingError
from sparsepack.formats.containers.gguf import KeyValue, f32, u32
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Attention, DeltaNet, Mamba
from sparsepack.models.checkpoint.gguf_blocks import SIGMOID, SOFTMAX
from sparsepack.models.llama_cpp import LlamaCpp

INSTEAD = "pack as zigzag-q4_k, which sparsepack itself runs"
WITHOUT_QUERY_LATENTS = (26, 27)
"""In DeepSeek models of so many layers llama.cpp knows no latent of queries; in one of 48 with Llama 3's vocabulary,
neither."""


def block_keys(architecture: Architecture, config: Any, runs: LlamaCpp) -> dict[str, KeyValue]:
    """These keys, without the architecture. Raises `PackingError` where llama.cpp would compute something else."""
    kind = runs.name(architecture.experts is not None)
    keys: dict[str, KeyValue] = {}
    has_states = architecture.row.mamba is None or "ssm_in" in runs.parts
    if architecture.row.state is not None and has_states != bool(architecture.state_layers):
        found = "attention in every block" if has_states else "blocks with a state"
        does = "has states in some" if has_states else "knows none here"
        raise PackingError(f"{found}: in {kind} models llama.cpp {does}; {INSTEAD}")
    if architecture.experts is not None:
        keys |= _expert_keys(architecture, config, runs, kind)
    if architecture.delta_net is not None:
        keys |= _delta_keys(architecture, architecture.delta_net, kind)
    if architecture.conv_layers:
        keys["shortconv.l_cache"] = u32(architecture.short_conv)
    if architecture.mamba is not None:
        keys |= _mamba_keys(architecture, architecture.mamba, kind)
    if architecture.latent is not None:
        keys |= _latent_keys(architecture, kind)
    elif architecture.delta_net is None:
        of_blocks = [block.mixer.kv_heads if isinstance(block.mixer, Attention) else 0 for block in architecture.blocks]
        if len(set(of_blocks)) > 1:
            keys["attention.head_count_kv"] = _numbers(of_blocks)
    if runs.window_pattern:
        keys |= _window_keys(architecture)
    return keys


def _numbers(of_blocks: list[int]) -> KeyValue:
    return of_blocks, GGUFValueType.ARRAY, GGUFValueType.INT32


def _expert_keys(architecture: Architecture, config: Any, runs: LlamaCpp, kind: str) -> dict[str, KeyValue]:
    numbers, of_family = architecture.experts, architecture.row.experts
    assert numbers is not None
    assert of_family is not None
    if "norm" not in runs.router and numbers.normalised != runs.normalised:
        does = "makes the weights of the chosen experts add up to one"
        raise PackingError(
            f"{of_family.normalised} {str(numbers.normalised).lower()}: llama.cpp "
            f"{'always' if runs.normalised else 'never'} {does} in {kind} models; {INSTEAD}"
        )
    if architecture.row.qk_norm == "rows" and architecture.heads != architecture.kv_heads:
        raise PackingError(
            f"{architecture.heads} heads, {architecture.kv_heads} of keys: llama.cpp norms as many of them in {kind} "
            f"models; {INSTEAD}"
        )
    keys = {
        "expert_count": u32(numbers.count),
        "expert_used_count": u32(numbers.used),
        "expert_feed_forward_length": u32(architecture.intermediate),
        "feed_forward_length": u32(getattr(config, "intermediate_size", architecture.intermediate)),
    }
    if of_family.shared is not None and of_family.shared.count:
        keys["expert_shared_count"] = u32(numbers.shared)
    elif numbers.shared:
        keys["expert_shared_feed_forward_length"] = u32(numbers.shared * architecture.intermediate)
    if architecture.row.dense_mlps is not None and not architecture.mlp_layers:
        keys["leading_dense_block_count"] = u32(len(architecture.dense_layers))
        if architecture.dense_layers != tuple(range(len(architecture.dense_layers))):
            raise PackingError(
                f"dense MLPs in blocks {', '.join(map(str, architecture.dense_layers))}: in {kind} models llama.cpp "
                f"has them in the first ones; {INSTEAD}"
            )
    return keys | _router_keys(architecture, runs, kind)


def _router_keys(architecture: Architecture, runs: LlamaCpp, kind: str) -> dict[str, KeyValue]:
    assert architecture.experts is not None
    router = architecture.experts.router
    if router is None:
        return {}
    if router.scale != 1.0 and "scale" not in runs.router:
        raise PackingError(f"weights of experts times {router.scale:g}: llama.cpp takes 1 in {kind} models; {INSTEAD}")
    keys = {"expert_gating_func": u32(SIGMOID if router.sigmoid else SOFTMAX)}
    if "norm" in runs.router:
        keys["expert_weights_norm"] = architecture.experts.normalised, GGUFValueType.BOOL, None
    if "scale" in runs.router:
        keys["expert_weights_scale"] = f32(router.scale)
    if router.groups_used < router.groups:
        if not router.sigmoid:
            raise PackingError(
                f"{router.groups} groups of experts that compete by the best of each: llama.cpp takes the two best; "
                f"{INSTEAD}"
            )
        keys |= {"expert_group_count": u32(router.groups), "expert_group_used_count": u32(router.groups_used)}
    return keys


def _delta_keys(architecture: Architecture, numbers: DeltaNet, kind: str) -> dict[str, KeyValue]:
    """The keys of blocks that have a delta net, and of the others how many there are."""
    layers = range(architecture.layers)
    if numbers.key_dim != numbers.value_dim:
        raise PackingError(
            f"heads of {numbers.key_dim} and {numbers.value_dim} channels in a delta net: in {kind} models llama.cpp "
            f"has one number for both; {INSTEAD}"
        )
    every = architecture.attention_layers[0] + 1
    if architecture.attention_layers != tuple(layers[every - 1 :: every]):
        raise PackingError(
            f"attention in layers {', '.join(map(str, architecture.attention_layers))}: in {kind} models llama.cpp has "
            f"it in one layer of so many; {INSTEAD}"
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
        "rope.dimension_sections": _numbers([*sections, 0]),
    }


def _mamba_keys(architecture: Architecture, numbers: Mamba, kind: str) -> dict[str, KeyValue]:
    """The keys of blocks that are a state-space model, and which blocks are an MLP alone."""
    if architecture.experts is not None and architecture.dense_layers:
        raise PackingError(
            f"dense MLPs in blocks {', '.join(map(str, architecture.dense_layers))}: in {kind} models llama.cpp takes "
            f"every MLP for a mixture; {INSTEAD}"
        )
    widths = [block.mlp.width if block.mlp is not None else 0 for block in architecture.blocks]
    return {
        "ssm.conv_kernel": u32(numbers.taps),
        "ssm.state_size": u32(numbers.state),
        "ssm.group_count": u32(numbers.groups),
        "ssm.time_step_rank": u32(numbers.heads),
        "ssm.inner_size": u32(numbers.inner),
        "feed_forward_length": _numbers(widths),
        "attention.layer_norm_epsilon": f32(architecture.norm_eps),
    }


def _latent_keys(architecture: Architecture, kind: str) -> dict[str, KeyValue]:
    """The keys of attention by latents, whose cache llama.cpp takes for one head of keys and values."""
    latent, layers = architecture.latent, architecture.layers
    assert latent is not None
    without = layers in WITHOUT_QUERY_LATENTS or (layers == 48 and architecture.vocabulary == 128256)
    if latent.q_rank and without:
        raise PackingError(f"a latent of queries: in {kind} models of {layers} layers llama.cpp knows none; {INSTEAD}")
    return {
        "attention.head_count_kv": u32(1),
        "attention.q_lora_rank": u32(latent.q_rank),
        "attention.kv_lora_rank": u32(latent.kv_rank),
        "attention.key_length": u32(latent.kv_rank + latent.turning),
        "attention.value_length": u32(latent.kv_rank),
        "attention.key_length_mla": u32(latent.query),
        "attention.value_length_mla": u32(latent.value),
    }


def _window_keys(architecture: Architecture) -> dict[str, KeyValue]:
    """The keys of layers with a window, and of the others where their heads are of another size."""
    windows = architecture.sliding_windows
    of_all = architecture.global_heads[1] if architecture.global_heads else architecture.head_dim
    return {
        "attention.sliding_window": u32(max(windows) or architecture.context),
        "attention.sliding_window_pattern": (
            [bool(window) for window in windows],
            GGUFValueType.ARRAY,
            GGUFValueType.BOOL,
        ),
        "attention.key_length": u32(of_all),
        "attention.value_length": u32(of_all),
        "attention.key_length_swa": u32(architecture.head_dim),
        "attention.value_length_swa": u32(architecture.head_dim),
        "rope.dimension_count_swa": u32(2 * len(architecture.local_inv_freq or architecture.inv_freq)),
        "embedding_length_per_layer_input": u32(0),
    }
