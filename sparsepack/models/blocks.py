"""What a decoder block computes, as data: engines read a list of these and never the name of a family."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Rotary = Literal["half-split", "interleaved", "none"]
"""Channel c of the n of a head that turn, the first ones, turns with c + n / 2 ("half-split", also called neox), 2 c
with 2 c + 1, or none turns."""

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_pytorch_tanh")
"""The functions of a gate, as transformers names them, but for relu2(h) = relu(h)^2, which few backends have."""
GATE_ACTIVATIONS = (*ACTIVATIONS, "relu2")
CLAMPED_SWIGLU = "swiglu_oai"
"""gpt-oss's function of gate and up, under the name that llama.cpp has for it: with g = min(gate, 7) and u = up kept
within -7 and 7 it is g sigmoid(1.702 g) (u + 1)."""
XIELU = "xielu"
"""Apertus's function, whose coefficients each block has learned (arXiv 2411.13010; `activations.xielu`)."""
PLAIN_ACTIVATIONS = ("relu2", XIELU)
"""The functions of an MLP without a gate. relu2(h) = relu(h) h: such an MLP is one with ReLU whose gate and up are one
matrix."""


@dataclass(frozen=True)
class Multipliers:
    """By what a model multiplies beside its weights, as its configuration says.

    embedding     -- rows of the embedding
    attention     -- products of queries and keys; 0: 1 / sqrt(head_dim)
    residual      -- what attention and the MLP add
    logits        -- logits
    attention_cap -- a score x becomes cap tanh(x / cap); 0: it stays
    logit_cap     -- likewise a logit
    """

    embedding: float = 1.0
    attention: float = 0.0
    residual: float = 1.0
    logits: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0


@dataclass(frozen=True)
class LongTexts:
    """By which frequencies texts of more than so many tokens turn, their first tokens too.

    tokens   -- up to so many, texts turn by `Architecture.inv_freq`
    inv_freq -- of all longer ones (longrope); empty: the frequencies fall as a text grows (dynamic NTK), and what is
                cached keeps the ones that it was turned by
    base     -- of the frequencies that fall, as `Architecture.inv_freq` has it
    factor   -- by which they fall
    """

    tokens: int
    inv_freq: tuple[float, ...] = ()
    base: float = 0.0
    factor: float = 0.0

    @property
    def turns_all(self) -> bool:
        """Whether a text that becomes long is turned anew as a whole, so that its keys must be computed again."""
        return bool(self.inv_freq)


@dataclass(frozen=True)
class Router:
    """How experts are chosen where it is not by the softmax of all logits.

    sigmoid     -- an expert's score is the sigmoid of its logit, in place of the softmax over all. A bias of each
                   expert is then added to decide who is chosen, and to nothing else
    groups      -- so many groups of neighbouring experts compete first, by the sum of the two best scores of each, bias
                   included; of softmax scores by the best one
    groups_used -- so many groups stay
    scale       -- what the weights of the chosen ones are multiplied by in the end
    """

    sigmoid: bool = False
    groups: int = 1
    groups_used: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertNumbers:
    """How MLPs choose among their experts, each of which is `Architecture.intermediate` wide.

    count      -- experts of a block
    used       -- that a token has
    normalised -- whether the weights of these are made to add up to one
    shared     -- experts that every token has beside these, all with the weight that the shared expert has whose parts
                  they are
    router     -- how they are chosen; None: by the softmax of their logits
    """

    count: int
    used: int
    normalised: bool
    shared: int = 0
    router: Router | None = None

    @property
    def stored(self) -> int:
        """Experts of a block whose matrices there are."""
        return self.count + self.shared

    @property
    def of_token(self) -> int:
        """Experts that a token has, chosen or not."""
        return self.used + self.shared


LATENT_EPS = 1e-6
"""Is added to the mean square of a latent, whatever `norm_eps` is."""


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values are made of compressed ones (MLA; DeepSeek-V2, arXiv 2405.04434).

    attn_in gives a latent of the queries and one of keys and values, each of which is RMS-normalised and enters a site
    of its own, and one part of keys that turns and that all heads share. Of each head attn_q_b gives `plain`, then
    `turning` channels of queries, attn_kv_b `plain` channels of keys, then `value` of values.

    q_rank  -- channels of the latent of queries; 0: attn_in gives queries themselves, and there is no attn_q_b
    kv_rank -- channels of the latent of keys and values
    plain, turning, value -- channels of each head

    What is cached are keys and values: of each head, `turning` channels first, then `plain`, and zeros up to
    `Architecture.head_dim`.
    """

    q_rank: int
    kv_rank: int
    plain: int
    turning: int
    value: int

    @property
    def query(self) -> int:
        """Channels of a head's queries and keys."""
        return self.plain + self.turning

    @property
    def head_dim(self) -> int:
        """Channels of a cached head."""
        return max(self.query, self.value)

    def into(self, heads: int) -> tuple[int, int]:
        """Rows of the two projections of attn_in."""
        return self.q_rank or heads * self.query, self.kv_rank + self.turning


@dataclass(frozen=True)
class Attention:
    """The token mixer of a block that keeps keys and values.

    rope     -- the number of the rotary table of `Architecture.rotary_tables` by which queries and keys turn
    window   -- tokens that a query sees at most; 0: all
    qk_norm  -- what is RMS-normalised of queries and keys before they turn: each head, the rows of all heads together;
                None: nothing
    sinks    -- whether each query head has a score beside those of keys, which takes a share of the softmax and gives
                nothing for it
    gated    -- what it gives is multiplied by the sigmoid of as many more rows of attn_in: of each query head its
                queries stand there, then its gates
    kv_heads, head_dim -- as `Architecture` has them, or other ones
    k_eq_v   -- values are keys before norm and rotary embedding: attn_in has no rows of them
    value_norm -- whether each head's values are divided by their root mean square
    latent   -- where queries, keys and values come from; None: from attn_in
    source   -- the earlier layer whose keys and values it reads: attn_in gives queries alone, and nothing is cached;
                None: it has its own
    """

    kv_heads: int
    head_dim: int
    rope: int = 0
    window: int = 0
    sinks: bool = False
    qk_norm: Literal["heads", "rows"] | None = None
    gated: bool = False
    k_eq_v: bool = False
    value_norm: bool = False
    latent: Latent | None = None
    source: int | None = None


@dataclass(frozen=True)
class DeltaNet:
    """The token mixer of a block that keeps a state instead (gated delta net, arXiv 2412.06464): of each value head a
    matrix S [key_dim, value_dim] that every token multiplies by its decay and corrects by the delta rule
    S += k beta (v - k^T S), and the last taps - 1 inputs of a causal convolution.

    key_heads, value_heads -- value head h reads queries and keys of key head h * key_heads // value_heads
    key_dim, value_dim     -- channels of a head
    taps                   -- positions that the convolution sees, its own included
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def values(self) -> int:
        """Channels of all value heads: inputs of attn_out."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads, one after the other."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def state_floats(self) -> int:
        """Numbers that a sequence keeps of one block."""
        return self.values * self.key_dim + self.channels * (self.taps - 1)


@dataclass(frozen=True)
class ShortConv:
    """The token mixer of a block that keeps a few inputs instead (LFM2): attn_in gives b, c and u of each channel, the
    output is c times a causal convolution of b u, the last taps - 1 of which are kept.

    channels -- as many as the hidden state has
    taps     -- positions that the convolution sees, its own included
    """

    channels: int
    taps: int

    @property
    def state_floats(self) -> int:
        """Numbers that a sequence keeps of one block."""
        return self.channels * (self.taps - 1)


@dataclass(frozen=True)
class Mamba:
    """The token mixer of a block that is a state-space model (Mamba-2; arXiv 2405.21060). attn_in gives gates of the
    output, then x of all heads, B and C of all groups, which pass a causal convolution with a bias and a SiLU, then
    the step dt of each head. Of each head there is a state [head_dim, state]:

        h = exp(-rate d) h + d x B,  y = h C + skip x,  d = softplus(dt + bias)

    and what leaves the block is the RMSNorm, group by group of channels, of y times the SiLU of the gates.

    heads, head_dim -- of x and y
    groups          -- head h reads B and C of group h * groups // heads
    state           -- channels of B and C of a group
    taps            -- positions that the convolution sees, its own included
    norms           -- groups of channels that are normed apart
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    norms: int

    @property
    def inner(self) -> int:
        """Channels of all heads: inputs of attn_out."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x of all heads, then B and C of all groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def rows(self) -> int:
        """Rows of attn_in."""
        return self.inner + self.channels + self.heads

    @property
    def state_floats(self) -> int:
        """Numbers that a sequence keeps of one block."""
        return self.inner * self.state + self.channels * (self.taps - 1)


@dataclass(frozen=True)
class Mlp:
    """The channel mixer of a block: down(activation(gate x) * up x), or without a gate down(activation(up x)).

    experts -- that it is a mixture of, each of this width; None: it is dense
    biased  -- whether the router and the matrices of experts have biases
    """

    width: int
    activation: str
    gated: bool = True
    experts: ExpertNumbers | None = None
    biased: bool = False


EXPERT_NORMS = ("experts_norm", "shared_norm")
"""Our names of the norms of what chosen experts make, and of what shared ones do."""
SUB_NORMS = ("attn_sub_norm", "mlp_sub_norm")
"""Our names of the norms of what enters attn_out and mlp_mid."""


@dataclass(frozen=True)
class Block:
    """A decoder block: x += mixer(x), then x += mlp(x); of parallel ones x += mixer(x) + mlp(x).

    mixer, mlp   -- None: the block has none
    norms_before -- whether attention and MLP read the RMSNorm of x
    norms_after  -- whether the RMSNorm of what they make is added
    scaled       -- whether x is multiplied by a number of the block's in the end
    layer_norms  -- whether norms are LayerNorm in place of RMSNorm: the mean is subtracted first, and a bias added last
    per_layer    -- channels of an input that each token has for this block: x += norm(projection(activation(gate x) *
                    input)) comes last (Gemma 4 E2B and E4B); 0: there is none
    norms_of_experts -- whether what the chosen experts make, and what the shared ones make, is RMS-normalised each by
                        itself before the two are added
    parallel     -- whether the MLP reads what the mixer reads, by one norm
    sub_norms    -- whether what enters attn_out and mlp_mid is RMS-normalised, over all channels
    """

    mixer: Attention | DeltaNet | ShortConv | Mamba | None
    mlp: Mlp | None
    norms_before: bool = True
    norms_after: bool = False
    scaled: bool = False
    layer_norms: bool = False
    norms_of_experts: bool = False
    per_layer: int = 0
    sub_norms: bool = False
    parallel: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norms."""
        has = [name for name, part in (("attn", self.mixer), ("mlp", self.mlp)) if part is not None]
        before = tuple(f"{name}_norm" for name in has[: 1 if self.parallel else 2])
        after = tuple(f"{name}_post_norm" for name in has)
        keys = isinstance(self.mixer, Attention) and self.mixer.source is None
        of_heads = ("q_norm", "k_norm")[: 1 + keys]
        of_attention = {None: (), "heads": of_heads, "rows": ("q_row_norm", "k_row_norm")}
        within = tuple(f"{name}_sub_norm" for name in has) * self.sub_norms
        of_experts = EXPERT_NORMS * self.norms_of_experts
        return before * self.norms_before + within + after * self.norms_after + of_experts + of_attention[self.qk_norm]

    @property
    def qk_norm(self) -> Literal["heads", "rows"] | None:
        """`Attention.qk_norm`; None of another mixer."""
        return self.mixer.qk_norm if isinstance(self.mixer, Attention) else None


@dataclass(frozen=True)
class RotaryChannels:
    """Which channels of a head turn together, and how many of the first ones turn."""

    convention: Rotary
    dims: int


@dataclass(frozen=True)
class Heads:
    """Query heads, those of keys and values, channels of each, and the rotary embedding."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: RotaryChannels

    def to_json(self) -> dict[str, Any]:
        """The heads as JSON-able values."""
        return asdict(self)
