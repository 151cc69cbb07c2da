"""The numbers of a model that an engine needs, taken from the stock configuration when a model is packed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from sparsepack.errors import CheckpointError
from sparsepack.models.blocks import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Attention,
    Block,
    ExpertNumbers,
    Heads,
    LongTexts,
    Mlp,
    Multipliers,
    RotaryChannels,
)
from sparsepack.models.families import FAMILIES, taken_by
from sparsepack.models.family import MLP_SITES
from sparsepack.models.own_code import STOCK_ALONE

MOST_EXPERTS = 1 << 14
_LARGEST = 3.4e38  # float32
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
_BY_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings of these types turn long texts by other frequencies than short ones."""
_PLAIN_ROUTER = MappingProxyType({"scoring_func": "softmax", "n_group": 1, "routed_scaling_factor": 1.0})
"""What other routers call what makes them so, and what it is in those that are known here. The stock models of these
do not look at it."""


@dataclass(frozen=True)
class Architecture:
    """One decoder, in numbers.

    heads, kv_heads, head_dim -- attention; grouped queries where heads > kv_heads
    activation                -- of the gate, one of ACTIVATIONS
    inv_freq                  -- rotary frequencies [n / 2] of the first n channels of a head, the others do not turn;
                                 channels i and i + n / 2 turn together
    rotary_scale              -- factor on cos and sin (YaRN), 1 otherwise
    sliding_windows           -- per layer, tokens that a query sees at most (0: all)
    qk_norm                   -- whether q and k are RMS-normalised per head before the rotary embedding
    context                   -- positions the model was made for
    bos, eos                  -- token ids; bos None where the model has none
    long_texts                -- how texts turn that are longer than most; None: as others
    local_inv_freq            -- rotary frequencies of layers with a sliding window; empty: those of all layers
    attention_scale           -- what products of queries and keys are multiplied by; 0: 1 / sqrt(head_dim)
    attention_cap, logit_cap  -- a score or logit x becomes cap tanh(x / cap); 0: it stays
    embedding_scale           -- what rows of the embedding are multiplied by
    experts                   -- of each MLP, all blocks alike; None: MLPs are dense
    ropeless                  -- numbers of layers that do not turn queries and keys
    logit_scale               -- what logits are multiplied by
    query_growth              -- (b, n): a query at position p is multiplied by 1 + b log(1 + floor(p / n)); empty: it
                                 is not

    Of a model that multiplies by r what blocks add, `embedding_scale` and `norm_eps` are of a stream that is divided by
    r, which engines have: embedding_multiplier / r and rms_norm_eps / r^2. Every norm of such a stream is the same.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    activation: str
    inv_freq: tuple[float, ...]
    rotary_scale: float
    sliding_windows: tuple[int, ...]
    qk_norm: bool
    tied: bool
    context: int
    bos: int | None
    eos: tuple[int, ...]
    long_texts: LongTexts | None = None
    local_inv_freq: tuple[float, ...] = ()
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    experts: ExpertNumbers | None = None
    ropeless: tuple[int, ...] = ()
    logit_scale: float = 1.0
    query_growth: tuple[float, ...] = ()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The decoder blocks, in order of execution."""
        family = FAMILIES[self.model_type]
        local = bool(self.local_inv_freq)
        mlp = Mlp(self.intermediate, self.activation, family.gated, self.experts)
        return tuple(
            Block(
                Attention(
                    rope=len(self.rotary_tables) - 1 if layer in self.ropeless else int(local and window > 0),
                    window=window,
                    qk_norm=family.qk_norm,
                ),
                mlp,
                "attn_norm" in family.norms,
                "attn_post_norm" in family.norms,
            )
            for layer, window in enumerate(self.sliding_windows)
        )

    @property
    def rotary_tables(self) -> list[tuple[tuple[float, ...], float]]:
        """Frequencies and scale of each table by which blocks turn. Where some blocks do not turn, they have the last,
        whose frequencies are zeros."""
        tables = [(self.inv_freq, self.rotary_scale)]
        if self.local_inv_freq:
            tables.append((self.local_inv_freq, 1.0))
        if self.ropeless:
            tables.append(((0.0,) * len(self.inv_freq), 1.0))
        return tables

    @property
    def heads_and_rope(self) -> Heads:
        """The attention heads, as far as stored channels depend on them."""
        rotary = RotaryChannels(FAMILIES[self.model_type].rotary, 2 * len(self.inv_freq))
        return Heads(self.heads, self.kv_heads, self.head_dim, rotary)

    @property
    def named_context(self) -> int:
        """The `max_position_embeddings` of the configuration, which dynamic rotary embeddings go beyond."""
        long = self.long_texts
        return self.context if long is None or long.turns_all else long.tokens

    def frequencies(self, length: int) -> torch.Tensor:
        """The rotary frequencies of a text of `length` tokens: float32 [n / 2]."""
        long, usual = self.long_texts, torch.tensor(self.inv_freq)
        if long is None or length <= long.tokens:
            return usual
        if long.turns_all:
            return torch.tensor(long.inv_freq)
        dims = 2 * len(usual)
        growth = torch.tensor(long.factor) * length / long.tokens - (long.factor - 1)
        return 1.0 / ((long.base * growth ** (dims / (dims - 2))) ** (torch.arange(0, dims, 2).float() / dims))

    def to_json(self) -> dict[str, Any]:
        """The architecture as JSON-able values, without what only some models have."""
        values = asdict(self)
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if usual[name] != value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Architecture":
        """The inverse of `to_json`; raises TypeError or KeyError where a field is missing or unknown."""
        lists: dict[str, Any] = {name: tuple(value[name]) for name in ("inv_freq", "sliding_windows", "eos")}
        for name in ("local_inv_freq", "ropeless", "query_growth"):
            lists[name] = tuple(value.get(name, ()))
        if (long := value.get("long_texts")) is not None:
            lists["long_texts"] = LongTexts(**{**long, "inv_freq": tuple(long["inv_freq"])})
        experts = value.get("experts")
        if experts is not None and not isinstance(experts, dict):
            raise TypeError(f"experts are {str(experts)[:60]}, expected their numbers")
        if experts is not None:
            lists["experts"] = ExpertNumbers(**experts)
        return cls(**{**value, **lists})


def architecture_of(config: Any, bos: int | None, more_eos: Sequence[int] = ()) -> Architecture:
    """Read a stock configuration; `more_eos` are end tokens named elsewhere.

    Raises `CheckpointError` for what an engine here cannot run.
    """
    family = FAMILIES[config.model_type]
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
    activation = family.setting(config, "hidden_act")
    if activation not in (able := ACTIVATIONS if family.gated else PLAIN_ACTIVATIONS):
        raise CheckpointError(f"{config.model_type}: activation {activation!r}; expected {', '.join(able)}")
    if getattr(config, "use_bidirectional_attention", None):
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
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=family.setting(config, "intermediate_size"),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        vocabulary=config.vocab_size,
        norm_eps=config.rms_norm_eps / by.residual**2,
        activation=activation,
        inv_freq=tuple(inv_freq.tolist()),
        rotary_scale=scale,
        sliding_windows=sliding_windows(config),
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
    )


def check_numbers(architecture: Architecture) -> None:
    """Raise ValueError where a number could not be a model's."""
    sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "context")
    for name in sizes:
        value = getattr(architecture, name)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"{name} {repr(value)[:60]}, expected a positive integer below 2**31")
    a, long = architecture, architecture.long_texts
    real: tuple[float, ...] = (
        a.norm_eps,
        a.rotary_scale,
        *a.inv_freq,
        *a.local_inv_freq,
        a.embedding_scale,
        a.logit_scale,
        *a.query_growth,
    )
    least_0: tuple[float, ...] = (a.attention_scale, a.attention_cap, a.logit_cap)
    if long is not None:
        real, least_0 = (*real, *long.inv_freq), (*least_0, long.base, long.factor, long.tokens - 1)
    if not all(type(value) in (int, float) and -_LARGEST <= value <= _LARGEST for value in (*real, *least_0)):
        raise ValueError("norm_eps, rotary_scale, inv_freq, long_texts, caps or scales are something else than numbers")
    if len(a.query_growth) not in (0, 2) or min(a.query_growth, default=1) <= 0:
        raise ValueError(f"query_growth is {str(a.query_growth)[:60]}, expected none or two numbers above 0")
    if min(least_0) < 0:
        raise ValueError("attention_scale, attention_cap, logit_cap or long_texts hold numbers below 0")
    more = (a.local_inv_freq, () if long is None else long.inv_freq)
    if not {len(of) for of in more} <= {0, len(a.inv_freq)}:
        raise ValueError(f"{len(more[0])} local, {len(more[1])} long frequencies, expected {len(a.inv_freq)} or none")
    if not all(
        type(value) is int and 0 <= value < 2**31 for value in (*architecture.sliding_windows, *architecture.eos)
    ):
        raise ValueError("sliding_windows or eos hold something else than integers from 0 to below 2**31")
    bos = architecture.bos
    if bos is not None and not (type(bos) is int and 0 <= bos < architecture.vocabulary):
        raise ValueError(f"bos {str(bos)[:60]}, expected a token of the {architecture.vocabulary}")
    if type(architecture.qk_norm) is not bool or type(architecture.tied) is not bool:
        raise ValueError("qk_norm or tied is neither true nor false")
    if not isinstance(architecture.model_type, str) or architecture.model_type not in taken_by("pack"):
        known = ", ".join(taken_by("pack"))
        raise ValueError(f"model type {str(architecture.model_type)[:60]!r}, expected one of {known}")
    able = ACTIVATIONS if FAMILIES[architecture.model_type].gated else PLAIN_ACTIVATIONS
    if architecture.activation not in able:
        raise ValueError(f"activation {str(architecture.activation)[:60]!r}, expected one of {', '.join(able)}")
    if not all(type(layer) is int and 0 <= layer < architecture.layers for layer in architecture.ropeless):
        raise ValueError(f"ropeless holds something else than numbers of the {architecture.layers} layers")
    _check_experts(architecture)
    windows = len(architecture.sliding_windows)
    if windows != architecture.layers:
        raise ValueError(f"{architecture.layers} layers, {windows} sliding windows")
    if architecture.heads % architecture.kv_heads or not 0 < 2 * len(architecture.inv_freq) <= architecture.head_dim:
        raise ValueError(
            f"{architecture.heads} heads, {architecture.kv_heads} of keys, {len(architecture.inv_freq)} frequencies "
            f"for heads of {architecture.head_dim}"
        )


def _check_experts(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of experts could not be a model's."""
    experts, of_family = architecture.experts, FAMILIES[architecture.model_type].experts
    if (experts is None) != (of_family is None):
        raise ValueError(f"experts {str(experts)[:60]} in a {architecture.model_type} model")
    if experts is None or of_family is None:
        return
    if type(experts.count) is not int or not 1 <= experts.count <= MOST_EXPERTS:
        raise ValueError(f"{str(experts.count)[:60]} experts, expected 1 to {MOST_EXPERTS}")
    if type(experts.used) is not int or not 1 <= experts.used <= experts.count:
        raise ValueError(f"{str(experts.used)[:60]} experts for a token, expected 1 to {experts.count}")
    shared = of_family.shared is not None
    if type(experts.shared) is not int or not shared <= experts.shared <= shared * MOST_EXPERTS:
        raise ValueError(f"{str(experts.shared)[:60]} shared experts in a {architecture.model_type} model")
    if type(experts.normalised) is not bool:
        raise ValueError("experts.normalised is neither true nor false")


def expert_numbers(config: Any) -> ExpertNumbers | None:
    """How a stock configuration's MLPs choose among experts; None where they are dense.

    Raises `CheckpointError` where some blocks have experts and others none, where the router is of another kind, or the
    numbers are none.
    """
    experts = FAMILIES[config.model_type].experts
    if experts is None:
        return None
    for name, without in experts.dense.items():
        if (value := getattr(config, name, without)) != without:
            raise CheckpointError(
                f"{config.model_type}: {name} {str(value)[:60]}: some blocks have a dense MLP in place of experts; "
                "expected experts in every block"
            )
    for name, plain in _PLAIN_ROUTER.items():
        if (value := getattr(config, name, None)) not in (None, plain):
            raise CheckpointError(
                f"{config.model_type}: {name} {str(value)[:60]}: a router of another kind; expected the softmax of its "
                "logits over all experts together"
            )
    count, used = getattr(config, experts.count), config.num_experts_per_tok
    for name, value, most in ((experts.count, count, MOST_EXPERTS), ("num_experts_per_tok", used, count)):
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(
                f"{config.model_type}: {name} is {str(value)[:60]}; expected a whole number from 1 to {most}"
            )
    normalised = bool(getattr(config, experts.normalised)) if experts.normalised else True
    return ExpertNumbers(count, used, normalised, _shared_parts(config))


def _shared_parts(config: Any) -> int:
    """Count the experts that the shared one is as wide as. Raises `CheckpointError` where that is no whole number."""
    family = FAMILIES[config.model_type]
    if family.experts is None or family.experts.shared is None:
        return 0
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
    family, experts = FAMILIES[config.model_type], expert_numbers(config)
    names = (f"{family.block(layer)}.{family.weight(projection)}" for projection in family.projections[site])
    weights = sum(math.prod(shapes[name]) for name in names)
    return weights if experts is None or site not in MLP_SITES else weights // experts.stored * experts.of_token


def head_dim(config: Any) -> int:
    """Channels of a head: what the configuration says, which need not be the width divided by the heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
    return FAMILIES[config.model_type].multipliers(config)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Values kept within a bound: cap tanh(x / cap); 0: as they are."""
    return (x / cap).tanh() * cap if cap else x


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

    from sparsepack.models.stock.skeleton import single_layer

    with torch.device("meta"):
        rotary_class = type(AutoModel.from_config(single_layer(config), **STOCK_ALONE).rotary_emb)
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
    return (window if FAMILIES[config.model_type].slides else 0,) * int(config.num_hidden_layers)
