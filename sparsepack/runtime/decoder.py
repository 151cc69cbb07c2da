"""The seam between the engine and whatever computes its tokens."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from sparsepack.runtime.sampling import Sampler


class Decoder(Protocol):
    """A packed model with its cache, filled position by position. Its caller checks ids and room.

    description -- what runs, for people: instruction set or device, threads
    threads     -- of the processor
    cache_type  -- of keys and values: "f32", "f16" or "bf16"
    """

    @property
    def description(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def cache_type(self) -> str: ...

    @property
    def position(self) -> int:
        """How many tokens the cache holds."""

    @property
    def stepped(self) -> int:
        """How many positions since the reset were decoded, not prefilled."""

    def active(self) -> Mapping[tuple[int, str], int]:
        """Active columns per (layer, site), summed over those positions."""

    def reset(self) -> None:
        """Forget the text and what was counted."""

    def prefill(self, ids: Tensor) -> Tensor:
        """Append int64 [S > 0], dense. Returns the logits after the last: float32 [vocabulary]."""

    def step(self, id: int, sparse: bool) -> Tensor:
        """Append one token. Returns the logits after it: float32 [vocabulary]."""

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        """What `sampler` chooses from the logits of `step`."""

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        """Append int64 [S], dense up to `sparse_from`, the others as steps. Returns all logits [S, vocabulary]."""
