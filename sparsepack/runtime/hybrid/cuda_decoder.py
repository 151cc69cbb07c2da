"""A decoder on a GPU that has slots for some neurons, with the processor beside it for the others."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import packed as stored
from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.counts import HitCounts
from sparsepack.placement.links import Links
from sparsepack.placement.machine import MACHINES
from sparsepack.placement.ways import Ways
from sparsepack.progress import counted
from sparsepack.runtime.cuda.attention.caches import new_cache
from sparsepack.runtime.cuda.attention.kv_cache import NewCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.hybrid.boundaries import BoundariesBeside
from sparsepack.runtime.hybrid.cuda_mlps import STAGED_BYTES, CudaDivided
from sparsepack.runtime.hybrid.far_products import bytes_beside, far_matrices
from sparsepack.runtime.hybrid.gate_copies import GateCopies
from sparsepack.runtime.hybrid.handover import HandOver, next_number
from sparsepack.runtime.hybrid.placing import Placing, links_of, placing_of
from sparsepack.runtime.options import EngineOptions

ASSUMED = "pcie5"
"""Nothing was measured: the machine is taken for this one of `placement.machine.MACHINES`, whose bus is as fast as
large copies are."""
RECORDS_OVER_THE_BUS = 0.85
"""Kernels read records over the bus at this share of the speed of large copies: measured on an H200
(benchmarks/RESULTS.md)."""
MATRICES_OVER_THE_BUS = 0.9
"""Products read matrices over the bus at this share, likewise."""


Result = TypeVar("Result")


class Processor(Protocol):
    """What computes beside the GPU: `runtime/cpu/operations.py`."""

    def load_neurons(self, records: PackedMatrix) -> Any: ...

    def load_zigzag(self, matrix: PackedMatrix) -> Any: ...

    def load_gates(self, gates: PackedMatrix) -> Any: ...

    def cold_worker(
        self,
        records: Sequence[Any],
        memory: np.ndarray,
        layout: HandOver,
        threads: int | None = None,
        *,
        products: Sequence[Any] = (),
        gates: Sequence[Any] = (),
    ) -> Any: ...


class CudaHybridDecoder(CudaDecoder):
    """A `CudaDecoder` on `CudaDivided`, and between tokens the policy.

    A text begins with the placement by the artifact's frequencies, and after each token the policy sees who was active
    and says who has slots from then on, as in `HybridDecoder`; of a prompt it sees one token after the other when all
    have passed. The same text since a `reset` gives the same bits, with the same threads and links.

    Several texts share the slots: a step counts as one token, which needs the neurons that are active in any of them,
    those that stand still included; who has slots then depends on all of them.

    A step begins when the one before has ended on both sides. After one that was interrupted, slots and counts begin
    anew.

    processor -- what computes beside the GPU
    options   -- share, policy, links and `sequences`; `threads` are the processor's
    plan      -- what lies where
    measured  -- the links as they were measured on this machine for this model's records
    slow      -- as `placing_of` takes it
    activity  -- for benchmarks: who is active in the steps of a text in place of what the gates say, uint8 [steps,
                 blocks, bytes] as `following` has bits; after the last comes the first again

    Without links given or measured, they are those of `ASSUMED`.

    Raises `UserError` as `CudaDecoder`, and where the host has no memory to be pinned.
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
        measured: Links | None = None,
        slow: Callable[..., Any] | None = None,
        kernels: Kernels = KERNELS,
        new_cache: NewCache = new_cache,
        activity: Tensor | None = None,
    ) -> None:
        device = kernels.usable(device)
        self._plan = plan
        self._placed: Callable[[str | None], Placing] = lambda policy: placing_of(
            packed, replace(options, policy=policy), plan, slow
        )
        self._placing = self._placed(options.policy)
        self._known = options.links or measured
        links, self._links = links_of(options, measured, (f"as of {ASSUMED}", assumed_links(plan.parts.record)))
        staged = STAGED_BYTES if plan.budget is None else plan.work.staged
        shape, hidden = self._placing.shape, packed.architecture.hidden
        self._texts = options.sequences or 1
        far = far_matrices(packed, plan, links)
        self._beside = bytes_beside(far)
        copies = _gate_copies(plan, options)
        self._times = 1.0 if copies is None else copies.times
        with kernels.on_device(device):
            self._divided = CudaDivided(
                *(shape, hidden, plan.slots, links, device, kernels, activity, staged, self._texts),
                far=far,
                copies=copies,
            )
        records: list[Any] = []
        gates: list[Any] = []

        def load_mlp(mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place) -> CudaMlp:
            assert isinstance(mlp, stored.NeuronMlp)
            if copies is not None:
                gates.append(processor.load_gates(mlp.gate) if len(records) in copies.blocks else None)
            records.append(processor.load_neurons(mlp.records))
            return self._divided.load_mlp(mlp, device, kernels, place)

        super().__init__(
            packed,
            device,
            context,
            self._texts,
            cache_type,
            kernels,
            new_cache,
            load_mlp,
            runs_ahead=False,
            plan=plan,
            load_attention=self._divided.load_attention,
        )
        products = [processor.load_zigzag(each.beside) for each in far]
        memory, layout = self._divided.memory, self._divided.layout
        self._worker = processor.cold_worker(
            *(records, memory, layout, options.threads), products=products, gates=gates
        )
        self._number = 0  # of the step that ran last
        self._boundaries = BoundariesBeside(self._placing.follows, self._divided, self._count_anew)
        self.reset()

    @property
    def threads(self) -> int:
        return int(self._worker.threads)

    @property
    def hit_counts(self) -> HitCounts:
        return self._boundaries.counts

    @property
    def ways(self) -> Ways:
        traffic = replace(self._divided.traffic, managed=self._boundaries.seconds)
        return Ways(traffic, self._plan, self._known, self._beside, self._times)

    @property
    def description(self) -> str:
        beside = counted(self.threads, "thread")
        said = [super().description, f"{beside} beside it", self._placing.description, str(self._links)]
        if self._plan.copied:
            copied = counted(self._plan.copied, "block")
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

    def _count_anew(self) -> None:
        self._kernels.synchronize(self._device)  # should a step have been interrupted
        self._divided.begin_text(self._number)

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
        traffic = self._divided.keep_traffic()
        graph = self._answered(partial(super()._make_graph, sparse))
        self._divided.forget_step(traffic)
        return graph

    def _begin(self, ids: list[int], sparse: bool) -> None:
        self._boundaries.begin_pass()
        if self._graph(sparse) is None:
            self._make_graph(sparse)
        self._answered(lambda: self._step_and_move(ids, sparse))
        self._boundaries.stepped(self._number)

    def _step_and_move(self, ids: list[int], sparse: bool) -> None:
        super()._begin(ids, sparse)
        self._boundaries.beside()

    def _answered(self, run: Callable[[], Result]) -> Result:
        """Run a step, once, and wait until both sides have ended it."""
        self._number = next_number(self._number)
        try:
            self._of_worker(lambda number: self._worker.begin(number, self._texts))
            result = run()
            # First the GPU, which waits for the worker within a limit: what a kernel did wrong is raised at once, where
            # the worker would wait for a request that never comes. Copies for moves may go on.
            self._kernels.wait_for_step()
            self._of_worker(self._worker.end)
            return result
        except BaseException:
            with suppress(RuntimeError):
                self._kernels.synchronize(self._device)
            raise

    def _of_worker(self, call: Callable[[int], None]) -> None:
        try:
            call(self._number)
        except RuntimeError as error:
            raise UserError(f"the processor beside the GPU: {error}") from error


def _gate_copies(plan: Plan, options: EngineOptions) -> GateCopies | None:
    """The blocks whose gates have no room on the card, but copies of them."""
    if not plan.copied:
        return None
    assert options.gate_copy is not None
    return GateCopies(range(plan.gates, plan.gates + plan.copied), options.gate_copy)


def assumed_links(record: int) -> Links:
    """The links where none were measured, for records of so many bytes."""
    links = MACHINES[ASSUMED].rates(record).links
    return replace(links, bus=RECORDS_OVER_THE_BUS * links.bus, far_bus=MATRICES_OVER_THE_BUS * links.far_bus)
