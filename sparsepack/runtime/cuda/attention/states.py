"""What blocks keep of a text in place of keys and values on the GPU: after how many tokens it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels


class Mixer(Protocol):
    """A block's token mixer between attn_in and attn_out, and what it keeps of B sequences.

    A step writes neither what it reads nor what another step at its position would read: one that is forgotten, because
    its token was another or its sequence stands still, leaves nothing behind. A text begins at position 0 with zeros,
    whatever lies there.
    """

    def step(
        self, kernels: Kernels, rows: Tensor, x: Input, positions: Tensor, out: Tensor, *, flag_in_data: bool
    ) -> None:
        """Put one new position of each sequence on the current stream.

        rows         -- float32 [B, rows]: what attn_in left; x: what attn_in took, with its norm
        positions    -- int32 [B], as `attention.attend` takes them
        out          -- float32 [B, columns of attn_out]
        flag_in_data -- rows are in words of `driver/memory.py`: read as soon as they are stored, and where the input
                        says so x, too; out may be read so in any case
        """

    def prefill(
        self, kernels: Kernels, rows: Product, x: ScaledFp16, first: int, sequence: int, counted: Tensor | None
    ) -> Tensor:
        """The positions first .. first + S - 1 of a sequence: float32 [S, columns of attn_out].

        rows    -- [S, rows]: what attn_in gives; x: what it takes
        counted -- int32 [1]: so many of them count, and what is kept is that after these; None: all
        """

    def copy(self, source: int, to: int) -> None:
        """Let a sequence keep what another does."""


@dataclass
class _Known:
    """What is known of a sequence's states: they are those after so many tokens; before: those after one token less are
    there, too."""

    tokens: int = 0
    before: bool = False


class States:
    """What the blocks of a model that keep a state have of one sequence or several.

    blocks -- number of a block -> its mixer
    """

    def __init__(self, blocks: Mapping[int, Mixer], sequences: int) -> None:
        self.blocks = blocks
        self._known = [_Known() for _ in range(sequences)]

    def check(self, lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Raise `UserError` where what is kept of a sequence is not its state after all of its tokens: a state cannot
        forget some."""
        for sequence in sequences if self.blocks else ():
            known, length = self._known[sequence], lengths[sequence]
            if not length:
                self._known[sequence] = _Known()
            elif known.tokens != length:
                of = f"after {known.tokens} tokens" if known.tokens >= 0 else "of an interrupted text"
                raise UserError(
                    f"the state of sequence {sequence} is that {of}, {length} are in the context; begin the sequence "
                    "anew"
                )

    def begin_prefill(self, sequence: int) -> None:
        """A prefill begins, which may be interrupted between two blocks."""
        self._known[sequence] = _Known(-1)

    def prefilled(self, sequence: int, length: int) -> None:
        """A sequence has become this long by a prefill."""
        self._known[sequence] = _Known(length)

    def stepped(self, sequence: int, length: int) -> None:
        """A step has appended the last of so many tokens."""
        self._known[sequence] = _Known(length, True)

    def stood_still(self, sequence: int, length: int) -> None:
        """A step of other sequences has computed a token after so many of this one, which is forgotten."""
        known = self._known[sequence]
        kept = known.tokens == length or (known.tokens == length + 1 and known.before)
        self._known[sequence] = _Known(length if kept else -1)

    def recorded(self) -> None:
        """A step was recorded, which computed a token after all of each sequence."""
        for known in self._known:
            known.before = False

    def copy(self, source: int, to: int) -> None:
        """Let a sequence have the states of another."""
        for of in self.blocks.values():
            of.copy(source, to)
        known = self._known[source]
        self._known[to] = _Known(known.tokens, known.before)
