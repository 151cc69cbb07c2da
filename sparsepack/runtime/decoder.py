"""The seam between the engine and whatever computes its tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparsepack.models.packed import PackedModel
from sparsepack.runtime import reference
from sparsepack.runtime.kv_cache import AttentionShape, attention_shape
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
    def attention_from(self) -> int | None:
        """From how many tokens of a text on decoded ones read a part of them; None: they always read all."""

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

    def truncate(self, length: int) -> None:
        """Forget what the text has beyond its first tokens; what was counted stays."""

    def prefill(self, ids: Tensor) -> Tensor:
        """Append int64 [S > 0], dense. Returns the logits after the last: float32 [vocabulary]."""

    def step(self, id: int, sparse: bool) -> Tensor:
        """Append one token. Returns the logits after it: float32 [vocabulary]."""

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        """What `sampler` chooses from the logits of `step`."""

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        """Append int64 [S], dense up to `sparse_from`, the others as steps. Returns all logits [S, vocabulary]."""


class BatchDecoder(Protocol):
    """As `Decoder`, of several texts, each with a cache of its own."""

    @property
    def description(self) -> str: ...

    @property
    def attention_from(self) -> int | None:
        """From how many tokens of a text on decoded ones read a part of them; None: they always read all."""

    @property
    def cache_type(self) -> str: ...

    @property
    def positions(self) -> tuple[int, ...]:
        """How many tokens the cache holds of each sequence."""

    @property
    def stepped(self) -> int:
        """How many steps since the reset."""

    def active(self) -> Mapping[tuple[int, str], int]:
        """Columns that were active in any sequence, per (layer, site), summed over those steps."""

    def reset(self) -> None:
        """Forget the texts and what was counted."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what a sequence has beyond its first tokens."""

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        """Append int64 [S > 0] to a sequence, dense. Returns the logits after the last: float32 [vocabulary]."""

    def step(self, ids: Sequence[int], sparse: bool) -> Tensor:
        """Append a token to each sequence. Returns the logits after them: float32 [sequences, vocabulary]."""

    def decode_next(self, ids: Sequence[int], sparse: bool, samplers: Sequence[Sampler]) -> list[int]:
        """What each sampler chooses from the logits of `step`."""


def attention_of(packed: PackedModel, context: int, device: torch.device, sequences: int = 1) -> AttentionShape:
    """What a model's cache is made for, on the device that attends."""
    architecture = packed.architecture
    norms = [[_there(layer.norms.get(name), device) for name in ("q_norm", "k_norm")] for layer in packed.layers]
    inv_freq = torch.tensor(architecture.inv_freq, device=device)
    cos, sin = reference.rotary_table(inv_freq, architecture.rotary_scale, context)
    return attention_shape(architecture, [(q, k) for q, k in norms], cos, sin, sequences, packed.attention)


def _there(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)
