"""A decoder of one sequence or several on an NVIDIA GPU, which read every weight once for all of them. What has no room
on the GPU lies in the host's memory, and the processor computes it with the GPU (`hybrid/cpu_gpu.py`)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.activations import soft_capped
from sparsepack.models.blocks import DeltaNet, Mamba, ShortConv
from sparsepack.placement.budget import Plan
from sparsepack.placement.traffic import HitCounts, TrafficStats
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache, NewCache, new_cache
from sparsepack.runtime.cuda.attention.states import Mixer, States
from sparsepack.runtime.cuda.decoder.buffers import reads_flags
from sparsepack.runtime.cuda.decoder.model import load_model
from sparsepack.runtime.cuda.decoder.prefill import Prefill
from sparsepack.runtime.cuda.decoder.run_ahead import RunAhead
from sparsepack.runtime.cuda.decoder.step import Step, count_active, state_parts
from sparsepack.runtime.cuda.driver.device import Mirror
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.decoder import attention_of, kept_latents, moving_sequences
from sparsepack.runtime.generation.sampling import Sampler, not_finite
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.threshold_controller import ThresholdController

PREFILL_TOKENS = 2048
"""Prefill takes this many positions at once."""

DEFAULT_CACHE_TYPE = "bf16"


class CudaDecoder:
    """A `runtime.decoder.Decoder` of 1 to 8 sequences.

    Matrices keep the size that they have in the file. A step is a CUDA graph, made at the first step of its kind: its
    kernels are launched together, and the host waits for nothing but a token that it asked for. Steps sum in float32,
    prefill in float32 over products of float16. The same sequence gives the same bits every run, until `sparsepack
    tune` finds other tile configurations.

    One sequence has kernels that read what the one before leaves as soon as it is written, and a step that begins
    before the host has read its token (`RunAhead`). Of several, a column is skipped where it is inactive in all: what
    is read, and multiplied for each, is the union of the columns that are active in any. They may have different
    lengths, and their logits are those of sequences alone but for the order of sums and, in sparse steps, for the
    columns of the others, those that stand still included; what stands still costs what it has in its cache.

    sequences  -- how many, each with a cache of its own
    cache_type -- of keys and values: "bf16", "f16", or "f32" for comparisons, where prefill is slow
    kernels    -- who computes
    new_cache  -- what attends
    plan       -- of a budget: what lies in the host's memory, and how much prefill may take; None: there is none
    cpu_gpu    -- what GPU and processor compute together; None: the GPU computes all

    Raises `UserError` where the cuda backend cannot run, for an unknown cache type, for an architecture that its
    kernels do not know, and where the GPU has too little shared memory for so many sequences.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        sequences: int = 1,
        cache_type: str = DEFAULT_CACHE_TYPE,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
        plan: Plan | None = None,
        cpu_gpu: CpuGpu | None = None,
    ) -> None:
        self._kernels, self._context, self.cpu_gpu = kernels, context, cpu_gpu
        self._device = kernels.usable(device)
        _check_alone(packed)
        with kernels.on_device(self._device):
            attention = attention_of(packed, context, self._device, sequences)
            attention = replace(attention, latents=kept_latents(packed, find_backend("cuda")))
            self._cache = new_cache(attention, cache_type, self._device, kernels)
            self._model = load_model(packed, self._device, kernels, plan, cpu_gpu)
            self._states = _states_of(packed, sequences, self._device, kernels)
            together = sequences > 1 or not reads_flags(self._model)
            self._step = Step(self._model, self._cache, self._states, kernels, together)
            work = None if plan is None or plan.budget is None else plan.work
            most, record = None if work is None else work.scratch, work is None and cpu_gpu is None
            self._prefill = Prefill(self._model, self._cache, self._states, kernels, most, record)
            self._positions = None if work is None else work.positions
            self._stream = kernels.new_step_stream()
            runs_ahead = sequences == 1 and cpu_gpu is None
            self._ahead = RunAhead(self._step, kernels, self._stream) if runs_ahead else None
            if cpu_gpu is not None:
                cpu_gpu.start()
        self._ids = Mirror(self._step.ids, kernels)
        self._moving: Mirror | None = None
        self._steps: dict[tuple[bool, int | None], torch.cuda.CUDAGraph] = {}  # by `_key`
        self._stepped = 0
        if sequences > 1:
            self._check_shared_memory(sequences)

    @property
    def threads(self) -> int:
        return 1 if self.cpu_gpu is None else self.cpu_gpu.threads

    @property
    def hit_counts(self) -> HitCounts | None:
        return None if self.cpu_gpu is None else self.cpu_gpu.hit_counts

    @property
    def traffic_stats(self) -> TrafficStats | None:
        return None if self.cpu_gpu is None else self.cpu_gpu.traffic_stats(self.active(), self.stepped)

    @property
    def description(self) -> str:
        name = self._kernels.device_name(self._device)
        return name if self.cpu_gpu is None else f"{name}, {self.cpu_gpu.description}"

    @property
    def cache(self) -> CudaKvCache:
        return self._cache

    @property
    def stepped(self) -> int:
        return self._stepped

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the GPU."""
        return self._kernels.capability(self._device)

    @property
    def context(self) -> int:
        return self._context

    @property
    def vocabulary(self) -> int:
        return self._step.logits.shape[1]

    def thresholds(self) -> list[Tensor]:
        """What steps that skip compare inputs with; none where an MLP by neurons has a rule of its own."""
        sites = [site for layer in self._model.layers for site in layer.attention.values()]
        for mlp in self._model.mlps:
            if (of_mlp := getattr(mlp, "sites", None)) is None:
                return []
            sites += of_mlp.values()
        return [site.sparse.threshold for site in sites if site.sparse.threshold is not None]

    def active(self) -> dict[tuple[int, str], int]:
        active = self._ahead.active if self._ahead and self._ahead.running else self._step.active
        of, sequences = self._model, len(self._cache.lengths)
        return count_active(active, of.names, of.per_sequence, sequences, of.absent)

    @property
    def scales(self) -> tuple[float, ...]:
        if self._step.controller is None:
            return ()
        return (
            self._ahead.scales if self._ahead and self._ahead.running else tuple(self._step.controller.scales.tolist())
        )

    def control_thresholds(self, controller: ThresholdController) -> None:
        with self._kernels.on_device(self._device):
            moving = self._step.control_thresholds(controller).moving
        self._moving = None if moving is None else Mirror(moving, self._kernels)

    def reset(self) -> None:
        self._drop()
        self._cache.reset()
        self._stepped = 0
        self._step.active.zero_()
        if self._step.controller is not None:
            self._step.controller.begin()
        if self.cpu_gpu is not None:
            with self._kernels.on_device(self._device):
                self.cpu_gpu.begin_sequence()

    def truncate(self, sequence: int, length: int) -> None:
        self._drop()
        self._cache.truncate(length, sequence)
        if self._step.controller is not None:
            self._step.controller.begin(sequence)

    def copy(self, source: int, to: int, length: int) -> None:
        self._drop()
        with self._kernels.on_device(self._device):
            self._cache.copy(source, to, length)
            self._states.copy(source, to)
            if self._step.controller is not None:
                self._step.controller.begin(to)

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        self._drop()
        with self._kernels.on_device(self._device):
            self._cache.set_rope(sequence, first, cos, sin)

    def prefill(self, sequence: int, ids: Tensor, every: bool = False) -> Tensor:
        with self._kernels.on_device(self._device):
            if every:
                each = torch.empty(len(ids), self._step.logits.shape[1], device=self._device)
                self._prefill_every(sequence, ids, each)
                return each
            for piece in self._prefill_pieces(ids):
                hidden = self._dense(piece, sequence, last=True)
            logits = torch.empty_like(self._step.logits[:1])
            norm, a = self._model.output_norm, self._model.architecture
            bias, product = self._model.output_norm_bias, partial(self._kernels.product, cap=a.logit_cap)
            if bias is None:
                # A copy begins at a multiple of 16 bytes.
                product(self._model.output, hidden[-1:].clone(), logits, norm=norm, eps=a.norm_eps)
            else:
                product(self._model.output, reference.norm(hidden[-1:], norm, bias, a.norm_eps), logits)
        return logits[0]

    def _prefill_every(self, sequence: int, ids: Tensor, logits: Tensor) -> None:
        """Append ids to a sequence, dense, and write the logits after each: float32 [ids, vocabulary]."""
        model, first = self._model, 0
        for piece in self._prefill_pieces(ids):
            hidden = self._dense(piece, sequence)
            hidden = reference.norm(hidden, model.output_norm, model.output_norm_bias, model.architecture.norm_eps)
            uncapped = self._kernels.matmul(model.output, hidden)
            logits[first : first + len(piece)] = soft_capped(uncapped, model.architecture.logit_cap)
            first += len(piece)

    def prepare(self, sparse: bool) -> None:
        if max(self._cache.lengths) < self._context and self._graph(sparse) is None:
            self._drop()
            with self._kernels.on_device(self._device):
                if self.cpu_gpu is not None:
                    self.cpu_gpu.begin_pass()
                self._make_graph(sparse)
                if self.cpu_gpu is not None:
                    self.cpu_gpu.discard_pass()

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        with self._kernels.on_device(self._device):
            self._append(ids, sparse)
            return self._step.logits.clone()

    def decode_next(
        self, ids: Sequence[int | None], sparse: bool, samplers: Sequence[Sampler | None]
    ) -> list[int | None]:
        """What each sampler chooses from the logits of `step`; of one sequence on the device, of several the host
        chooses where the likeliest token is not wanted."""
        with self._kernels.on_device(self._device):
            self._append(ids, sparse)
            if self._ahead is None:
                return self._chosen(ids, samplers)
            (sampler,) = samplers
            assert sampler is not None  # a step has at least one sequence
            following = self._graph(sparse) if self._cache.lengths[0] < self._context else None
            chosen = self._ahead.choose(sampler, sparse, following)
            if following is None:
                self._ids.known = [chosen]
            return [chosen]

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        before = self._cache.sparse_from
        if before is not None:
            self._cache.sparse_from = replace(before, break_even=0)  # who measures a policy wants it as it is
        try:
            return self._teacher_forced(ids, sparse_from, sparse)
        finally:
            self._cache.sparse_from = before

    def _teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._step.logits.shape[1], device=self._device)
        with self._kernels.on_device(self._device):
            self._prefill_every(0, ids[:sparse_from], logits)
            for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
                self._append([id], sparse)
                row.copy_(self._step.logits[0])
        return logits

    def _check_shared_memory(self, sequences: int) -> None:
        matrices = [site.matrix for layer in self._model.layers for site in layer.attention.values()]
        matrices += [matrix for mlp in self._model.mlps for matrix in mlp.matrices]
        most = min(map(self._kernels.most_inputs, matrices))
        if sequences > most:
            raise UserError(
                f"{sequences} sequences: this GPU's shared memory takes {most} of this model at once; take fewer"
            )

    def _chosen(self, ids: Sequence[int | None], samplers: Sequence[Sampler | None]) -> list[int | None]:
        """What the samplers of several sequences choose; the likeliest tokens are found on the device."""
        _, likeliest, bests, _ = state_parts(self._step.state.cpu(), len(samplers))
        self._ids.known = likeliest.tolist()
        chosen: list[int | None] = list(self._ids.known)
        for n, (id, sampler, best) in enumerate(zip(ids, samplers, bests.tolist(), strict=True)):
            if id is None or sampler is None:
                chosen[n] = None
            elif not math.isfinite(best):
                raise not_finite(best)
            elif sampler.sampling.temperature:
                chosen[n] = sampler.choose(self._step.logits[n])
        return chosen

    def _prefill_pieces(self, ids: Tensor) -> list[Tensor]:
        """The ids on the GPU, int32, as many together as prefill takes; copied at once: the host waits for a copy."""
        positions = self._positions or PREFILL_TOKENS
        return [piece for piece in torch.split(ids.to(self._device, torch.int32), positions) if len(piece)]

    def _dense(self, ids: Tensor, sequence: int, last: bool = False) -> Tensor:
        """Append ids that are on the GPU already. Returns what the last block leaves: float32 [S, hidden], or where the
        last position is enough maybe [1, hidden]."""
        self._drop()
        if self.cpu_gpu is None:
            return self._prefill.run(ids, sequence, last)
        self.cpu_gpu.begin_pass()
        hidden = self._prefill.run(ids, sequence, last)
        self.cpu_gpu.end_prefill(len(ids))
        return hidden

    def _append(self, ids: Sequence[int | None], sparse: bool) -> None:
        """Put a step on the current stream, unless it runs already; the cache counts the new positions.

        Kernels step every sequence. One that stands still gets a token too, which is forgotten at once: with a
        sequence, at the position after its last; where it is full, in place of its last token.
        """
        moving, lengths = moving_sequences(ids), list(self._cache.lengths)
        for sequence in range(len(ids)):
            if sequence not in moving and lengths[sequence] == self._context:
                lengths[sequence] -= 1
                self._cache.truncate(lengths[sequence], sequence)
        self._states.check(lengths, [*moving])
        first = next(iter(moving.values()))
        if self._ahead is None or not self._ahead.continues(first, sparse):
            self._drop()
            if self._moving is not None:
                self._moving.write([int(id is not None) for id in ids])
            self._begin([first if id is None else id for id in ids], sparse)
        for sequence in range(len(ids)):
            self._cache.advance(1, sequence)
        self._cache.positions.known = list(self._cache.lengths)
        for sequence in range(len(ids)):
            if sequence in moving:
                self._states.stepped(sequence, lengths[sequence] + 1)
            else:
                self._cache.truncate(lengths[sequence], sequence)
                self._states.stood_still(sequence, lengths[sequence])
        self._stepped += 1

    def _begin(self, ids: list[int], sparse: bool) -> None:
        """Put a step on the current stream; what the processor has part in has then ended."""
        if self.cpu_gpu is not None:
            self.cpu_gpu.begin_pass()
        graph = self._graph(sparse) or self._make_graph(sparse)
        launch = partial(self._launch, graph, ids)
        if self.cpu_gpu is None:
            launch()
        else:
            self.cpu_gpu.step(launch)

    def _launch(self, graph: torch.cuda.CUDAGraph, ids: list[int]) -> None:
        self._ids.write(ids)
        self._cache.positions.write(self._cache.lengths)
        self._ids.known = self._cache.positions.known = None  # should what follows be interrupted
        self._kernels.replay(graph)

    def _drop(self) -> None:
        """Undo what a step ahead did that later steps would see."""
        if self._ahead is None or not self._ahead.running:
            return
        self._ids.known = self._cache.positions.known = None
        with self._kernels.on_device(self._device):
            self._ahead.undo()

    def _make_graph(self, sparse: bool) -> torch.cuda.CUDAGraph:
        """The graph of the next step, made by a step that leaves nothing behind."""
        record = partial(self._recorded, sparse)
        graph = self._steps[self._key(sparse)] = record() if self.cpu_gpu is None else self.cpu_gpu.discard_step(record)
        return graph

    def _recorded(self, sparse: bool) -> torch.cuda.CUDAGraph:
        before, positions = self._step.state.clone(), self._cache.positions
        self._ids.known = positions.known = None
        self._step.ids.zero_()
        positions.write(self._cache.lengths)  # what is cached there now is written again by the step itself
        run = partial(self._step.run, sparse)
        self._kernels.compile_together(run)
        graph = self._kernels.capture_graph(run, self._stream)
        self._states.recorded()
        positions.known = None
        active, _, _, lasting = state_parts(before, len(self._cache.lengths))
        self._step.active.copy_(active.view_as(self._step.active))
        self._step.lasting.copy_(lasting)
        return graph

    def _graph(self, sparse: bool) -> torch.cuda.CUDAGraph | None:
        """The graph of the next step, or None where no graph of its kind has been made."""
        return self._steps.get(self._key(sparse))

    def _key(self, sparse: bool) -> tuple[bool, int | None]:
        """The key that tells the graphs of steps apart."""
        return sparse, self._cache.selecting(sparse)


def _check_alone(packed: PackedModel) -> None:
    """Raise `UserError` for blocks that are a token mixer or an MLP alone where their buffers are not known."""
    blocks = packed.architecture.blocks
    if all(block.mixer is not None and block.mlp is not None for block in blocks):
        return
    others = packed.bases or packed.architecture.latent is not None
    if others or any(block.norms_after or block.layer_norms or block.qk_norm == "rows" for block in blocks):
        raise UserError(
            "blocks that are attention or an MLP alone, beside a basis, latents or other norms: the cuda backend does "
            "not run these together; use the reference backend"
        )
    if blocks[0].mixer is None and blocks[0].mlp is not None and blocks[0].mlp.experts is not None:
        raise UserError(
            "a mixture of experts as the first block: the cuda backend needs a token mixer before it; use the "
            "reference backend"
        )


def _states_of(packed: PackedModel, sequences: int, device: torch.device, kernels: Kernels) -> States:
    """What blocks of a model keep in place of keys and values; of most models none does."""
    a, found = packed.architecture, dict[int, Mixer]()
    for number, (block, layer) in enumerate(zip(a.blocks, packed.layers, strict=True)):
        if isinstance(block.mixer, DeltaNet):
            found[number] = kernels.delta_net_parameters(block.mixer, layer.delta_net, a.norm_eps, sequences, device)
        elif isinstance(block.mixer, Mamba):
            found[number] = kernels.mamba_parameters(
                block.mixer, layer.delta_net, a.mamba_eps or a.norm_eps, sequences, device
            )
        elif isinstance(block.mixer, ShortConv):
            found[number] = kernels.short_conv_parameters(layer.delta_net, sequences, device)
    return States(found, sequences)
