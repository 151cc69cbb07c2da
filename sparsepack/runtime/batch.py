"""Several texts decoded together, a token of each at a time: every weight is read once for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel
from sparsepack.models.skipped import Skipped, skipped_weights
from sparsepack.runtime.backends import batch_backend
from sparsepack.runtime.engine import check_ids, check_room, checked_context, described_attention, shares
from sparsepack.runtime.sampling import Sampler


class BatchEngine:
    """A packed model ready to run, with the static KV caches of 2 to 8 sequences.

    packed, context, dense, backend, cache_type, offload -- as the `Engine`'s; the context is that of every sequence
    device    -- one whose backend decodes batches: an NVIDIA GPU
    sequences -- how many texts

    Raises `UserError` for another number of sequences, another device, and as `Engine` does.
    """

    notes: tuple[str, ...] = ()
    threads = 1

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device | str = "cuda",
        context: int | None = None,
        *,
        sequences: int,
        dense: bool = False,
        backend: str | None = None,
        cache_type: str | None = None,
        offload: bool = False,
    ) -> None:
        self.device = torch.device(device)
        row = batch_backend(sequences, device, backend)
        row.check_model(packed)
        self.backend = row.name
        self.packed = packed
        self.architecture = packed.architecture
        self.context = checked_context(context, packed.architecture.context)
        self.dense = dense
        cache_type = row.checked_cache_type(cache_type)
        self.offload = offload
        more = row.offloading(packed, offload)
        self._module = row.open()
        self._decoder = self._module.batch_decoder(packed, self.device, self.context, sequences, cache_type, **more)

    @property
    def positions(self) -> tuple[int, ...]:
        """How many tokens the cache holds of each sequence."""
        return self._decoder.positions

    @property
    def cache_type(self) -> str:
        """The type of keys and values in the cache: "f32", "f16" or "bf16"."""
        return self._decoder.cache_type

    @property
    def description(self) -> str:
        """What runs: `cuda, NVIDIA H100 80GB HBM3, 4 sequences`."""
        attention = described_attention(self._decoder.attention_from, self.context, self.offload)
        return f"{self.backend}, {self._decoder.description}, {len(self.positions)} sequences{attention}"

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        self._module.synchronise(self.device)

    def reset(self) -> None:
        """Forget the texts and the activity counted so far."""
        self._decoder.reset()

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what a sequence has beyond its first `length` tokens. Raises `UserError` where it has fewer."""
        self._check_sequence(sequence)
        if not 0 <= length <= self.positions[sequence]:
            raise UserError(f"length {length} of sequence {sequence}: expected 0 to {self.positions[sequence]}")
        self._decoder.truncate(sequence, length)

    def activity(self) -> dict[tuple[int, str], float]:
        """Share of columns per (layer, site) that were active in any sequence, over the steps since the last reset.

        As `Engine.activity` otherwise.
        """
        return shares(self.packed, self._decoder.active(), self._decoder.stepped)

    def skipped(self) -> Skipped | None:
        """What the steps skipped, for all sequences at once; None before the first."""
        activity = self.activity()
        return skipped_weights(self.packed, activity) if activity else None

    @torch.no_grad()
    def prefill(self, sequence: int, ids: Sequence[int]) -> Tensor:
        """Append tokens to one sequence, every site dense. Returns the logits after the last: float32 [vocabulary].

        Raises `UserError` for a sequence that there is not, no tokens, an id the model does not have, or more tokens
        than the cache has room for.
        """
        self._check_sequence(sequence)
        if not len(ids):
            raise UserError("prefill of 0 tokens; expected at least one")
        check_ids(self.architecture.vocabulary, min(ids), max(ids))
        check_room(self.context, self.positions[sequence], len(ids))
        return self._decoder.prefill(sequence, torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous())

    @torch.no_grad()
    def step(self, ids: Sequence[int]) -> Tensor:
        """Append a token to each sequence, skipping the columns that are inactive in all of them. Returns the logits
        after them: float32 [sequences, vocabulary].

        Raises `UserError` for another number of ids, one that the model does not have, or a full cache.
        """
        self._check_step(ids)
        return self._decoder.step(ids, not self.dense)

    @torch.no_grad()
    def decode_next(self, ids: Sequence[int], samplers: Sequence[Sampler]) -> list[int]:
        """Append tokens as `step` does, and let each sequence's sampler choose the next. Raises `UserError` as `step`,
        `ArtifactError` as the samplers do."""
        if len(samplers) != len(self.positions):
            raise ValueError(f"{len(samplers)} samplers for {len(self.positions)} sequences")
        if any(sampler.sampling.penalises for sampler in samplers):
            return [sampler.choose(row) for sampler, row in zip(samplers, self.step(ids), strict=True)]
        self._check_step(ids)
        return self._decoder.decode_next(ids, not self.dense, samplers)

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < len(self.positions):
            raise UserError(f"sequence {sequence}: expected 0 to {len(self.positions) - 1}")

    def _check_step(self, ids: Sequence[int]) -> None:
        if len(ids) != len(self.positions):
            raise UserError(f"{len(ids)} tokens for {len(self.positions)} sequences; expected one for each")
        check_ids(self.architecture.vocabulary, min(ids), max(ids))
        check_room(self.context, max(self.positions), 1)
