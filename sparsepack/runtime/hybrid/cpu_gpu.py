"""What lies in the host's memory of a model that a GPU decodes: the processor computes it with the GPU, step by step.

GPU        what lies on the card | asks | first bands of matrices, some neurons, over the bus | takes the answers
processor                               | last bands, the other neurons without slots         |
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import PackedModel
from sparsepack.models.family import ATTENTION_SITES
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import MACHINES, BandwidthProfile
from sparsepack.placement.traffic import HitCounts, Traffic, TrafficStats
from sparsepack.progress import format_count
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp, DenseMlp, LastMlp
from sparsepack.runtime.cuda.decoder.sites import CudaSite, Gate, ZigzagGate, load_gate
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.hybrid.mailbox import Mailbox, next_number
from sparsepack.runtime.hybrid.offloaded import (
    SITES,
    GpuMailbox,
    OffloadedSites,
    cpu_bytes,
    kind_of,
    offloaded_matrices,
    sites_of,
)
from sparsepack.runtime.hybrid.policy import TokenBoundaries, find_placing
from sparsepack.runtime.hybrid.slots import STAGED_BYTES, GateCopies, NeuronSlots, SlotNeuronMlp
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
    """What computes with the GPU: `runtime/cpu/operations.py`."""

    def load_neurons(self, records: PackedMatrix) -> Any: ...

    def load_zigzag(self, matrix: PackedMatrix, *, absent: int = 0) -> Any: ...

    def load_gates(self, gates: PackedMatrix) -> Any: ...

    def cold_worker(
        self,
        records: Sequence[Any],
        memory: np.ndarray,
        layout: Mailbox,
        threads: int | None = None,
        *,
        products: Sequence[Any] = (),
        gates: Sequence[Any] = (),
    ) -> Any: ...


class CpuGpu:
    """The part of a decoder's model that GPU and processor compute together. A step begins when the one before has
    ended on both sides.

    Of a model by neurons, some neurons have slots. A sequence begins with the placement by the artifact's frequencies,
    and after each token the policy sees who was active and says who has slots from then on; of a prompt it sees one
    token after the other when all have passed. Several sequences share the slots: a step counts as one token, which
    needs the neurons that are active in any of them, those that stand still included. Of a model of sites nothing
    moves.

    The same sequence since a `begin_sequence` gives the same bits, with the same threads and bandwidth profile. A pass
    that is interrupted, by Ctrl-C or an error, may leave a policy that knows of moves which were not made, and sides
    that count differently: the next pass begins with slots and counts as a sequence does.

    processor -- what computes beside the GPU
    options   -- share, policy, bandwidth profile and `sequences`; `threads` are the processor's
    plan      -- what lies where
    measured  -- the bandwidth profile measured on this machine for records as wide as this model
    slow      -- the native `SlowPolicy`, as `find_placing` takes it
    activity  -- as `EngineOptions` has it

    Without one, given or measured, it is that of `ASSUMED`. Raises `UserError` where the host has no memory to be
    pinned.
    """

    def __init__(
        self,
        packed: PackedModel,
        processor: Processor,
        device: torch.device,
        options: EngineOptions,
        plan: Plan,
        measured: BandwidthProfile | None = None,
        slow: Callable[..., Any] | None = None,
        kernels: Kernels = KERNELS,
        activity: Tensor | None = None,
    ) -> None:
        a, record, by_neurons = packed.architecture, plan.parts.record, packed.mlp_kind.by_count
        self._packed, self._processor, self._options, self._plan, self._slow = packed, processor, options, plan, slow
        self._device, self._kernels, self._sequences = kernels.usable(device), kernels, options.sequences or 1
        assumed = default_profile(record)
        if not by_neurons:
            assumed = assumed.of_columns(record)
            measured = None if measured is None else measured.of_columns(record)
        self._known = options.bandwidth or measured
        self._bandwidth_source = (
            "given" if options.bandwidth else "measured" if measured else f"assumed as of {ASSUMED}"
        )
        bandwidth = self._known or assumed
        self.offloaded = offloaded_matrices(packed, plan, bandwidth)
        self._copies = None
        if plan.copied:
            assert options.gate_copy is not None
            self._copies = GateCopies(range(plan.gates, plan.gates + plan.copied), options.gate_copy)
        shape = a.layers, a.intermediate if by_neurons else 0
        layout = Mailbox(*shape, a.hidden, self._sequences, tuple(each.request for each in self.offloaded))
        self.slots: NeuronSlots | None = None
        with kernels.on_device(self._device):
            self.mailbox = GpuMailbox(layout, self._device, kernels)
            self._sites = OffloadedSites(self.offloaded, self.mailbox, self._device, kernels, has_lists=by_neurons)
            if by_neurons:
                self.slots = NeuronSlots(
                    *(shape, a.hidden, plan.slots, bandwidth, self.mailbox, self._device, kernels, activity),
                    staged=STAGED_BYTES if plan.budget is None else plan.work.staged,
                    copies=self._copies,
                )
                self._follow(options.policy)
        self._records: list[Any] = []
        self._gates: list[Any] = []
        self._loaded = 0
        self.worker: Any = None
        self._number = 0  # of the step that ran last
        self._interrupted = True  # no text has begun

    def load_attention(
        self, sites: Mapping[str, stored.PackedSite], device: torch.device, kernels: Kernels, place: Place
    ) -> dict[str, CudaSite]:
        """The sites of the next block's attention, where they shall lie."""
        return self._sites.load(self._loaded, sites, dict.fromkeys(sites, place))

    def load_mlp(
        self, mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place
    ) -> CudaMlp:
        """The next block's MLP: its gate, or gate and up, and down where they shall lie, its records in the host's
        memory."""
        block, self._loaded = self._loaded, self._loaded + 1
        if isinstance(mlp, stored.DenseMlp):
            sites = self._sites.load(block, mlp.sites, {"mlp_in": place, "mlp_mid": of_down})
            is_last = self._loaded == self.mailbox.layout.blocks
            return LastMlp(sites, self.mailbox.number) if is_last else DenseMlp(sites)
        assert isinstance(mlp, stored.NeuronMlp)
        assert self.slots is not None
        copied, gate_of_worker = self.slots.copied(block), None
        gate: Gate
        if copied is not None:
            gate_of_worker = self._processor.load_gates(mlp.gate)
            gate = copied.load(mlp, block, device)
        elif mlp.gate.format.order == "zigzag":
            site = stored.PackedSite(mlp.gate, None, None, (mlp.gate.rows,))
            gate = ZigzagGate(self._sites.load(block, {MLP_GATE: site}, {MLP_GATE: place})[MLP_GATE])
        else:
            gate = load_gate(mlp, device, kernels, place)
        if self._copies is not None:
            self._gates.append(gate_of_worker)
        self._records.append(self._processor.load_neurons(mlp.records))
        records = self.slots.load_records(mlp.records, block)
        return SlotNeuronMlp(gate, records, block, self.slots.division(block), self.slots)

    def start(self) -> None:
        """Begin a sequence, when the model is loaded."""
        products = [self._processor.load_zigzag(each.cpu_part, absent=each.first) for each in self.offloaded]
        mailbox, threads = self.mailbox, self._options.threads
        self.worker = self._processor.cold_worker(
            *(self._records, mailbox.memory, mailbox.layout, threads), products=products, gates=self._gates
        )
        self._records, self._gates = [], []
        self.begin_sequence()

    @property
    def threads(self) -> int:
        return int(self.worker.threads)

    @property
    def description(self) -> str:
        """For people: threads, what lies where, and where the bandwidth profile comes from."""
        plan, bandwidth = self._plan, f"links {self._bandwidth_source}"
        said = [f"{format_count(self.threads, 'thread')} beside it"]
        if self.slots is not None:
            said += [self._placing.description, bandwidth]
            if self._copies is not None:
                copied = format_count(plan.copied, "block")
                said.append(
                    f"copies of the gates of {copied}, which list {self._copies.times:g} times as many as are active"
                )
            return ", ".join(said)
        on_card = {"attention": plan.attention, "gate and up": plan.gates, "down": plan.downs}
        blocks = plan.parts.blocks
        if len(plan.parts.levels) > 1:
            most = {name: count for name, count in on_card.items() if count}
            one_more = ", ".join(f"{name} of {format_count(count, 'block')}" for name, count in most.items())
            said.append(
                f"of every matrix {format_count(plan.planes, 'plane')} on the card"
                + (f", one more of {one_more}" if most else "")
            )
            return ", ".join([*said, *([] if plan.output else ["in the host's memory the output matrix"]), bandwidth])
        host = [
            f"{name} of {format_count(blocks - count, 'block')}" for name, count in on_card.items() if count < blocks
        ]
        host += [] if plan.output else ["the output matrix"]
        return ", ".join([*said, f"in the host's memory {', '.join(host) or 'nothing'}", bandwidth])

    @property
    def hit_counts(self) -> HitCounts | None:
        return None if self.slots is None else self.boundaries.counts

    def traffic_stats(self, active: Mapping[tuple[int, str], int], stepped: int) -> TrafficStats:
        """By which way neurons were computed in so many steps, since the sequence began. Columns of down matrices are
        counted as neurons with slots are, where they lie.

        active -- columns of each (block, site), summed over the steps
        """
        resident, bus, worker, handed, waited = self.mailbox.traffic.tolist()
        plan, parts = self._plan, self._plan.parts
        if self.slots is not None:
            traffic = Traffic(resident, bus, worker, handed, waited / 1e9, managed=self.boundaries.seconds)
            times = 1.0 if self._copies is None else self._copies.times
            return TrafficStats(
                traffic, self.boundaries.counts, plan, self._known, cpu_bytes(self.offloaded), times=times
            )
        steps = max(stepped, 1)
        if len(parts.levels) > 1:
            return self._traffic_of_planes(active, steps, waited / 1e9)
        downs = {each.block: each for each in self.offloaded if each.name == "mlp_mid"}
        for block in range(parts.blocks):
            count = active[block, "mlp_mid"]
            if block < plan.downs:
                resident += count
                continue
            shared = downs.get(block)
            of_gpu = count if shared is None else count * shared.gpu_bands // len(shared.matrix.blocks)
            bus, worker = bus + of_gpu, worker + count - of_gpu
        attention = self._packed.layers[0].attention
        columns = {name: attention[name].matrix.columns for name in ATTENTION_SITES}
        columns["mlp_in"] = columns["attn_in"]
        kept = sum(active[block, name] / size for block in range(parts.blocks) for name, size in columns.items())
        return TrafficStats(
            Traffic(resident, bus, worker, waited=waited / 1e9),
            HitCounts(steps, resident + bus + worker, resident),
            plan,
            self._known,
            cpu_bytes=cpu_bytes([each for each in self.offloaded if each.name != "mlp_mid"]),
            kept=kept / (steps * parts.blocks * len(columns)),
        )

    def _traffic_of_planes(self, active: Mapping[tuple[int, str], int], steps: int, waited: float) -> TrafficStats:
        """The same of a model of planes, in bytes; of the processor without the scales that both sides read."""
        plan, beyond = self._plan, self._sites.rest_read.tolist()
        shared = {(each.block, each.name): each for each in self.offloaded}
        card = bus = worker = 0
        for (block, name), read in active.items():
            matrix = sites_of(self._packed.layers[block])[name].matrix
            bands, rest = -(-matrix.rows // BAND_ROWS), beyond[block][SITES.index(name)]
            of = shared.get((block, name))
            by_gpu: float = bands
            if of is not None:  # of a tile that both multiply, as if its columns were read alike
                by_gpu = of.gpu_bands + of.tile_bands * of.gpu_columns / matrix.columns
            first = bands * (read - rest)
            there = plan.on_card(kind_of(name), block) == 0
            card, bus = card + (0 if there else first), bus + round(by_gpu * rest) + (first if there else 0)
            worker += round((bands - by_gpu) * rest)
        everything = sum(
            matrix.columns * matrix.levels[-1] * -(-matrix.rows // BAND_ROWS)
            for layer in self._packed.layers
            for matrix in (site.matrix for site in sites_of(layer).values())
        )
        read = card + bus + worker
        return TrafficStats(
            Traffic(card, bus, worker, waited=waited),
            HitCounts(steps, read, card),
            plan,
            self._known,
            kept=read / (steps * everything),
        )

    def follow(self, policy: str) -> None:
        """Let another policy say who has slots, from the next text on: comparing policies loads a model once."""
        self._follow(policy)
        self._interrupted = True

    def _follow(self, policy: str | None) -> None:
        assert self.slots is not None
        self._placing = find_placing(self._packed, replace(self._options, policy=policy), self._plan, self._slow)
        self.boundaries = TokenBoundaries(self._placing.follows, self.slots)

    def begin_sequence(self) -> None:
        """Give slots as the policy does at first, and count anew. No step may run."""
        self._interrupted = True
        if self.slots is None:
            self._count_anew()
        else:
            self.boundaries.begin_sequence(self._count_anew)
        self._interrupted = False

    def _count_anew(self) -> None:
        self._kernels.synchronize(self._device)  # should a step have been interrupted
        self.mailbox.traffic.zero_()
        self._sites.rest_read.zero_()
        self.mailbox.number.fill_(self._number)
        if self.slots is not None:
            self.slots.residency.agree()

    def begin_pass(self) -> None:
        """Positions are to pass, until `end_prefill`, the end of `step` or `discard_pass`."""
        if self._interrupted:
            self.begin_sequence()
        self._interrupted = True

    def discard_pass(self) -> None:
        """What ran since `begin_pass` belongs to no text, and left nothing behind."""
        self._interrupted = False

    def end_prefill(self, positions: int) -> None:
        """So many positions of a prompt have passed."""
        if self.slots is not None:
            self.boundaries.end_pass(self.slots.prefill_bits(), prompt=positions)
        self._interrupted = False

    def step(self, launch: Callable[[], None]) -> None:
        """Launch a step of the sequence, and do what can be done meanwhile, until both sides have ended it."""

        def run() -> None:
            launch()
            if self.slots is not None:
                self.boundaries.meanwhile()

        self._run_step(run)
        if self.slots is not None:
            self.boundaries.end_step(self._number)
        self._interrupted = False

    def discard_step(self, run: Callable[[], Result]) -> Result:
        """Run a step that leaves nothing behind."""
        if self.slots is not None:
            self.boundaries.catch_up()  # this step writes bits, too
        traffic, rest_read = self.mailbox.traffic.clone(), self._sites.rest_read.clone()
        result = self._run_step(run)
        self.mailbox.traffic.copy_(traffic)
        self._sites.rest_read.copy_(rest_read)
        self.mailbox.number[1] += 1
        return result

    def _run_step(self, run: Callable[[], Result]) -> Result:
        """Run a step, once, and wait until both sides have ended it."""
        self._number = next_number(self._number)
        try:
            self._call_worker(lambda number: self.worker.begin(number, self._sequences))
            result = run()
            # First the GPU, which waits for the worker within a limit: what a kernel did wrong is raised at once, where
            # the worker would wait for a request that never comes. Copies for moves may go on.
            self._kernels.wait_for_step()
            self._call_worker(self.worker.end)
            return result
        except BaseException:
            with suppress(RuntimeError):
                self._kernels.synchronize(self._device)
            raise

    def _call_worker(self, call: Callable[[int], None]) -> None:
        try:
            call(self._number)
        except RuntimeError as error:
            raise UserError(f"the processor beside the GPU: {error}") from error


def default_profile(record: int) -> BandwidthProfile:
    """Return the bandwidth profile where none was measured, for records of so many bytes."""
    bandwidth = MACHINES[ASSUMED].rates(record).bandwidth
    return replace(
        bandwidth, bus=RECORDS_OVER_THE_BUS * bandwidth.bus, far_bus=MATRICES_OVER_THE_BUS * bandwidth.far_bus
    )
