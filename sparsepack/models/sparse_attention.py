"""Double Sparsity: which tokens of the KV cache a decoded token reads, and by which channels they are found.

The same record goes from `pack` to the artifact and the engines. A decoded position sees n tokens, its own included.
It ranks them by a few heavy channels of their keys (`formats/blocks/labels.py`), and attends to the best of them alone:

    | sinks, always |      the best by their labels      | recent, always |
    |<----------------- n tokens that it sees ------------------------->|   budget = n * tokens of them are read

Cheap to import: the options of `pack` take their defaults from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sparsepack.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_DENOMINATOR = 1 << 20
"""A share of tokens has at most this denominator, so that its product with any number of tokens fits 64 bits."""


@dataclass(frozen=True)
class SparseFrom:
    """From how many tokens of a text on a decoded position reads a part of those that it sees.

    min_context -- the policy's: a position that sees fewer tokens reads all of them
    break_even  -- the machine's: where a text has fewer tokens, reading all of them takes no longer; 0: nowhere
    """

    min_context: int
    break_even: int = 0

    @property
    def tokens(self) -> int:
        """The fewest tokens of which a position reads a part."""
        return max(self.min_context, self.break_even)

    def within(self, window: int) -> bool:
        """Whether a layer whose queries see `window` tokens at most (0: all) ever reads a part of them."""
        return not 0 < window < self.tokens


@dataclass(frozen=True)
class TokenPolicy:
    """How many tokens a decoded position reads.

    tokens      -- share of those that it sees, above 0 and at most 1
    sinks       -- first positions of the text that are always read where they are seen
    recent      -- last positions that are always read, its own included; at least 1
    min_context -- a position that sees fewer tokens reads all of them

    Raises `UserError` for numbers out of these ranges, and a share with a denominator above `LARGEST_DENOMINATOR`.
    """

    tokens: Fraction
    sinks: int = 4
    recent: int = 64
    min_context: int = 1024

    def __post_init__(self) -> None:
        share = Fraction(self.tokens)
        if not 0 < share <= 1 or share.denominator > LARGEST_DENOMINATOR:
            raise UserError(f"a share of {self.tokens} of the tokens: expected one above 0 and at most 1, such as 1/16")
        if self.sinks < 0 or self.recent < 1 or self.min_context < 0:
            raise UserError(
                f"{self.sinks} first and {self.recent} last tokens always read, from {self.min_context} on: expected "
                "0 or more, 1 or more, 0 or more"
            )
        object.__setattr__(self, "tokens", share)

    @property
    def sparse_from(self) -> SparseFrom:
        """What the policy says, on a machine where reading a part always pays."""
        return SparseFrom(self.min_context)

    def budget(self, seen: int) -> int:
        """How many of the `seen` tokens are read: the share, rounded up, and no fewer than sinks and recent ones."""
        if seen < self.min_context:
            return seen
        share = -(-seen * self.tokens.numerator // self.tokens.denominator)
        return min(seen, max(share, self.sinks + self.recent))


@dataclass(frozen=True)
class SparseAttention:
    """Sparse attention of a model.

    policy   -- of every layer that is not dense
    channels -- of each layer, int64 [kv_heads, r], ascending: the heavy channels of each KV head after its norm and
                rotary embedding, in the model's own order of channels; None: the layer reads every token
    """

    policy: TokenPolicy
    channels: "tuple[Tensor | None, ...]"


def described(attention: SparseAttention) -> dict[str, Any]:
    """Sparse attention in a few numbers, JSON-able: the policy, how many channels rank tokens, how many layers there
    are, and which of them are dense."""
    policy, channels = attention.policy, attention.channels
    return {
        "tokens": f"{policy.tokens.numerator}/{policy.tokens.denominator}",
        "sinks": policy.sinks,
        "recent": policy.recent,
        "min_context": policy.min_context,
        "channels": max((each.shape[1] for each in channels if each is not None), default=0),
        "layers": len(channels),
        "dense_layers": [n for n, each in enumerate(channels) if each is None],
    }


def in_words(description: Mapping[str, Any]) -> str:
    """What `described` says, for people."""
    dense = description["dense_layers"]
    named = (
        f"layer{'s' * (len(dense) > 1)} {', '.join(map(str, dense))} of {description['layers']}"
        if dense
        else "no layer"
    )
    return (
        f"from {description['min_context']:,} tokens on a decoded one reads {description['tokens']} of them: the first "
        f"{description['sinks']}, the last {description['recent']}, and those that {description['channels']} channels "
        f"rank best; {named} read{'s' * (len(dense) < 2)} all"
    )
