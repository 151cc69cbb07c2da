"""MLPs by neurons divided between a GPU and the processor: slots in the GPU's memory, and the MLPs that read them.

    GPU        lists the active ones | residents, from slots | last offloaded ones, over the bus | waits, adds
    processor                        | first offloaded ones, from memory of its own                   |

The GPU divides the list itself, within the graph of a token, and asks through memory that both reach (`mailbox.py`). A
resident neuron has a slot, an offloaded one has none. The sums of the three parts are added in this order; who is
active never depends on it.

Gates that do not fit on the GPU have copies there of two bits a weight. These list the neurons that may be active, and
exact gates of the listed ones alone are read, from slots, over the bus, or by the processor:

    GPU        lists by the copy | exact gates of its own | those above zero: records, as of any list | waits, adds
    processor                    | exact gates of its own, and records of those above zero            |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cuda.decoder.buffers import Launch, MlpStep
from sparsepack.runtime.cuda.decoder.mlps import NeuronMlp
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gate_copies import CudaGateCopy, kept_of, new_kept
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons, CudaNeurons, Division, bandwidth_tensor
from sparsepack.runtime.cuda.products.tile_config import BLOCK_BYTES
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.hybrid.offloaded import WAIT_MILLISECONDS, GpuMailbox
from sparsepack.runtime.hybrid.policy import KEPT, Moves
from sparsepack.runtime.hybrid.residency import NOWHERE, Residency

GATE_OF_A_RECORD = 0.5
"""A neuron's gate has this share of the bytes of its record, which has two rows."""


@dataclass(frozen=True)
class GateCopies:
    """The blocks whose gates are copied; a copy lists so many `times` as many neurons as are active."""

    blocks: range
    times: float

    def listed_bandwidth(self, bandwidth: BandwidthProfile) -> BandwidthProfile:
        """The speeds in listed neurons, of each of which the gate is read, and the record where it is active."""
        records = GATE_OF_A_RECORD + 1 / self.times
        speeds = {name: getattr(bandwidth, name) / records for name in ("resident", "bus", "worker")}
        return replace(bandwidth, **speeds)


class CopiedGates:
    """What the copied gates of a model share.

    copies -- which blocks; shape: of the model, blocks and neurons of each; hidden: channels
    slots -- how many gates have room beside the records of residents, at the same numbers
    sequences -- that a step has

    kept -- room for the list of those who are active
    """

    def __init__(
        self,
        copies: GateCopies,
        shape: tuple[int, int],
        hidden: int,
        slots: int,
        sequences: int,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.copies, self._neurons, self._kernels = copies, shape[1], kernels
        row_bytes = hidden // BAND_ROWS * BLOCK_BYTES
        of_host = len(copies.blocks) * self._neurons, row_bytes
        (self._host,) = kernels.host_tensors(1, of_host, torch.uint8, device, "gates")
        self.slots = CudaNeurons(torch.zeros(slots, row_bytes, dtype=torch.uint8, device=device), 1.0)
        self.kept = new_kept(self._neurons, sequences, device)

    def load(self, mlp: stored.NeuronMlp, block: int, device: torch.device) -> "CopiedGate":
        """Copy the gate of a block, and load it by rows into the host's memory."""
        first = (block - self.copies.blocks.start) * self._neurons
        rows = self._kernels.load_neurons(mlp.gate, device, self._host[first : first + self._neurons])
        copy = self._kernels.load_gate_copy(mlp.gate, mlp.frequency, self.copies.times, device)
        return CopiedGate(copy, rows, self)

    def give_slots(self, neurons: np.ndarray, slots: np.ndarray) -> None:
        """Copy the gates of neurons that come to slots, int32 [n] each, numbered through all blocks."""
        here = neurons - self.copies.blocks.start * self._neurons
        copied = (here >= 0) & (here < len(self._host))
        if copied.any():
            of_host, to = (torch.from_numpy(np.ascontiguousarray(each[copied])) for each in (here, slots))
            self._kernels.copy_neurons(self.slots, to, CudaNeurons(self._host, 1.0), of_host)


@dataclass(frozen=True)
class CopiedGate:
    """A gate (`decoder.gates.Gate`) of which the GPU has a copy.

    rows -- all of it, in the host's memory
    """

    flag_in_data: ClassVar[bool] = False
    matrices: ClassVar[Sequence[CudaZigzag]] = ()

    copy: CudaGateCopy
    rows: CudaNeurons
    shared: CopiedGates

    @property
    def shape(self) -> tuple[int, int]:
        return self.copy.shape

    def step(self, step: MlpStep, kernels: Kernels) -> Sequence[Launch]:
        """In place of gates: 1 for who may be active, and 0 for the others."""
        of, (neurons, hidden) = step.input, self.shape
        assert of.norm is not None
        x, listed = of.x.view(-1, hidden), step.of.mid.view(-1, neurons)
        return (partial(kernels.score_neurons, self.copy, x, of.norm, of.eps, listed),)

    def checked(self, step: MlpStep, listed: ActiveNeurons, kernels: Kernels) -> tuple[Sequence[Launch], ActiveNeurons]:
        kept = kept_of(listed, self.shared.kept)
        return (
            partial(kernels.multiply_listed, self.shared.slots, listed, step.activation, host=self.rows),
            partial(kernels.keep_active, listed, kept, step.active(MLP_GATE)),
        ), kept

    def prefill(self, x: ScaledFp16, scratch: Tensor, kernels: Kernels) -> Product:
        return kernels.multiply_gates(self.rows, x, scratch)


STAGED_BYTES = 32 << 20
"""Prefill brings this many bytes of records to the GPU at once."""
COPIED_AT_ONCE = 512
"""So many records that move are gathered at a time, in memory that the budget does not know."""


class CudaResidency(Residency):
    """A residency whose tables lie on the GPU, too. What is changed there is in the order of the current stream.

    there   -- int32 [2, blocks, neurons], both versions
    version -- int32 [1]: which of them is in force
    """

    def __init__(self, shape: tuple[int, int], most: int, device: torch.device) -> None:
        super().__init__(shape, most)
        self.there = torch.full((2, *shape), NOWHERE, dtype=torch.int32, device=device)
        self.version = torch.zeros(1, dtype=torch.int32, device=device)

    def _write(self, positions: np.ndarray, slots: np.ndarray) -> None:
        changed = np.concatenate([self._may_differ, positions])
        super()._write(positions, slots)
        other, device = 1 - self._force[0], self.there.device
        written = self._versions[other].ravel()[changed]
        where, values = (torch.from_numpy(each).to(device) for each in (changed, written))
        self.there[other].view(-1)[where.long()] = values

    def _flip(self, prepared: Any) -> None:
        super()._flip(prepared)
        self.agree()

    def agree(self) -> None:
        """Let the version that is in force here be in force on the GPU."""
        self.version.fill_(self._force[0])


class Staging:
    """A buffer on the GPU which a stream of its own fills while another is read."""

    def __init__(self, buffer: CudaNeurons, kernels: Kernels) -> None:
        self.buffer, self._kernels = buffer, kernels
        self._filled, self._free = kernels.new_event(), kernels.new_event()

    def fill(self, records: CudaNeurons, stream: Any) -> CudaNeurons:
        """Bring records from the host, once the buffer is free. Returns where they will lie."""
        there = self.buffer.piece(0, len(records.records))
        with self._kernels.on_stream(stream):
            self._free.wait()
            there.records.copy_(records.records, non_blocking=True)
            self._filled.record()
        return there

    def wait(self) -> None:
        """The current stream waits until the buffer is filled."""
        self._filled.wait()

    def free(self) -> None:
        """The buffer may be filled anew when what is on the current stream has ended."""
        self._free.record()


class NeuronSlots:
    """The slots of a model's neurons in the GPU's memory, and the records of all of them in the host's.

    shape -- blocks, neurons of each; hidden: channels; most -- how many neurons may be resident
    bandwidth -- by which the list is divided
    activity -- as `EngineOptions` has it
    staged -- bytes of each of the two buffers through which prefill brings records to the GPU
    copies -- the blocks with copies of their gates; None: there are none
    """

    def __init__(
        self,
        shape: tuple[int, int],
        hidden: int,
        most: int,
        bandwidth: BandwidthProfile,
        mailbox: GpuMailbox,
        device: torch.device,
        kernels: Kernels,
        activity: Tensor | None = None,
        staged: int = STAGED_BYTES,
        copies: GateCopies | None = None,
    ) -> None:
        blocks, neurons = shape
        self._kernels, self._shape, self._mailbox, self._device = kernels, shape, mailbox, device
        self._words = -(-neurons // 32)
        seen, self._seen_there = kernels.shared_memory(4 * KEPT * blocks * self._words, device, "who was active")
        self._seen = tuple(seen.reshape(KEPT, 1, blocks, 4 * self._words))
        self._seen_there = self._seen_there.view(torch.int32).view(KEPT, blocks, self._words)
        (self._host,) = kernels.host_tensors(
            1, (blocks * neurons, record_bytes(hidden)), torch.uint8, device, "records"
        )
        self.residency = CudaResidency(shape, most, device)
        self.slots = kernels.new_neurons(self.residency.slots, hidden, device)
        self._copied: CopiedGates | None = None
        if copies is not None:
            sequences = mailbox.layout.sequences
            self._copied = CopiedGates(
                copies, shape, hidden, self.residency.slots if most else 0, sequences, device, kernels
            )
            self._listed_bandwidth = bandwidth_tensor(copies.listed_bandwidth(bandwidth), device)
        self._bandwidth = bandwidth_tensor(bandwidth, device)
        self._replayed = None if activity is None else self._in_words(activity, device)
        at_once = min(neurons, max(staged // record_bytes(hidden), 1))
        self.staging = [Staging(kernels.new_neurons(at_once, hidden, device), kernels) for _ in range(2)]
        self.copies = kernels.new_stream()
        self._moves, self._prepared = kernels.new_stream(), kernels.new_event()
        self._prefilled: dict[int, list[np.ndarray]] = {}  # of each block; empty between passes

    def load_records(self, records: PackedMatrix, block: int) -> CudaNeurons:
        """Load the records of a block into the host's memory."""
        first = block * self._shape[1]
        return self._kernels.load_neurons(records, self._device, self._host[first : first + self._shape[1]])

    def copied(self, block: int) -> CopiedGates | None:
        """What knows the copy of a block's gate; None: there is none."""
        copied = self._copied
        return copied if copied is not None and block in copied.copies.blocks else None

    def division(self, block: int) -> Division:
        """What kernels take of a block."""
        mailbox, at = self._mailbox, self._mailbox.layout
        request, answer = at.requests + block * at.request_size, at.answers + block * at.answer_size
        return Division(
            tables=self.residency.there[:, block],
            version=self.residency.version,
            bandwidth=self._bandwidth if self.copied(block) is None else self._listed_bandwidth,
            seen=self._seen_there[:, block],
            number=mailbox.number,
            begins=block == 0,
            abort=mailbox.part(at.abort, torch.int32, 1),
            request_number=mailbox.part(request + at.number, torch.int32, 2),
            request_indices=mailbox.part(request + at.indices, torch.int32, at.neurons),
            request_gates=mailbox.part(request + at.gates, torch.float32, at.sequences, at.neurons),
            request_x=mailbox.part(request + at.x, torch.float32, at.sequences, at.hidden),
            answer_number=mailbox.part(answer + at.number, torch.int32, 1),
            answer=mailbox.part(answer + at.y, torch.float32, at.sequences, at.hidden),
            traffic=mailbox.traffic,
            limit=WAIT_MILLISECONDS,
            replayed=None if self._replayed is None else self._replayed[:, block],
        )

    def _in_words(self, activity: Tensor, device: torch.device) -> Tensor:
        """Bits of the processor's, uint8 [steps, blocks, bytes], in the host's memory as kernels read them: int32."""
        shape = (len(activity), self._shape[0], 4 * self._words)
        (there,) = self._kernels.host_tensors(1, shape, torch.uint8, device, "a trace")
        there[:, :, : activity.shape[2]] = activity.to(device)
        return there.view(torch.int32)

    def place(self, resident: np.ndarray) -> None:
        """Give slots when a sequence begins: bool [blocks, neurons]. No step may run."""
        self._prepared.wait()
        self.residency.restart(resident, self._copy)

    def prepare(self, moves: Moves) -> None:
        """Copy those that come, and write the table that is not in force, beside a step that runs. What that step reads
        must be in force when this is called: no `move` may be behind it."""
        with self._kernels.on_stream(self._moves):
            self.residency.prepare(moves.coming, moves.going, self._copy)
            self._prepared.record()

    def move(self, moves: Moves) -> None:
        """Give slots to some and take those of others, behind a step that runs: what was not prepared is done now."""
        if not self.residency.is_prepared(moves.coming, moves.going):
            self.prepare(moves)
        self._prepared.wait()
        self.residency.move(moves.coming, moves.going, self._copy)

    def _copy(self, neurons: np.ndarray, slots: np.ndarray) -> None:
        host = CudaNeurons(self._host, 1.0)
        for first in range(0, len(neurons), COPIED_AT_ONCE):
            some = slice(first, first + COPIED_AT_ONCE)
            self._kernels.copy_neurons(self.slots, torch.from_numpy(slots[some]), host, torch.from_numpy(neurons[some]))
            if self._copied is not None:
                self._copied.give_slots(neurons[some], slots[some])

    def step_bits(self, number: int) -> np.ndarray:
        """Return who was active in the step of this number, which has ended: uint8 [1, blocks, bytes], bits as in
        `policy`. The GPU may write these bits again `KEPT` steps later."""
        return self._seen[number % KEPT]

    def saw(self, block: int, gate: Product) -> None:
        """Prefill has these gates of a block."""
        active = torch.nn.functional.pad(gate.sums > 0, (0, -gate.sums.shape[1] % 8)).view(len(gate.sums), -1, 8)
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=active.device)
        self._prefilled.setdefault(block, []).append((active * weights).sum(-1, dtype=torch.uint8).cpu().numpy())

    def prefill_bits(self) -> np.ndarray:
        """Return who was active at the positions prefilled since the last call: uint8 [positions, blocks, bytes]."""
        bits = np.stack([np.concatenate(self._prefilled[block]) for block in range(self._shape[0])], axis=1)
        self.forget()
        return bits

    def forget(self) -> None:
        """Forget what was seen of a prefill that was interrupted."""
        self._prefilled.clear()


@dataclass(frozen=True)
class SlotNeuronMlp(NeuronMlp):
    """An MLP by neurons whose records lie in the host's memory, those of residents in slots, too."""

    block: int
    of_step: Division
    shared: NeuronSlots

    @property
    def division(self) -> Division:
        return self.of_step

    @property
    def memories(self) -> tuple[CudaNeurons, CudaNeurons]:
        return self.shared.slots, self.records

    def pieces(self, at_once: int) -> Iterator[CudaNeurons]:
        """The records come to the GPU in two buffers in turns, the next ones while those before are multiplied."""
        staging, scale = self.shared.staging, self.records.fp16_scale
        at_once = min(at_once, len(staging[0].buffer.records))
        starts = range(0, len(self.records.records), at_once)
        for each in staging:
            each.free()  # when what is on the stream has ended

        def fill(number: int) -> CudaNeurons:
            return staging[number % 2].fill(self.records.piece(starts[number], at_once), self.shared.copies)

        following = fill(0)
        for number in range(len(starts)):
            piece = following
            if number + 1 < len(starts):
                following = fill(number + 1)
            staging[number % 2].wait()
            yield replace(piece, fp16_scale=scale)
            staging[number % 2].free()

    def saw(self, gate: Product) -> None:
        self.shared.saw(self.block, gate)
