"""The numbers of a model that an engine needs."""

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch

from sparsepack.models.blocks import (
    ACTIVATIONS,
    EXPERT_NORMS,
    PLAIN_ACTIVATIONS,
    Attention,
    Block,
    DeltaNet,
    ExpertNumbers,
    Heads,
    Latent,
    LongTexts,
    Mamba,
    Mlp,
    RotaryChannels,
    Router,
    ShortConv,
)
from sparsepack.models.families import FAMILIES, taken_by
from sparsepack.models.family import Family

MOST_EXPERTS = 1 << 14
_LARGEST = 3.4e38  # float32


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
    delta_net                 -- the mixer of `delta_layers`, the numbers of layers without attention; None: all have it
    short_conv                -- positions that the convolutions of `conv_layers` see, the numbers of layers that have
                                 one in place of attention; 0: all have attention, or a delta net
    mamba                     -- the mixer of `mamba_layers`, likewise
    mlp_layers                -- numbers of the layers that are an MLP alone; where there are any, the others have none
    gated_attention           -- whether attention has an output gate
    global_heads              -- kv_heads and head_dim of layers without a window; empty: as in the others
    k_eq_v                    -- whether values of layers without a window are their keys before norm and rotary
                                 embedding
    latent                    -- where queries, keys and values of attention come from; None: from attn_in.
                                 `head_dim` and `kv_heads` are then of what is cached
    dense_layers              -- of a model with experts, the numbers of the layers whose MLPs have none
    dense_intermediate        -- how wide these are

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
    delta_net: DeltaNet | None = None
    delta_layers: tuple[int, ...] = ()
    gated_attention: bool = False
    global_heads: tuple[int, ...] = ()
    k_eq_v: bool = False
    latent: Latent | None = None
    dense_layers: tuple[int, ...] = ()
    dense_intermediate: int = 0
    short_conv: int = 0
    conv_layers: tuple[int, ...] = ()
    mamba: Mamba | None = None
    mamba_layers: tuple[int, ...] = ()
    mlp_layers: tuple[int, ...] = ()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The decoder blocks, in order of execution."""
        family = self.row
        local = bool(self.local_inv_freq)
        biased = family.experts is not None and family.experts.biased
        mlp = Mlp(self.intermediate, self.activation, family.gated, self.experts, biased)

        def mixer(layer: int, window: int) -> Attention | DeltaNet | ShortConv | Mamba | None:
            if layer in self.mlp_layers:
                return None
            if layer in self.conv_layers:
                return ShortConv(self.hidden, self.short_conv)
            if layer in self.mamba_layers:
                return self.mamba
            if self.delta_net is not None and layer in self.delta_layers:
                return self.delta_net
            rope = len(self.rotary_tables) - 1 if layer in self.ropeless else int(local and window > 0)
            kv_heads, head_dim = (not window and self.global_heads) or (self.kv_heads, self.head_dim)
            return Attention(
                kv_heads,
                head_dim,
                rope,
                window,
                bool(family.sinks),
                family.qk_norm,
                self.gated_attention,
                self.k_eq_v and not window,
                family.value_norm,
                self.latent,
            )

        dense = Mlp(self.dense_intermediate, self.activation, family.gated)

        def mlp_of(layer: int) -> Mlp | None:
            if self.mlp_layers and layer not in self.mlp_layers:
                return None
            return dense if layer in self.dense_layers else mlp

        before, after, scaled, centred, of_experts = (
            "attn_norm" in family.norms,
            "attn_post_norm" in family.norms,
            bool(family.layer_scalar),
            family.layer_norms,
            EXPERT_NORMS[0] in family.norms,
        )
        how = before, after, scaled, centred, of_experts
        return tuple(
            Block(mixer(layer, window), mlp_of(layer), *how) for layer, window in enumerate(self.sliding_windows)
        )

    @property
    def row(self) -> Family:
        """The row of the model's family, of a model without experts where that has other names."""
        family = FAMILIES[self.model_type]
        if family.mlp_kinds and self.experts is None:
            return family.dense_block
        return family.mixture if family.mixture is not None and self.experts is not None else family

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep keys and values."""
        others = {*self.state_layers, *self.mlp_layers}
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep a state in their place."""
        return self.delta_layers or self.conv_layers or self.mamba_layers

    def family(self, layer: int) -> Family:
        """The names of a block."""
        family = self.row
        if family.mlp_kinds:
            return family.of_kinds[self._kind(layer)]
        if self.latent is not None and not self.latent.q_rank:
            family = family.plain_queries
        if layer in self.state_layers:
            family = family.state_block
        if layer in self.dense_layers:
            return family.dense_block
        return family.k_eq_v_block if self.k_eq_v and not self.sliding_windows[layer] else family

    def _kind(self, layer: int) -> str:
        """The type of a block, in a family whose blocks are a mixer or an MLP alone."""
        family = FAMILIES[self.model_type]
        if layer not in self.mlp_layers:
            return family.state.kind if family.state is not None and layer in self.mamba_layers else "full_attention"
        assert family.dense_mlps is not None
        dense = self.experts is None or layer in self.dense_layers
        return next(kind for kind in family.mlp_kinds if (kind == family.dense_mlps.kind) is dense)

    @property
    def value_dim(self) -> int:
        """Channels of a head of what attention gives: of inputs of attn_out."""
        return self.head_dim if self.latent is None else self.latent.value

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
        if self.experts is not None and self.experts.router is None:
            del values["experts"]["router"]
        return {name: value for name, value in values.items() if usual[name] != value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Architecture":
        """The inverse of `to_json`; raises TypeError or KeyError where a field is missing or unknown."""
        lists: dict[str, Any] = {name: tuple(value[name]) for name in ("inv_freq", "sliding_windows", "eos")}
        for name in (
            "local_inv_freq",
            "ropeless",
            "query_growth",
            "delta_layers",
            "global_heads",
            "dense_layers",
            "conv_layers",
            "mamba_layers",
            "mlp_layers",
        ):
            lists[name] = tuple(value.get(name, ()))
        if (delta_net := value.get("delta_net")) is not None:
            lists["delta_net"] = DeltaNet(**delta_net)
        if (mamba := value.get("mamba")) is not None:
            lists["mamba"] = Mamba(**mamba)
        if (latent := value.get("latent")) is not None:
            lists["latent"] = Latent(**latent)
        if (long := value.get("long_texts")) is not None:
            lists["long_texts"] = LongTexts(**{**long, "inv_freq": tuple(long["inv_freq"])})
        experts = value.get("experts")
        if experts is not None and not isinstance(experts, dict):
            raise TypeError(f"experts are {str(experts)[:60]}, expected their numbers")
        if experts is not None:
            router = experts.get("router")
            lists["experts"] = ExpertNumbers(**{**experts, "router": None if router is None else Router(**router)})
        return cls(**{**value, **lists})


def activations_of(family: Family) -> tuple[str, ...]:
    """The activations that models of a family may have."""
    if family.activation:
        return (family.activation,)
    return ACTIVATIONS if family.gated else PLAIN_ACTIVATIONS


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
    more = (() if a.global_heads else a.local_inv_freq, () if long is None else long.inv_freq)
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
    able = activations_of(FAMILIES[architecture.model_type])
    if architecture.activation not in able:
        raise ValueError(f"activation {str(architecture.activation)[:60]!r}, expected one of {', '.join(able)}")
    if not all(type(layer) is int and 0 <= layer < architecture.layers for layer in architecture.ropeless):
        raise ValueError(f"ropeless holds something else than numbers of the {architecture.layers} layers")
    _check_experts(architecture)
    _check_delta_net(architecture)
    _check_latent(architecture)
    _check_short_conv(architecture)
    _check_mamba(architecture)
    windows = len(architecture.sliding_windows)
    if windows != architecture.layers:
        raise ValueError(f"{architecture.layers} layers, {windows} sliding windows")
    _check_heads(architecture)


def _check_heads(architecture: Architecture) -> None:
    """Raise ValueError where heads, of all layers or of those without a window, do not go with their numbers."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.k_eq_v) is not bool or (a.k_eq_v and not family.k_eq_v):
        raise ValueError(f"k_eq_v {str(a.k_eq_v)[:60]} in a {a.model_type} model")
    if len(a.global_heads) not in ((0, 2) if family.global_heads else (0,)) or not all(
        type(value) is int and 1 <= value < 2**31 for value in a.global_heads
    ):
        raise ValueError(f"global_heads is {str(a.global_heads)[:60]} in a {a.model_type} model")
    kinds = [(a.kv_heads, a.head_dim, a.local_inv_freq or a.inv_freq)]
    kinds.append((*a.global_heads, a.inv_freq) if len(a.global_heads) == 2 else (a.kv_heads, a.head_dim, a.inv_freq))
    for kv_heads, head_dim, inv_freq in kinds:
        if a.heads % kv_heads or not 0 < 2 * len(inv_freq) <= head_dim:
            raise ValueError(
                f"{a.heads} heads, {kv_heads} of keys, {len(inv_freq)} frequencies for heads of {head_dim}"
            )


def _check_experts(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of experts could not be a model's."""
    experts, of_family = architecture.experts, architecture.row.experts
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
    _check_router(architecture, experts)


def _check_router(a: Architecture, experts: ExpertNumbers) -> None:
    """Raise ValueError where a router, or the blocks without one, could not be a model's."""
    family = a.row
    layers = a.dense_layers
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in layers):
        raise ValueError(f"dense_layers holds something else than numbers of the {a.layers} layers")
    if layers and (family.dense_mlps is None or len(set(layers)) == a.layers):
        raise ValueError(f"{len(layers)} layers with a dense MLP of {a.layers} in a {a.model_type} model")
    if type(a.dense_intermediate) is not int or not bool(layers) <= a.dense_intermediate < 2**31:
        raise ValueError(f"dense_intermediate {str(a.dense_intermediate)[:60]}, expected a positive integer")
    router, names = experts.router, None if family.experts is None else family.experts.routing
    if (router is None) != (names is None):
        raise ValueError(f"experts.router {str(router)[:60]} in a {a.model_type} model")
    if router is None or names is None:
        return
    if router.sigmoid is not names.sigmoid or type(router.scale) not in (int, float) or not 0 < router.scale < 2**20:
        raise ValueError(f"experts.router {str(router)[:80]} in a {a.model_type} model")
    if type(router.groups) is not int or type(router.groups_used) is not int or router.groups < 1:
        raise ValueError("experts.router.groups and groups_used are something else than positive integers")
    of_group, odd = divmod(experts.count, router.groups)
    least = 2 if router.sigmoid and router.groups > 1 else 1
    if odd or of_group < least or not experts.used <= of_group * router.groups_used <= experts.count:
        raise ValueError(
            f"{router.groups_used} of {router.groups} groups of {experts.count} experts, {experts.used} for a token"
        )


def _check_latent(a: Architecture) -> None:
    """Raise ValueError where the numbers of latents could not be a model's."""
    if (a.latent is None) == FAMILIES[a.model_type].latent:
        raise ValueError(f"latent {str(a.latent)[:60]} in a {a.model_type} model")
    if a.latent is None:
        return
    for name, value in asdict(a.latent).items():
        if type(value) is not int or not (name != "q_rank") <= value < 2**20:
            raise ValueError(f"latent.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.heads != a.kv_heads or a.head_dim != a.latent.head_dim or 2 * len(a.inv_freq) != a.latent.turning:
        raise ValueError(
            f"{a.heads} heads, {a.kv_heads} of keys, of {a.head_dim} channels, {2 * len(a.inv_freq)} of which turn; "
            f"the latents mean {a.heads} of {a.latent.head_dim}, {a.latent.turning}"
        )


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What `blocks.CLAMPED_SWIGLU` makes of a gate and what is multiplied with it."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _check_delta_net(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers that keep a state could not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.gated_attention) is not bool or a.gated_attention != family.gated_attention:
        raise ValueError(f"gated_attention {str(a.gated_attention)[:60]} in a {a.model_type} model")
    if (a.delta_net is None) != (not a.delta_layers) or (a.delta_net is not None and family.delta_net is None):
        raise ValueError(f"delta_net {str(a.delta_net)[:60]} in a {a.model_type} model")
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in a.delta_layers):
        raise ValueError(f"delta_layers holds something else than numbers of the {a.layers} layers")
    if a.delta_net is None:
        return
    if len(set(a.delta_layers)) == a.layers:
        raise ValueError("no layer has attention")
    for name, value in asdict(a.delta_net).items():
        if type(value) is not int or not 1 <= value < 2**20:
            raise ValueError(f"delta_net.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.delta_net.value_heads % a.delta_net.key_heads:
        raise ValueError(f"{a.delta_net.value_heads} value heads for {a.delta_net.key_heads} of keys")


def _check_short_conv(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers with a short convolution could not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.short_conv) is not int or not 0 <= a.short_conv < 2**20:
        raise ValueError(f"short_conv {str(a.short_conv)[:60]}, expected an integer from 0 to below 2**20")
    if (not a.short_conv) != (not a.conv_layers) or (a.short_conv and family.short_conv is None):
        raise ValueError(f"short_conv {a.short_conv} in a {a.model_type} model")
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in a.conv_layers):
        raise ValueError(f"conv_layers holds something else than numbers of the {a.layers} layers")
    if len(set(a.conv_layers)) == a.layers:
        raise ValueError("no layer has attention")


def _check_mamba(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers with a state-space model, or of those that are an MLP alone, could
    not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    for name in ("mamba_layers", "mlp_layers"):
        if not all(type(layer) is int and 0 <= layer < a.layers for layer in getattr(a, name)):
            raise ValueError(f"{name} holds something else than numbers of the {a.layers} layers")
    if bool(a.mlp_layers) != bool(family.mlp_kinds) or {*a.mlp_layers} & {*a.mamba_layers}:
        raise ValueError(f"mlp_layers {str(a.mlp_layers)[:60]} in a {a.model_type} model")
    if a.mlp_layers and not {*a.dense_layers} <= {*a.mlp_layers}:
        raise ValueError("dense_layers holds numbers of layers without an MLP")
    if (a.mamba is None) != (not a.mamba_layers) or (a.mamba is not None and family.mamba is None):
        raise ValueError(f"mamba {str(a.mamba)[:60]} in a {a.model_type} model")
    if not a.attention_layers:
        raise ValueError("no layer has attention")
    if a.mamba is None:
        return
    for name, value in asdict(a.mamba).items():
        if type(value) is not int or not 1 <= value < 2**20:
            raise ValueError(f"mamba.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.mamba.heads % a.mamba.groups or a.mamba.inner % a.mamba.norms:
        raise ValueError(
            f"{a.mamba.heads} heads of {a.mamba.head_dim} in {a.mamba.groups} groups, {a.mamba.norms} norms"
        )


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Values kept within a bound: cap tanh(x / cap); 0: as they are."""
    return (x / cap).tanh() * cap if cap else x
