"""What a Hugging Face configuration says of a model: the architecture that engines run, and the numbers it is made
of."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import MOST_EXPERTS, activations_of
from sparsepack.models.blocks import (
    DeltaNet,
    ExpertNumbers,
    Heads,
    Latent,
    LongTexts,
    Mamba,
    Multipliers,
    RotaryChannels,
    Router,
)
from sparsepack.models.checkpoint.config_files import STOCK_ALONE
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import MLP_SITES, config_value
from sparsepack.models.found import FoundFamily, family_of_config
from sparsepack.models.parts import Experts

_FIXED_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
_BY_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings of these types turn long texts by other frequencies than short ones."""
_PLAIN_ROUTER = MappingProxyType({"scoring_func": "softmax", "n_group": 1, "routed_scaling_factor": 1.0})
"""What other routers call what makes them so, and what it is in those that are known here. The stock models of these
do not look at it."""


def architecture_of(config: Any, bos: int | None, more_eos: Sequence[int] = ()) -> Architecture:
    """Read a stock configuration; `more_eos` are end tokens named elsewhere.

    Raises `CheckpointError` for what an engine here cannot run.
    """
    family = FAMILIES[config.model_type].row(config)
    rope, local = rotary_settings(config)
    kind, known = rope.get("rope_type", "default"), (*_FIXED_ROTARY, *_BY_LENGTH)
    if kind not in known:
        raise CheckpointError(
            f"{config.model_type}: rotary embedding of type {str(kind)[:60]!r}; expected one of {', '.join(known)}"
        )
    if local and (local.get("rope_type", "default") != "default" or kind in _BY_LENGTH):
        raise CheckpointError(
            f"{config.model_type}: rotary embeddings of types {kind!r} and {str(local.get('rope_type'))[:60]!r} in one "
            "model; expected plain ones in layers with a sliding window, and none that follow a text's length"
        )
    activation = family.activation or family.setting(config, "hidden_act")
    if activation not in (able := activations_of(family)):
        raise CheckpointError(f"{config.model_type}: activation {activation!r}; expected {', '.join(able)}")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise CheckpointError(f"{config.model_type}: tokens see later ones; expected a model that writes text")
    if family.clips and (clip := getattr(config, family.clips, None)) is not None:
        raise CheckpointError(
            f"{config.model_type}: {family.clips} {str(clip)[:60]}: queries, keys and values are clipped, which no "
            "engine does; expected a model without that"
        )
    (inv_freq, scale), *others = _rotaries(config)
    long_texts = _long_texts(config, kind, rope)
    made_for = config.max_position_embeddings
    if long_texts is not None and not long_texts.turns_all:
        made_for = int(made_for * long_texts.factor)
    by, growth = family.multipliers(config), rope.get("llama_4_scaling_beta")
    turns = getattr(config, family.rope_layers, None) if family.rope_layers else None
    if family.rope_field and getattr(config, family.rope_field) != "rope":
        turns = (False,) * config.num_hidden_layers
    windows = sliding_windows(config)
    if family.rope_only_in_windows or (family.rope_in_windows and any(windows)):
        turns = [window > 0 for window in windows]
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=family.setting(config, "intermediate_size"),
        heads=config.num_attention_heads,
        kv_heads=config_value(config, "num_key_value_heads"),
        head_dim=head_dim(config),
        vocabulary=config.vocab_size,
        norm_eps=(family.norm_eps or family.setting(config, "rms_norm_eps") or config.rms_norm_eps) / by.residual**2,
        activation=activation,
        inv_freq=tuple(inv_freq.tolist()),
        rotary_scale=scale,
        sliding_windows=windows,
        qk_norm=family.qk_norm == "heads",
        tied=bool(config.tie_word_embeddings),
        context=made_for,
        bos=bos,
        eos=tuple(dict.fromkeys([*token_ids(getattr(config, "eos_token_id", None)), *more_eos])),
        long_texts=long_texts,
        local_inv_freq=tuple(others[0][0].tolist()) if others else (),
        attention_scale=0.0 if by.attention == head_dim(config) ** -0.5 else by.attention,
        attention_cap=by.attention_cap,
        logit_cap=by.logit_cap,
        embedding_scale=by.embedding / by.residual,
        experts=expert_numbers(config),
        ropeless=() if turns is None else tuple(layer for layer, turn in enumerate(turns) if not turn),
        logit_scale=by.logits,
        query_growth=(float(growth), float(rope["original_max_position_embeddings"])) if growth else (),
        delta_net=delta_net(config),
        delta_layers=delta_layers(config),
        short_conv=getattr(config, family.short_conv.taps) if family.short_conv and state_layers(config) else 0,
        conv_layers=state_layers(config) if family.short_conv else (),
        mamba=mamba(config),
        mamba_layers=state_layers(config) if family.mamba else (),
        mamba_eps=float(config.rms_norm_eps) if mamba(config) is not None and by.residual != 1 else 0.0,
        mlp_layers=mlp_layers(config),
        gated_attention=family.gated_attention,
        global_heads=_global_heads(config, windows),
        k_eq_v=bool(family.k_eq_v and getattr(config, family.k_eq_v)),
        latent=latent(config),
        dense_layers=family_of_config(config).dense_layers,
        dense_intermediate=dense_width(config),
        kv_sources=kv_sources(config),
        shared_intermediate=_shared_width(config),
        per_layer=per_layer_width(config),
    )


def latent(config: Any) -> Latent | None:
    """The latents of attention of a stock configuration's model; None where it has none."""
    if not FAMILIES[config.model_type].latent:
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(config.q_lora_rank or 0, *(getattr(config, name) for name in names))


def kv_sources(config: Any) -> tuple[int, ...]:
    """The layers whose keys and values the last ones of a stock configuration's model read; empty: all have their
    own."""
    shared = FAMILIES[config.model_type].row(config).shared_kv
    return () if shared is None else shared.sources(config)


def _shared_width(config: Any) -> int:
    """How wide the MLPs of these are; 0: as those of the others."""
    family = FAMILIES[config.model_type].row(config)
    wide = family.shared_kv is not None and kv_sources(config) and getattr(config, family.shared_kv.wide, False)
    return 2 * int(family.setting(config, "intermediate_size")) if wide else 0


def per_layer_width(config: Any) -> int:
    """Channels of an input that each token has for each layer; 0: it has none. Raises `CheckpointError` where some
    tokens have none."""
    names = FAMILIES[config.model_type].row(config).per_layer
    width = 0 if names is None else names.of(config)
    if names is not None and width and (rows := getattr(config, names.vocabulary)) != config.vocab_size:
        raise CheckpointError(
            f"{config.model_type}: {names.vocabulary} is {str(rows)[:60]}; expected the {config.vocab_size} of "
            "vocab_size"
        )
    return width


def dense_width(config: Any) -> int:
    """How wide the MLPs are of blocks without experts, in a model that has others; 0: there are none."""
    family = family_of_config(config)
    return getattr(config, family.dense_mlps.width) if family.dense_mlps is not None and family.dense_layers else 0


def _global_heads(config: Any, windows: Sequence[int]) -> tuple[int, ...]:
    """Heads of keys and channels of a head in layers without a window; empty: as in the others."""
    if not FAMILIES[config.model_type].global_heads or all(windows):
        return ()
    of_layer = config.per_layer_config[windows.index(0)]
    found = (int(of_layer.num_key_value_heads), int(of_layer.head_dim))
    return () if found == (config_value(config, "num_key_value_heads"), head_dim(config)) else found


def attention_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers of a stock configuration that have attention with heads of the usual size."""
    if family_of_config(config).latent:
        return ()
    windows = sliding_windows(config)
    apart = FAMILIES[config.model_type].global_heads if config.model_type in FAMILIES else False
    others = {
        *state_layers(config),
        *mlp_layers(config),
        *(n for n, window in enumerate(windows) if apart and not window),
    }
    return tuple(layer for layer in range(config.num_hidden_layers) if layer not in others)


def state_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers of a stock configuration that keep a state in place of keys and values."""
    names = family_of_config(config).state
    kinds = () if names is None else config.layer_types
    return tuple(layer for layer, kind in enumerate(kinds) if names is not None and kind == names.kind)


def mlp_layers(config: Any) -> tuple[int, ...]:
    """The numbers of the layers that are an MLP alone."""
    kinds = family_of_config(config).mlp_kinds
    return tuple(layer for layer, kind in enumerate(config.layer_types) if kind in kinds) if kinds else ()


def mamba(config: Any) -> Mamba | None:
    """The numbers of the state-space models of a stock configuration's model; None where no layer has one."""
    names = FAMILIES[config.model_type].mamba
    if names is None or not state_layers(config):
        return None
    heads, head_dim, groups, state, taps = (getattr(config, field) for field in names.fields)
    return Mamba(heads, head_dim, groups, state, taps, groups if names.norms else 1)


def delta_layers(config: Any) -> tuple[int, ...]:
    """The numbers of those that have a gated delta net."""
    return () if family_of_config(config).delta_net is None else state_layers(config)


def delta_net(config: Any) -> DeltaNet | None:
    """The numbers of these; None where no layer has one."""
    names = FAMILIES[config.model_type].delta_net
    if names is None or not delta_layers(config):
        return None
    return DeltaNet(*(getattr(config, field) for field in names.fields))


def expert_numbers(config: Any, layer: int | None = None) -> ExpertNumbers | None:
    """How the MLP of a block of a stock configuration chooses among experts; None where it is dense.

    layer -- None: of the blocks that have experts

    Raises `CheckpointError` where some blocks have experts and others none, where the router is of another kind, or the
    numbers are none.
    """
    family = family_of_config(config)
    if isinstance(family, FoundFamily):
        return family.found[layer or 0].numbers
    experts = family.experts if layer is None else family.experts_of(layer)
    if experts is None:
        return None
    for name, without in experts.dense.items():
        if (value := getattr(config, name, without)) != without:
            raise CheckpointError(
                f"{config.model_type}: {name} {str(value)[:60]}: some blocks have a dense MLP in place of experts; "
                "expected experts in every block"
            )
    for name, plain in {} if experts.routing is not None else _PLAIN_ROUTER.items():
        if (value := getattr(config, name, None)) not in (None, plain):
            raise CheckpointError(
                f"{config.model_type}: {name} {str(value)[:60]}: a router of another kind; expected the softmax of its "
                "logits over all experts together"
            )
    count, used = getattr(config, experts.count), getattr(config, experts.used)
    for name, value, most in ((experts.count, count, MOST_EXPERTS), (experts.used, used, count)):
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(
                f"{config.model_type}: {name} is {str(value)[:60]}; expected a whole number from 1 to {most}"
            )
    always = experts.routing is None or experts.routing.sigmoid
    normalised = bool(getattr(config, experts.normalised)) if experts.normalised else always
    return ExpertNumbers(count, used, normalised, _shared_parts(config), _router(config, experts, count))


def _router(config: Any, experts: Experts, count: int) -> Router | None:
    """How experts are chosen where it is not by the softmax of all logits. Raises `CheckpointError` where the numbers
    are none."""
    names = experts.routing
    if names is None:
        return None
    groups, used = (getattr(config, name, None) or 1 for name in (names.groups, names.groups_used))
    if names.method and getattr(config, names.method) == "greedy":
        groups, used = 1, 1
    elif names.method and getattr(config, names.method) != "group_limited_greedy":
        raise CheckpointError(
            f"{config.model_type}: {names.method} {str(getattr(config, names.method))[:60]!r}; expected 'greedy' or "
            "'group_limited_greedy'"
        )
    if type(groups) is not int or type(used) is not int or not 1 <= used <= groups or count % groups:
        raise CheckpointError(
            f"{config.model_type}: {names.groups_used} {str(used)[:60]} of {names.groups} {str(groups)[:60]} groups of "
            f"{count} experts; expected groups of as many experts each"
        )
    return Router(names.sigmoid, groups, used, float(getattr(config, names.scale)))


def _shared_parts(config: Any) -> int:
    """Count the experts that the shared one is as wide as. Raises `CheckpointError` where that is no whole number."""
    family = FAMILIES[config.model_type].row(config)
    if family.experts is None or family.experts.shared is None:
        return 0
    if count := family.experts.shared.count:
        parts = getattr(config, count)
        if type(parts) is not int or not 1 <= parts <= MOST_EXPERTS:
            raise CheckpointError(
                f"{config.model_type}: {count} is {str(parts)[:60]}; expected a whole number from 1 to {MOST_EXPERTS}"
            )
        return parts
    name, width = family.experts.shared.width, family.setting(config, "intermediate_size")
    value = getattr(config, name)
    if type(width) is not int or type(value) is not int or width < 1 or not 1 <= value // width <= MOST_EXPERTS:
        raise CheckpointError(
            f"{config.model_type}: {name} is {str(value)[:60]}, experts are {str(width)[:60]} wide; expected 1 to "
            f"{MOST_EXPERTS} times as much"
        )
    if value % width:
        raise CheckpointError(
            f"{config.model_type}: {name} is {value}, which is no multiple of the {width} of the other experts; "
            "expected a shared expert that is so many of them side by side"
        )
    return value // width


def token_weights(config: Any, shapes: Mapping[str, tuple[int, ...]], layer: int, site: str) -> int:
    """How many weights of a site a token has to do with, were nothing skipped: all, but of experts those it has.

    shapes -- of the tensors of a stock configuration's model, by their names
    """
    family, experts = family_of_config(config), expert_numbers(config, layer)
    projections = family.at(config, layer).projections_of(layer)[site]
    names = [f"{family.block(layer)}.{family.weight(projection)}" for projection in projections]
    if experts is not None and not family.has_row:  # an expert that all tokens have is none of them
        each = ((math.prod(shapes[name]), len(shapes[name]) == 3) for name in names)
        return sum(size // experts.count * experts.used if of_experts else size for size, of_experts in each)
    weights = sum(math.prod(shapes[name]) for name in names)
    return weights if experts is None or site not in MLP_SITES else weights // experts.stored * experts.of_token


def head_dim(config: Any) -> int:
    """Channels of a head as it is cached: what the configuration says, which need not be the width divided by the
    heads."""
    if (latents := latent(config) if config.model_type in FAMILIES else None) is not None:
        return latents.head_dim
    return int(config_value(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def rotary_dims(config: Any) -> int:
    """How many channels of a head are turned by the rotary embedding, of the first ones."""
    return 2 * len(_rotaries(config)[0][0])


def rotary_settings(config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a stock configuration says of its rotary embedding, and of that of layers with a sliding window where they
    have one of their own; empty where it says nothing."""
    rope = getattr(config, "rope_parameters", None) or {}
    if not {"full_attention", "sliding_attention"} & rope.keys():
        return rope, {}
    settings = [rope.get(kind) or {} for kind in _kinds(config)]
    return settings[0], settings[1] if len(settings) > 1 else {}


def by_length(rotary: Mapping[str, Any]) -> bool:
    """Whether frequencies depend on how long a text is, by what `rotary_settings` gives."""
    return rotary.get("rope_type") in _BY_LENGTH


def _kinds(config: Any) -> list[str]:
    """The kinds of layers that a model has, those that see everything first."""
    return sorted(set(config.layer_types))


def multipliers(config: Any) -> Multipliers:
    """What a stock configuration's model multiplies by."""
    return family_of_config(config).multipliers(config)


def heads_of_config(config: Any) -> Heads:
    """The attention heads of a stock configuration of a family that we know."""
    family = FAMILIES[config.model_type]
    rotary = RotaryChannels(family.rotary, rotary_dims(config) if family.rotary != "none" else 0)
    return Heads(config.num_attention_heads, family.setting(config, "num_key_value_heads"), head_dim(config), rotary)


def token_ids(value: int | list[int] | None) -> list[int]:
    """What configurations write as one id, several or none; a negative one is none, too, as in transformers."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return [token for token in ids if type(token) is not int or token >= 0]


def _rotaries(config: Any) -> list[tuple[torch.Tensor, float]]:
    """The frequencies as the stock rotary module computes them: float32 [n / 2], and its scale; where layers with a
    sliding window have their own, these second."""
    from transformers import AutoModel

    from sparsepack.models.hf_model.model import single_layer

    family = FAMILIES[config.model_type]
    if family.rotary == "none":
        return [(torch.zeros(head_dim(config) // 2), 1.0)]
    single = single_layer(config)
    if family.rope_field:
        setattr(single, family.rope_field, "rope")
    with torch.device("meta"):
        rotary_class = type(getattr(AutoModel.from_config(single, **STOCK_ALONE), family.rotary_module))
    rotary = rotary_class(config)
    prefixes = [""] if hasattr(rotary, "inv_freq") else [f"{kind}_" for kind in _kinds(config)]
    return [
        (getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling")))
        for prefix in prefixes
    ]


def _long_texts(config: Any, kind: str, rope: Mapping[str, Any]) -> LongTexts | None:
    """How transformers turns texts of a stock configuration that are longer than its frequencies are for."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "dynamic":
        return LongTexts(config.max_position_embeddings, (), float(rope["rope_theta"]), float(rope["factor"]))
    if kind != "longrope":
        return None
    tokens = int(rope["original_max_position_embeddings"])
    long = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=tokens + 1)[0]
    return LongTexts(tokens, tuple(long.float().tolist()))


def sliding_windows(config: Any) -> tuple[int, ...]:
    """Per layer, tokens that a query sees at most; 0: all."""
    window: int = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return (window if family_of_config(config).slides else 0,) * int(config.num_hidden_layers)
