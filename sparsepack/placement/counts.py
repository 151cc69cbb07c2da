"""Counts of how often needed neurons were resident while a text was decoded. Nothing heavy is imported here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_IN_RESULTS = ("tokens", "needed", "hits", "moves")


@dataclass(frozen=True)
class HitCounts:
    """What happened to decoded tokens.

    tokens -- decoded
    needed -- neurons that these tokens needed; hits: of these, those that were resident when they were needed
    moves  -- units that became resident meanwhile; unused: of these, those that left before they were needed
    """

    tokens: int = 0
    needed: int = 0
    hits: int = 0
    moves: int = 0
    unused: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of what was needed that was resident."""
        return self.hits / max(self.needed, 1)

    def __add__(self, other: "HitCounts") -> "HitCounts":
        """The counts of both texts together."""
        return HitCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def in_words(self) -> str:
        """The hit rate and the moves in a few words."""
        moves = self.moves / max(self.tokens, 1)
        return f"hit rate {100 * self.hit_rate:.1f} % of the active neurons, {moves:.1f} moved per token"

    def to_json(self) -> dict[str, Any]:
        """The counts for results, and the hit rate."""
        counts = asdict(self)
        return {**{name: counts[name] for name in _IN_RESULTS}, "hit_rate": self.hit_rate}


def hits_in_words(found: Mapping[str, Any]) -> str:
    """What `to_json` gave, in the words of `HitCounts.in_words`."""
    return HitCounts(**{name: found[name] for name in _IN_RESULTS}).in_words
