"""The three named protocols - which tokens of a text run sparse - and what each measurement asks of a model.

`dense`: every position dense. `all`: every position sparse. `decode`: context dense, what is scored sparse; in rolling
perplexity the first half of each window is the context, and only the second half is scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Logits = Callable[["torch.Tensor"], "torch.Tensor"]
Done = Callable[[int], None]
"""The function is told how many rows have taken another step."""

PROTOCOLS = ("decode", "all", "dense")


def scored_from(protocol: str, width: int, second_half: bool = False) -> int:
    """The first scored position of a window of `width` positions; `second_half`: as under decode, whatever runs."""
    return width // 2 if protocol == "decode" or second_half else 0


def ignored(rows: int) -> None:
    """The `Done` of who needs no progress."""


class WindowScorer(Protocol):
    """What `score_windows` asks of a model: in two steps, so that few logits exist at one time.

    steps -- how often `hidden` tells `done` of each row
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def rows_at_once(self, width: int, batch: int) -> int:
        """How many rows of `width` positions `hidden` takes at best, of which `batch` run together."""

    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
    ) -> torch.Tensor:
        """What logits are made of: [B, S, ...]; row b sparse from position sparse_from[b] on.

        `lengths` None means that there is no padding; `batch` rows run together, None: all.
        """

    def head(self, words: slice) -> Logits:
        """A function from `hidden` [..., S, ...] to the logits of a range of the vocabulary [..., S, words]."""


class Scorer(Protocol):
    """A causal language model that can run some positions sparse."""

    @property
    def device(self) -> torch.device: ...

    @property
    def context(self) -> int:
        """The most input tokens in one row."""

    def logits(self, input_ids: torch.Tensor, lengths: torch.Tensor, sparse_from: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[B, S, V]` of right-padded rows.

        `input_ids` int64 `[B, S]`; `lengths` int64 `[B]`, tokens of each row before the padding; `sparse_from`
        int64 `[B]`: in row b the positions `>= sparse_from[b]` run sparse, the others dense.
        """
