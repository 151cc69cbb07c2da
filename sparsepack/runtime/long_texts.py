"""Texts that turn by other rotary frequencies once they are long (`models.architecture.LongTexts`), in an engine."""

from collections.abc import Sequence
from typing import cast

import torch

from sparsepack.models.architecture import Architecture
from sparsepack.runtime.decoder import Decoder, TurningDecoder
from sparsepack.runtime.reference.attention import rotary_table


class TurnedTexts:
    """The texts of a decoder, each of which turns as its length means.

    Models whose long texts turn as a whole have two sets of frequencies; in others the frequencies of a position follow
    from the length that its text has there.
    """

    def __init__(self, architecture: Architecture, context: int, decoder: Decoder) -> None:
        long = architecture.long_texts
        self._architecture, self._context, self._decoder = architecture, context, decoder
        self._long = None if long is None or context <= long.tokens else long
        self._are_long = [False for _ in decoder.cache.lengths]

    def grow(self, sequence: int, ids: Sequence[int], count: int) -> None:
        """Let the next `count` tokens of a text, which has these already, turn as its length then means. Where that
        means all of it, a text that becomes long, or short again, is computed anew, dense, as transformers does."""
        long = self._long
        if long is None:
            return
        if not long.turns_all:
            first = self._decoder.cache.lengths[sequence]
            self._turn(sequence, first, first + count, first + count)
            return
        is_long = len(ids) + count > long.tokens
        if is_long == self._are_long[sequence]:
            return
        self._decoder.truncate(sequence, 0)
        self._turn_all(sequence, is_long)
        if ids:
            self._decoder.prefill(sequence, torch.tensor(ids))

    def copied(self, source: int, to: int) -> None:
        """Let a text, which another was copied to, turn as that one does."""
        self._turn_all(to, self._are_long[source])

    def _turn_all(self, sequence: int, is_long: bool) -> None:
        """Let a text turn as long ones do, or as short ones, from its first token on."""
        long = self._long
        if long is not None and long.turns_all and is_long != self._are_long[sequence]:
            self._turn(sequence, 0, self._context, self._context if is_long else 0)
            self._are_long[sequence] = is_long

    def _turn(self, sequence: int, first: int, last: int, length: int) -> None:
        """Let positions `first` .. `last` - 1 of a text turn as those of a text of a length."""
        a = self._architecture
        rows = rotary_table(a.frequencies(length), a.rotary_scale, last, first)
        cast(TurningDecoder, self._decoder).turn(sequence, first, *rows)
