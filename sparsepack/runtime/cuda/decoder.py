"""A decoder of one text on an NVIDIA GPU."""

import math

import torch
from torch import Tensor

from sparsepack.models.packed import PackedModel
from sparsepack.runtime import reference
from sparsepack.runtime.cuda.caches import new_cache
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.kv_cache import NewCache
from sparsepack.runtime.cuda.sequences import SequencesDecoder
from sparsepack.runtime.cuda.step import counted, state_parts
from sparsepack.runtime.sampling import Sampler, Sampling, not_finite

MOST_SAMPLERS = 8
"""Ways of sampling whose graphs are kept."""

DEFAULT_CACHE_TYPE = "bf16"


class CudaDecoder(SequencesDecoder):
    """See `runtime.decoder.Decoder`, and `SequencesDecoder` for what it takes and computes.

    The step after a choice begins before the host has read the token: most callers append what was chosen.

    cache_type -- of keys and values: "bf16", "f16", or "f32" for comparisons, where prefill is slow
    kernels    -- who computes
    new_cache  -- what attends

    Raises `UserError` where the cuda backend cannot run, for an unknown cache type, or for an architecture that its
    kernels do not know.
    """

    threads = 1

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        cache_type: str = DEFAULT_CACHE_TYPE,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
    ) -> None:
        super().__init__(packed, device, context, 1, cache_type, kernels, new_cache, together=False)
        self._context = context
        with kernels.on_device(self._device):
            self._sampling_memory = kernels.new_graph_pool()
        self._draw = torch.zeros((), dtype=torch.float64, device=self._device)
        # What a step left, as the host has it.
        self._state = kernels.host_memory(self._step.state)
        self._active, self._chosen, self._best = state_parts(self._state, 1)
        self._brought = kernels.new_event()
        self._samplers: dict[tuple[float, int | None, float | None], torch.cuda.CUDAGraph] = {}
        # A step that runs ahead of its call: its token (None until the host has read it) and whether it is sparse.
        self._ahead: tuple[int | None, bool] | None = None

    @property
    def position(self) -> int:
        return self._cache.lengths[0]

    def active(self) -> dict[tuple[int, str], int]:
        return super().active() if self._ahead is None else counted(self._active)

    def reset(self) -> None:
        self._drop()
        super().reset()

    def truncate(self, length: int) -> None:
        self._drop()
        self._cache.truncate(length)

    def prefill(self, ids: Tensor) -> Tensor:
        return self._prefilled(ids, 0)

    def step(self, id: int, sparse: bool) -> Tensor:
        with self._kernels.on_device(self._device):
            self._append(id, sparse)
            return self._step.logits[0].clone()

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        how = sampler.sampling
        with self._kernels.on_device(self._device):
            self._append(id, sparse)
            if how.temperature:
                self._draw.fill_(sampler.draw())
                self._kernels.replay(self._sampler(how))
            self._state.copy_(self._step.state, non_blocking=True)
            self._brought.record()
            following = self._graph(sparse) if self.position < self._context else None
            if following:
                self._ahead = (None, sparse)
                self._kernels.replay(following)
            self._brought.synchronize()
        best = float(self._best)
        if not math.isfinite(best):
            raise not_finite(best)
        chosen = int(self._chosen)
        if self._ahead is None:
            self._ids.known = [chosen]
        else:
            self._ahead = (chosen, sparse)
        return chosen

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        self._cache.exact = True  # who measures a policy wants it as it is
        try:
            return self._teacher_forced(ids, sparse_from, sparse)
        finally:
            self._cache.exact = False

    def _teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._step.logits.shape[1], device=self._device)
        norm, eps = self._model.output_norm, self._model.architecture.norm_eps
        with self._kernels.on_device(self._device):
            first = 0
            for chunk in self._chunks(ids[:sparse_from]):
                hidden = reference.rms_norm(self._dense(chunk, 0), norm, eps)
                logits[first : first + len(chunk)] = self._kernels.matmul(self._model.output, hidden)
                first += len(chunk)
            for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
                self._append(id, sparse)
                row.copy_(self._step.logits[0])
        return logits

    def _append(self, id: int, sparse: bool) -> None:
        """A step, on the current stream, unless it runs already."""
        if self._ahead == (id, sparse):
            self._ahead = None
        else:
            self._drop()
            self._begin([id], sparse)
        self._count()

    def _dense(self, ids: Tensor, sequence: int) -> Tensor:
        self._drop()
        return super()._dense(ids, sequence)

    def _drop(self) -> None:
        """Undo what a step ahead did that later steps would see."""
        if self._ahead is None:
            return
        self._ahead = self._ids.known = self._cache.positions.known = None
        with self._kernels.on_device(self._device):
            self._step.active.copy_(self._active, non_blocking=True)

    def _sampler(self, how: Sampling) -> torch.cuda.CUDAGraph:
        """The choice of a token other than the likeliest, from a step's logits and the draw."""
        key = (how.temperature, how.top_k, how.top_p)
        if key not in self._samplers:

            def choose() -> None:
                self._step.ids.copy_(self._kernels.sample(self._step.logits[0], self._draw, *key))

            if len(self._samplers) == MOST_SAMPLERS:
                del self._samplers[next(iter(self._samplers))]
            self._samplers[key] = self._kernels.captured(choose, self._stream, self._sampling_memory)
        return self._samplers[key]
