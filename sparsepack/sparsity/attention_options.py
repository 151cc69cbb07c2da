"""The options of sparse attention. Nothing heavy is imported here: command line and recipes read the defaults."""

import re
from dataclasses import dataclass
from fractions import Fraction

from sparsepack.errors import PackingError
from sparsepack.models.records.sparse_attention import LARGEST_DENOMINATOR, TokenPolicy
from sparsepack.option import check_options, only_with, option

NONE, DOUBLE_SPARSITY = "none", "double"
AUTO = "auto"
_LARGEST = 2**31 - 1
_DOUBLE = (only_with("attention", DOUBLE_SPARSITY),)


@dataclass(frozen=True)
class AttentionOptions:
    """Which of the cached tokens decoded positions read, and how they find them (`models.records.sparse_attention`)."""

    attention: str = option(
        "Which tokens a decoded one attends to: all, or with Double Sparsity those that a few channels of their keys "
        "rank best.",
        default=NONE,
        choices=(NONE, DOUBLE_SPARSITY),
    )
    channels: int | None = option(
        "With --attention double: channels of each KV head that rank tokens (default: a quarter of them).",
        default=None,
        least=1,
        counts=_DOUBLE,
    )
    tokens: str = option(
        "With --attention double: share of the tokens that is read, 1/16 or 0.0625.", default="1/16", counts=_DOUBLE
    )
    sinks: int = option(
        "With --attention double: first tokens of the text, always read.",
        default=TokenPolicy.sinks,
        least=0,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    recent: int = option(
        "With --attention double: last tokens, always read, the new one included.",
        default=TokenPolicy.recent,
        least=1,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    min_context: int = option(
        "With --attention double: where fewer tokens than these are there, all are read.",
        default=TokenPolicy.min_context,
        least=1,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    dense_layers: str = option(
        "With --attention double: layers that read all tokens, as 0,1 or none; auto: those where the best tokens miss "
        "more than half of the attention weight of the calibration text, and none for more than 1/4 of the tokens.",
        default=AUTO,
        counts=_DOUBLE,
    )

    @property
    def sparse(self) -> bool:
        """Whether fewer tokens than all are read."""
        return self.attention != NONE

    @property
    def policy(self) -> TokenPolicy:
        """How many tokens are read. Raises `PackingError` for a share that is none."""
        return TokenPolicy(_share(self.tokens), self.sinks, self.recent, self.min_context)

    @property
    def dense(self) -> frozenset[int] | None:
        """The layers that read all tokens; None: to be found. Raises `PackingError` for what are no layers."""
        return _layers(self.dense_layers)

    def check(self) -> None:
        """Raise `PackingError` for values that are out of range or do not go together."""
        check_options(self, PackingError)
        always = self.sinks + self.recent
        if self.min_context < always:
            raise PackingError(
                f"min_context {self.min_context}: expected at least sinks + recent, {always}, which are always read"
            )
        if _share(self.tokens) == 1:
            raise PackingError(
                f"tokens {self.tokens!r}: all of them, which is no sparse attention; expected a smaller share, or "
                f"attention {NONE}"
            )
        _layers(self.dense_layers)


def _layers(text: str) -> frozenset[int] | None:
    """Raise `PackingError` unless it is a word that we know, or numbers."""
    words = {AUTO: None, NONE: frozenset[int]()}
    if text in words:
        return words[text]
    if not re.fullmatch(r"\d{1,9}( *, *\d{1,9})*", text):
        raise PackingError(f"dense layers {text[:60]!r}: expected {AUTO}, {NONE}, or numbers of layers as 0,1")
    return frozenset(map(int, text.split(",")))


def _share(text: str) -> Fraction:
    """Raise `PackingError` unless it is a share above 0 and at most 1."""
    try:
        if not re.fullmatch(r"\d{1,7}/\d{1,7}|\d{0,7}\.?\d{1,12}(e-\d{1,2})?", text):
            raise ValueError
        share = Fraction(text)
        if not 0 < share <= 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise PackingError(
            f"tokens {text[:60]!r}: expected a share above 0 and at most 1, such as 1/16 or 0.0625"
        ) from None
    if share.denominator > LARGEST_DENOMINATOR:
        raise PackingError(f"tokens {text[:60]!r}: {share}; expected a fraction of smaller numbers, such as 1/16")
    return share
