"""A decoder that computes whole tokens on an NVIDIA GPU, steps as CUDA graphs."""

import math

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.architecture import Architecture
from sparsepack.models.packed import PackedModel
from sparsepack.runtime import reference
from sparsepack.runtime.cuda import rows
from sparsepack.runtime.cuda.attention import MOST_GROUP, MOST_HEAD_DIM
from sparsepack.runtime.cuda.choose import sampled
from sparsepack.runtime.cuda.device import usable
from sparsepack.runtime.cuda.graph import captured, replay
from sparsepack.runtime.cuda.model import load_model, new_cache
from sparsepack.runtime.cuda.prefill import Prefill
from sparsepack.runtime.cuda.sequences import counted, state_parts
from sparsepack.runtime.cuda.step import Step
from sparsepack.runtime.sampling import Sampler, Sampling, not_finite

CHUNK = 2048
"""Positions that prefill takes at once."""
MOST_SAMPLERS = 8
"""Ways of sampling whose graphs are kept."""

DEFAULT_CACHE_TYPE = "bf16"


class CudaDecoder:
    """See `runtime.decoder.Decoder`.

    Matrices keep the size that they have in the file. A step is a CUDA graph, made at the first step of its kind: its
    kernels are launched together, and the host waits for nothing but a token that it asked for. Steps sum in float32,
    prefill in float32 over products of float16. The cache takes 4 bytes * layers * kv_heads * head_dim a position (8
    for "f32"). The same text gives the same bits every run, until `sparsepack profile` finds other geometries.

    cache_type -- of keys and values: "bf16", "f16", or "f32" for comparisons, where prefill is slow

    Raises `UserError` where the cuda backend cannot run, for an unknown cache type, or for an architecture that its
    kernels do not know.
    """

    threads = 1

    def __init__(
        self, packed: PackedModel, device: torch.device, context: int, cache_type: str = DEFAULT_CACHE_TYPE
    ) -> None:
        self._device = usable(device)
        check_heads(packed.architecture)
        self.cache_type = cache_type
        self._context = context
        with torch.cuda.device(self._device):
            cache = new_cache(packed.architecture, context, cache_type, self._device)
            self._model = load_model(packed, self._device, context)
            self._step = Step(self._model, cache)
            self._prefill = Prefill(self._model, cache)
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._sampling_memory = torch.cuda.graph_pool_handle()
        self._draw = torch.zeros((), dtype=torch.float64, device=self._device)
        # What a step left, as the host has it.
        self._state = host_memory(self._step.state)
        self._active, self._chosen, self._best = state_parts(self._state, 1)
        self._brought = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._steps: dict[bool, torch.cuda.CUDAGraph] = {}
        self._samplers: dict[tuple[float, int | None, float | None], torch.cuda.CUDAGraph] = {}
        # What the GPU has as the id to append and as its position, where that is known here.
        self._id_there: int | None = None
        self._position_there: int | None = None
        self._position = self._stepped = 0
        # A step that runs ahead of its call: its token (None until the host has read it) and whether it is sparse.
        self._ahead: tuple[int | None, bool] | None = None

    @property
    def description(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def position(self) -> int:
        return self._position

    @property
    def stepped(self) -> int:
        return self._stepped

    def active(self) -> dict[tuple[int, str], int]:
        return counted(self._step.active if self._ahead is None else self._active)

    def reset(self) -> None:
        self._drop()
        self._position = self._stepped = 0
        self._step.active.zero_()

    def prefill(self, ids: Tensor) -> Tensor:
        with torch.cuda.device(self._device):
            for chunk in torch.split(self._there(ids), CHUNK):
                hidden = self._dense(chunk)
            logits = torch.empty_like(self._step.logits)
            norm, eps = self._model.output_norm, self._model.architecture.norm_eps
            # A copy begins at a multiple of 16 bytes.
            rows.product(self._model.output, hidden[-1:].clone(), logits, norm=norm, eps=eps)
        return logits[0]

    def step(self, id: int, sparse: bool) -> Tensor:
        with torch.cuda.device(self._device):
            self._append(id, sparse)
            return self._step.logits[0].clone()

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        """The next step begins before the host has read the token: most callers append what was chosen."""
        how = sampler.sampling
        with torch.cuda.device(self._device):
            self._append(id, sparse)
            if how.temperature:
                self._draw.fill_(sampler.draw())
                replay(self._sampler(how))
            self._state.copy_(self._step.state, non_blocking=True)
            self._brought.record()
            if self._position < self._context:
                self._ahead = (None, sparse)
                replay(self._steps[sparse])
            self._brought.synchronize()
        best = float(self._best)
        if not math.isfinite(best):
            raise not_finite(best)
        chosen = int(self._chosen)
        if self._ahead is None:
            self._id_there = chosen
        else:
            self._ahead = (chosen, sparse)
        return chosen

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._step.logits.shape[1], device=self._device)
        norm, eps = self._model.output_norm, self._model.architecture.norm_eps
        with torch.cuda.device(self._device):
            dense = self._there(ids[:sparse_from])
            for first in range(0, sparse_from, CHUNK):
                hidden = reference.rms_norm(self._dense(dense[first : first + CHUNK]), norm, eps)
                logits[first : first + len(hidden)] = rows.matmul(self._model.output, hidden)
            for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
                self._append(id, sparse)
                row.copy_(self._step.logits[0])
        return logits

    def _there(self, ids: Tensor) -> Tensor:
        """Ids on the GPU, int32; all chunks at one time, since the host waits for a copy."""
        return ids.to(self._device, torch.int32)

    def _dense(self, ids: Tensor) -> Tensor:
        """Append a chunk of ids that are there; what the last block leaves: float32 [S, hidden]."""
        self._drop()
        hidden = self._prefill.run(ids, self._position)
        self._position += len(ids)
        return hidden

    def _append(self, id: int, sparse: bool) -> None:
        """A step, on the current stream, unless it runs already."""
        if self._ahead == (id, sparse):
            self._ahead = None
        else:
            self._drop()
            self._begin(id, sparse)
        self._position += 1
        self._stepped += 1
        self._position_there = self._position

    def _drop(self) -> None:
        """Undo what a step ahead did that later steps would see."""
        if self._ahead is None:
            return
        self._ahead = self._id_there = self._position_there = None
        with torch.cuda.device(self._device):
            self._step.active.copy_(self._active, non_blocking=True)

    def _begin(self, id: int, sparse: bool) -> None:
        graph = self._steps.get(sparse) or self._captured_step(sparse)
        if self._id_there != id:
            self._step.ids.fill_(id)
        if self._position_there != self._position:
            self._step.positions.fill_(self._position)
        self._id_there = self._position_there = None  # should what follows be interrupted
        replay(graph)

    def _captured_step(self, sparse: bool) -> torch.cuda.CUDAGraph:
        before = self._step.active.clone()
        self._id_there = self._position_there = None
        self._step.ids.zero_()
        self._step.positions.fill_(self._position)  # what is cached there now is written again by the step itself
        self._steps[sparse] = captured(lambda: self._step.run(sparse), self._stream)
        self._step.active.copy_(before)
        return self._steps[sparse]

    def _sampler(self, how: Sampling) -> torch.cuda.CUDAGraph:
        """The choice of a token other than the likeliest, from a step's logits and the draw."""
        key = (how.temperature, how.top_k, how.top_p)
        if key not in self._samplers:

            def choose() -> None:
                self._step.ids.copy_(sampled(self._step.logits[0], self._draw, *key))

            if len(self._samplers) == MOST_SAMPLERS:
                del self._samplers[next(iter(self._samplers))]
            self._samplers[key] = captured(choose, self._stream, self._sampling_memory)
        return self._samplers[key]


def host_memory(like: Tensor) -> Tensor:
    """Where the host reads what lies on the GPU: copies to it need not be waited for one by one."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def check_heads(architecture: Architecture) -> None:
    """Raise `UserError` for attention that the kernels do not know."""
    group = architecture.heads / architecture.kv_heads
    if group > MOST_GROUP or architecture.head_dim > MOST_HEAD_DIM or architecture.head_dim % 2:
        raise UserError(
            f"a model with heads of {architecture.head_dim} channels, {group:g} for each key head: the cuda backend "
            f"runs an even number up to {MOST_HEAD_DIM}, and up to {MOST_GROUP}; use the reference backend"
        )
