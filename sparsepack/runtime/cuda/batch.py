"""A decoder of several sequences on an NVIDIA GPU, which read every weight once for all of them.

A step appends a token to each sequence. A column is skipped where it is inactive in all of them: what is read, and
multiplied for every sequence, is the union of the columns that are active in any.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel
from sparsepack.runtime.cuda.caches import new_cache
from sparsepack.runtime.cuda.decoder import DEFAULT_CACHE_TYPE
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.kv_cache import NewCache
from sparsepack.runtime.cuda.sequences import SequencesDecoder
from sparsepack.runtime.cuda.step import state_parts
from sparsepack.runtime.sampling import Sampler, not_finite


class CudaBatch(SequencesDecoder):
    """A packed model with the caches of B sequences, 1 to 8. Its caller checks ids and room.

    The cache takes B times as much as `CudaDecoder`'s. The sequences may have different lengths, and their logits are
    those of sequences alone but for the order of sums and, in sparse steps, for the columns of the others.

    Raises `UserError` as `CudaDecoder` does, and where the GPU has too little shared memory for so many.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        sequences: int,
        cache_type: str = DEFAULT_CACHE_TYPE,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
    ) -> None:
        super().__init__(packed, device, context, sequences, cache_type, kernels, new_cache, together=True)
        most = min(kernels.most_inputs(site.matrix) for layer in self._model.layers for site in layer.sites.values())
        if sequences > most:
            raise UserError(
                f"{sequences} sequences: this GPU's shared memory takes {most} of this model at once; take fewer"
            )

    @property
    def positions(self) -> tuple[int, ...]:
        """How many tokens the cache holds of each sequence."""
        return tuple(self._cache.lengths)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what a sequence has beyond its first tokens."""
        self._cache.truncate(length, sequence)

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        """Append int64 [S > 0] to a sequence, dense. Returns the logits after the last: float32 [vocabulary]."""
        return self._prefilled(ids, sequence)

    def step(self, ids: Sequence[int], sparse: bool) -> Tensor:
        """Append a token to each sequence. Returns the logits after them: float32 [B, vocabulary]."""
        with self._kernels.on_device(self._device):
            self._append(ids, sparse)
            return self._step.logits.clone()

    def decode_next(self, ids: Sequence[int], sparse: bool, samplers: Sequence[Sampler]) -> list[int]:
        """What each sampler chooses from the logits of `step`; the likeliest tokens are found on the device."""
        with self._kernels.on_device(self._device):
            self._append(ids, sparse)
            _, likeliest, bests = state_parts(self._step.state.cpu(), len(ids))
        chosen: list[int] = likeliest.tolist()
        self._ids.known = list(chosen)
        for n, best in enumerate(bests.tolist()):
            if not math.isfinite(best):
                raise not_finite(best)
            if samplers[n].sampling.temperature:
                chosen[n] = samplers[n].choose(self._step.logits[n])
        return chosen

    def _append(self, ids: Sequence[int], sparse: bool) -> None:
        """A step, on the current stream."""
        self._begin(list(ids), sparse)
        self._count()
