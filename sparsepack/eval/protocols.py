"""The three named protocols - which tokens of a text run sparse - and what each measurement asks of a model.

`dense`: every position dense. `all`: every position sparse. `decode`: context dense, what is scored sparse; in rolling
perplexity the first half of each window is the context, and only the second half is scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

PROTOCOLS = ("decode", "all", "dense")


def scored_from(protocol: str, width: int, second_half: bool = False) -> int:
    """The first scored position of a window of `width` positions; `second_half`: as under decode, whatever runs."""
    return width // 2 if protocol == "decode" or second_half else 0


class WindowScorer(Protocol):
    """What `score_windows` asks of a model: in two steps, so that few positions' logits exist at one time."""

    device: torch.device

    def hidden(self, input_ids: torch.Tensor, lengths: torch.Tensor | None, sparse_from: torch.Tensor) -> torch.Tensor:
        """What `output` makes logits of: [B, S, ...]; row b sparse from position sparse_from[b] on."""

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V]."""


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
