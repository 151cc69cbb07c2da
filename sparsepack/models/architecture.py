"""The numbers of a model that an engine needs."""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from sparsepack.models.blocks import (
    EXPERT_NORMS,
    SUB_NORMS,
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
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family


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
    mamba_eps                 -- of its norm, whose input no stream scales; 0: norm_eps
    mlp_layers                -- numbers of the layers that are an MLP alone; where there are any, the others have none
    gated_attention           -- whether attention has an output gate
    global_heads              -- kv_heads and head_dim of layers without a window; empty: as in the others
    k_eq_v                    -- whether values of layers without a window are their keys before norm and rotary
                                 embedding
    latent                    -- where queries, keys and values of attention come from; None: from attn_in.
                                 `head_dim` and `kv_heads` are then of what is cached
    dense_layers              -- of a model with experts, the numbers of the layers whose MLPs have none
    dense_intermediate        -- how wide these are
    kv_sources                -- the layers whose keys and values the last `len(kv_sources)` layers read, which have
                                 none of their own; empty: all have
    shared_intermediate       -- how wide the MLPs of these layers are; 0: as those of the others
    per_layer                 -- channels of an input that each token has for each layer (`blocks.Block.per_layer`); 0:
                                 it has none

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
    mamba_eps: float = 0.0
    mlp_layers: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    shared_intermediate: int = 0
    per_layer: int = 0

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
                self.k_eq_v and not window and self.kv_source(layer) is None,
                family.value_norm,
                self.latent,
                self.kv_source(layer),
            )

        dense = Mlp(self.dense_intermediate, self.activation, family.gated)

        wide = replace(mlp, width=self.shared_intermediate)

        def mlp_of(layer: int) -> Mlp | None:
            if self.mlp_layers and layer not in self.mlp_layers:
                return None
            if self.shared_intermediate and self.kv_source(layer) is not None:
                return wide
            return dense if layer in self.dense_layers else mlp

        every_block: dict[str, Any] = {
            "norms_before": "attn_norm" in family.norms,
            "norms_after": "attn_post_norm" in family.norms,
            "scaled": bool(family.layer_scalar),
            "layer_norms": family.layer_norms,
            "norms_of_experts": EXPERT_NORMS[0] in family.norms,
            "per_layer": self.per_layer,
            "sub_norms": SUB_NORMS[0] in family.norms,
            "parallel": family.parallel,
        }
        return tuple(
            Block(mixer(layer, window), mlp_of(layer), **every_block)
            for layer, window in enumerate(self.sliding_windows)
        )

    @property
    def row(self) -> Family:
        """The row of the model's family, of a model without experts where that has other names."""
        family = FAMILIES[self.model_type]
        if family.mlp_kinds and self.experts is None:
            return family.dense_block
        return family.mixture if family.mixture is not None and self.experts is not None else family

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values another reads; None: it has its own."""
        own = self.layers - len(self.kv_sources)
        return self.kv_sources[layer - own] if layer >= own else None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have attention."""
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
        if self.kv_source(layer) is not None:
            return family.shared_kv_block
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
            "kv_sources",
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
