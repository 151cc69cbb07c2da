"""The end of a text: before the first of some stop strings, also where one comes in pieces."""

from collections.abc import Sequence

from sparsepack.errors import UserError


class StopText:
    """Lets a text through up to a stop string, which is not told, and no part of it either.

    stops -- the strings; none: everything passes
    found -- the one that ended the text; None: none has yet

    The stop string that is complete first ends the text, the longest of several that are complete at once: how the
    text is cut into pieces makes no difference. What could be the beginning of a stop string is held back until the
    next characters decide. Raises `UserError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise UserError("stop: an empty string would end every text at once; expected at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text. Returns what certainly stands before any stop string; nothing once one was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)
            self._held = ""
            return text[:at]
        kept = self._beginning_at_the_end_of(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, when no more text comes: it was no stop string after all."""
        rest, self._held = self._held, ""
        return rest

    def _beginning_at_the_end_of(self, text: str) -> int:
        """How many of the last characters could begin a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
