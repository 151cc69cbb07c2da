"""What decoders of one sequence and of several share: where they are in their texts, and how they go on."""

import torch
from torch import Tensor

from sparsepack.models.packed import PackedModel
from sparsepack.runtime.cuda.kernel_set import Kernels
from sparsepack.runtime.cuda.kv_cache import NewCache
from sparsepack.runtime.cuda.mirror import Mirror
from sparsepack.runtime.cuda.model import load_attention, load_model
from sparsepack.runtime.cuda.prefill import Prefill
from sparsepack.runtime.cuda.step import Step, counted

CHUNK = 2048
"""Positions that prefill takes at once."""


class SequencesDecoder:
    """A packed model on a GPU, with the texts in its cache.

    Matrices keep the size that they have in the file. A step is a CUDA graph, made at the first step of its kind: its
    kernels are launched together, and the host waits for nothing but a token that it asked for. Steps sum in float32,
    prefill in float32 over products of float16. The same text gives the same bits every run, until `sparsepack tune`
    finds other tile configurations.

    together -- as `Step` takes it
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        sequences: int,
        cache_type: str,
        kernels: Kernels,
        new_cache: NewCache,
        *,
        together: bool,
    ) -> None:
        self._kernels = kernels
        self._device = kernels.usable(device)
        with kernels.on_device(self._device):
            attention = load_attention(packed, self._device, context, sequences)
            self._cache = new_cache(attention, cache_type, self._device, kernels)
            self._model = load_model(packed, self._device, kernels)
            self._step = Step(self._model, self._cache, kernels, together)
            self._prefill = Prefill(self._model, self._cache, kernels)
            self._stream = kernels.new_stream()
        self._ids = Mirror(self._step.ids, kernels)
        self._steps: dict[tuple[bool, bool, bool], torch.cuda.CUDAGraph] = {}  # by `_kind`
        self._stepped = 0

    @property
    def description(self) -> str:
        return self._kernels.device_name(self._device)

    @property
    def attention_from(self) -> int | None:
        return self._cache.from_tokens

    @property
    def cache_type(self) -> str:
        return self._cache.type

    @property
    def stepped(self) -> int:
        """How many steps since the reset."""
        return self._stepped

    def active(self) -> dict[tuple[int, str], int]:
        """Columns that were active in any sequence, per (layer, site), summed over those steps."""
        return counted(self._step.active)

    def reset(self) -> None:
        """Forget the texts and what was counted."""
        self._cache.reset()
        self._stepped = 0
        self._step.active.zero_()

    def _prefilled(self, ids: Tensor, sequence: int) -> Tensor:
        """Append int64 [S > 0] to a sequence, dense. Returns the logits after the last: float32 [vocabulary]."""
        with self._kernels.on_device(self._device):
            for chunk in self._chunks(ids):
                hidden = self._dense(chunk, sequence)
            logits = torch.empty_like(self._step.logits[:1])
            norm, eps = self._model.output_norm, self._model.architecture.norm_eps
            # A copy begins at a multiple of 16 bytes.
            self._kernels.product(self._model.output, hidden[-1:].clone(), logits, norm=norm, eps=eps)
        return logits[0]

    def _chunks(self, ids: Tensor) -> list[Tensor]:
        """Ids on the GPU, int32, in chunks, none empty; brought at one time, since the host waits for a copy."""
        return [chunk for chunk in torch.split(ids.to(self._device, torch.int32), CHUNK) if len(chunk)]

    def _dense(self, ids: Tensor, sequence: int) -> Tensor:
        """Append a chunk of ids that are there; what the last block leaves: float32 [S, hidden]."""
        return self._prefill.run(ids, sequence)

    def _begin(self, ids: list[int], sparse: bool) -> None:
        """Put a step on the current stream."""
        graph = self._graph(sparse) or self._captured_step(sparse)
        self._ids.write(ids)
        self._cache.positions.write(self._cache.lengths)
        self._ids.known = self._cache.positions.known = None  # should what follows be interrupted
        self._kernels.replay(graph)

    def _count(self) -> None:
        """A step that has begun appends to every sequence."""
        lengths = self._cache.lengths
        for sequence in range(len(lengths)):
            self._cache.advance(1, sequence)
        self._cache.positions.known = list(lengths)
        self._stepped += 1

    def _captured_step(self, sparse: bool) -> torch.cuda.CUDAGraph:
        before, positions = self._step.active.clone(), self._cache.positions
        self._ids.known = positions.known = None
        self._step.ids.zero_()
        positions.write(self._cache.lengths)  # what is cached there now is written again by the step itself
        graph = self._kernels.captured(lambda: self._step.run(sparse), self._stream)
        positions.known = None
        self._step.active.copy_(before)
        self._steps[self._kind(sparse)] = graph
        return graph

    def _graph(self, sparse: bool) -> torch.cuda.CUDAGraph | None:
        """The step that comes next, where one of its kind has been made."""
        return self._steps.get(self._kind(sparse))

    def _kind(self, sparse: bool) -> tuple[bool, bool, bool]:
        return sparse, self._cache.selects(sparse), self._cache.exact
