"""What places served of decoded tokens. Nothing heavy is imported here: recipes show it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Served:
    """What happened to decoded tokens since the reset.

    needed -- neurons that they needed; hits: of these, those that had places
    moves  -- neurons that were given places meanwhile
    """

    tokens: int = 0
    needed: int = 0
    hits: int = 0
    moves: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of what was needed that had a place."""
        return self.hits / max(self.needed, 1)

    def __add__(self, other: "Served") -> "Served":
        """Of both texts."""
        return Served(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def in_words(self) -> str:
        """Both in a few words."""
        moves = self.moves / max(self.tokens, 1)
        return f"{100 * self.hit_rate:.1f} % of the active neurons had places, {moves:.1f} moved per token"

    def to_json(self) -> dict[str, Any]:
        """For results: the counts, and the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def served_in_words(found: Mapping[str, Any]) -> str:
    """The same of what `to_json` gave."""
    return Served(**{field.name: found[field.name] for field in fields(Served)}).in_words
