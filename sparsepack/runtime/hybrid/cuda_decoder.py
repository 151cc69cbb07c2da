"""A decoder on a GPU that has slots for some neurons, with the processor beside it for the others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.placement.traffic import HitCounts, TrafficStats
from sparsepack.progress import format_count
from sparsepack.runtime.cuda.attention.caches import new_cache
from sparsepack.runtime.cuda.attention.kv_cache import NewCache
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.hybrid.beside import ASSUMED, CudaBesideDecoder, Processor, assumed_links
from sparsepack.runtime.hybrid.boundaries import BoundariesBeside
from sparsepack.runtime.hybrid.cuda_mlps import STAGED_BYTES, CudaDivided
from sparsepack.runtime.hybrid.far_products import bytes_beside, far_matrices
from sparsepack.runtime.hybrid.gate_copies import GateCopies
from sparsepack.runtime.hybrid.placing import Placing, links_of, placing_of
from sparsepack.runtime.options import EngineOptions


class CudaHybridDecoder(CudaBesideDecoder):
    """A `CudaBesideDecoder` on `CudaDivided`, and between tokens the policy.

    A text begins with the placement by the artifact's frequencies, and after each token the policy sees who was active
    and says who has slots from then on, as in `HybridDecoder`; of a prompt it sees one token after the other when all
    have passed. The same text since a `reset` gives the same bits, with the same threads and links.

    Several texts share the slots: a step counts as one token, which needs the neurons that are active in any of them,
    those that stand still included; who has slots then depends on all of them.

    After a step that was interrupted, slots and counts begin anew.

    processor -- what computes beside the GPU
    options   -- share, policy, links and `sequences`; `threads` are the processor's
    plan      -- what lies where
    measured  -- the links as they were measured on this machine for this model's records
    slow      -- as `placing_of` takes it
    activity  -- for benchmarks: who is active in the steps of a text in place of what the gates say, uint8 [steps,
                 blocks, bytes] as `following` has bits; after the last comes the first again

    Without links given or measured, they are those of `ASSUMED`.

    Raises `UserError` as `CudaBesideDecoder`.
    """

    def __init__(
        self,
        packed: PackedModel,
        processor: Processor,
        device: torch.device,
        context: int,
        cache_type: str,
        options: EngineOptions,
        plan: Plan,
        measured: BandwidthProfile | None = None,
        slow: Callable[..., Any] | None = None,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
        activity: Tensor | None = None,
    ) -> None:
        device = kernels.usable(device)
        self._placed: Callable[[str | None], Placing] = lambda policy: placing_of(
            packed, replace(options, policy=policy), plan, slow
        )
        self._placing = self._placed(options.policy)
        self._known = options.links or measured
        links, self._links = links_of(options, measured, (f"as of {ASSUMED}", assumed_links(plan.parts.record)))
        staged = STAGED_BYTES if plan.budget is None else plan.work.staged
        shape, hidden = self._placing.shape, packed.architecture.hidden
        texts = options.sequences or 1
        far = far_matrices(packed, plan, links)
        self._beside = bytes_beside(far)
        copies = _gate_copies(plan, options)
        self._times = 1.0 if copies is None else copies.times
        with kernels.on_device(device):
            self._divided = CudaDivided(
                *(shape, hidden, plan.slots, links, device, kernels, activity, staged, texts),
                far=far,
                copies=copies,
            )
        records: list[Any] = []
        gates: list[Any] = []

        def load_mlp(
            mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place, of_records: Place
        ) -> CudaMlp:
            assert isinstance(mlp, stored.NeuronMlp)
            if copies is not None:
                gates.append(processor.load_gates(mlp.gate) if len(records) in copies.blocks else None)
            records.append(processor.load_neurons(mlp.records))
            return self._divided.load_mlp(mlp, device, kernels, place, of_records)

        def new_worker() -> Any:
            products = [processor.load_zigzag(each.beside) for each in far]
            memory, layout = self._divided.memory, self._divided.layout
            return processor.cold_worker(*(records, memory, layout, options.threads), products=products, gates=gates)

        super().__init__(
            *(packed, device, context, texts, cache_type, kernels, new_cache, plan),
            *(self._divided, load_mlp, new_worker),
        )
        self._boundaries = BoundariesBeside(self._placing.follows, self._divided, self._count_anew)
        self.reset()

    @property
    def hit_counts(self) -> HitCounts:
        return self._boundaries.counts

    @property
    def traffic_stats(self) -> TrafficStats:
        traffic = replace(self._divided.traffic, managed=self._boundaries.seconds)
        return TrafficStats(traffic, self.hit_counts, self._plan, self._known, self._beside, times=self._times)

    @property
    def description(self) -> str:
        said = [super().description, self._placing.description, str(self._links)]
        if self._plan.copied:
            copied = format_count(self._plan.copied, "block")
            said.append(f"copies of the gates of {copied}, which list {self._times:g} times as many as are active")
        return ", ".join(said)

    def follow(self, policy: str) -> None:
        """Let another policy say who has slots, and forget the text: comparing policies loads a model once."""
        self._placing = self._placed(policy)
        self._boundaries = BoundariesBeside(self._placing.follows, self._divided, self._count_anew)
        self.reset()

    def reset(self) -> None:
        super().reset()
        with self._kernels.on_device(self._device):
            self._boundaries.begin_text()

    def _dense(self, ids: Tensor, sequence: int) -> Tensor:
        self._boundaries.begin_pass()
        hidden = super()._dense(ids, sequence)
        self._boundaries.passed(self._divided.prefill_bits(), prompt=len(ids))
        return hidden

    def prepare(self, sparse: bool) -> None:
        self._boundaries.begin_pass()
        super().prepare(sparse)
        self._boundaries.nothing_passed()

    def _make_graph(self, sparse: bool) -> torch.cuda.CUDAGraph:
        self._boundaries.catch_up()  # the step that makes the graph writes bits, too
        return super()._make_graph(sparse)

    def _begin(self, ids: list[int], sparse: bool) -> None:
        self._boundaries.begin_pass()
        super()._begin(ids, sparse)
        self._boundaries.stepped(self._number)

    def _run_step(self, ids: list[int], sparse: bool) -> None:
        super()._run_step(ids, sparse)
        self._boundaries.beside()


def _gate_copies(plan: Plan, options: EngineOptions) -> GateCopies | None:
    """The blocks whose gates have no room on the card, but copies of them."""
    if not plan.copied:
        return None
    assert options.gate_copy is not None
    return GateCopies(range(plan.gates, plan.gates + plan.copied), options.gate_copy)
