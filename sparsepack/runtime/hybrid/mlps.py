"""MLPs by neurons on two devices: a decoder's operations (`runtime/chained/operations.py`), those on neurons divided.

    device   lists the active ones | residents, from slots | last offloaded ones, from the host's records | adds
    worker                         | first offloaded ones, from the host's records                       |

A resident neuron has a slot, an offloaded one has none. The sums of the three parts are added in this order. Who is
active never depends on it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.codecs.neurons import record_bytes
from sparsepack.placement.links import Links, over_the_bus
from sparsepack.placement.ways import Traffic
from sparsepack.runtime.chained.operations import NeuronFfn, Operations
from sparsepack.runtime.hybrid.following import Moves
from sparsepack.runtime.hybrid.handover import Worker
from sparsepack.runtime.hybrid.residency import NOWHERE, Residency, ranges_of_blocks

STAGED_BYTES = 8 << 20
"""Prefill moves this many bytes of stored records at once."""


@dataclass(frozen=True)
class HostNeurons:
    """The records of a block as the host keeps them, all of them, loaded."""

    block: int
    records: Any
    count: int


class DividedMlps:
    """The operations of a backend on the CPU, those on neurons divided between two workers.

    operations -- of the backend
    beside     -- its `neuron_ffn`, for the second worker, which runs at the same time
    shape      -- blocks, neurons of each; hidden: channels
    most       -- how many neurons may be resident

    Several positions at once stream all records of the block through two staging buffers, one being filled by the
    worker while the other is multiplied: what they give does not depend on who has a slot.
    """

    def __init__(
        self,
        operations: Operations,
        beside: NeuronFfn,
        shape: tuple[int, int],
        hidden: int,
        most: int,
        links: Links,
    ) -> None:
        self.load_zigzag, self.load_rows = operations.load_zigzag, operations.load_rows
        self.collect, self.matmul = operations.collect, operations.matmul
        self.zigzag_gemv, self.zigzag_matmul = operations.zigzag_gemv, operations.zigzag_matmul
        self.new_neurons, self.copy_neurons = operations.new_neurons, operations.copy_neurons
        self.new_cache = operations.new_cache
        self._operations, self._beside, self._links = operations, beside, links
        self._worker = Worker()
        self._blocks: list[HostNeurons] = []
        self.residency = Residency(shape, most)
        self._slots = operations.new_neurons(self.residency.slots, hidden)
        self._slot_gates = torch.zeros(self.residency.slots)
        pieces = -(-shape[1] * record_bytes(hidden) // STAGED_BYTES)
        self._piece = -(-shape[1] // pieces)
        self._staging = [operations.new_neurons(self._piece, hidden) for _ in range(2)]
        self.traffic = Traffic()
        self._seen: list[list[np.ndarray]] = [[] for _ in range(shape[0])]

    def load_neurons(self, records: PackedMatrix, device: torch.device | str = "cpu") -> HostNeurons:
        """Prepare the records of the next block."""
        loaded = self._operations.load_neurons(records, device)
        self._blocks.append(HostNeurons(len(self._blocks), loaded, records.rows))
        return self._blocks[-1]

    def count_anew(self) -> None:
        """A text begins."""
        self.traffic = Traffic()

    def place(self, resident: np.ndarray) -> None:
        """Give slots when a text begins: bool [blocks, neurons]."""
        self.residency.restart(resident, self._copy)

    def move(self, moves: Moves) -> None:
        """Give slots to some and take those of others, between two tokens."""
        self.residency.move(moves.coming, moves.going, self._copy)

    def forget(self) -> None:
        """What was seen of a pass that was interrupted counts no more."""
        for rows in self._seen:
            rows.clear()

    def needed(self) -> np.ndarray:
        """The neurons that were active at each position since the last call, as `following` has bits."""
        blocks, neurons = self.residency.table.shape
        if not all(self._seen):  # no position passed
            return np.zeros((0, blocks, -(-neurons // 8)), np.uint8)
        bits = np.stack([np.concatenate(rows) for rows in self._seen], axis=1)
        self.forget()
        return bits

    def neuron_ffn(self, neurons: HostNeurons, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """See `reference.neuron_ffn`: the same but for the order of the sum."""
        self._saw(neurons.block, gate[None])
        active = indices[: int(count)].to(torch.int32)
        slots = torch.from_numpy(self.residency.table[neurons.block])[active.long()]
        is_resident = slots != NOWHERE
        resident, slots = active[is_resident], slots[is_resident]
        offloaded = active[~is_resident]
        bus = over_the_bus(len(resident), len(offloaded), self._links)
        beside, own = offloaded[: len(offloaded) - bus], offloaded[len(offloaded) - bus :]
        number = self._worker.post(_part(self._beside, neurons.records, x, gate, beside)) if len(beside) else None
        self._slot_gates[slots.long()] = gate[resident.long()]
        y: Tensor = _part(self._operations.neuron_ffn, self._slots, x, self._slot_gates, slots.sort().values)()
        y = y + _part(self._operations.neuron_ffn, neurons.records, x, gate, own)()
        begun = time.perf_counter()
        if number is not None:
            y = y + self._worker.take(number)
        waited = time.perf_counter() - begun if number is not None else 0.0
        self.traffic += Traffic(len(resident), len(own), len(beside), int(number is not None), waited)
        return y

    def neuron_matmul(self, neurons: HostNeurons, x: Tensor, gate: Tensor) -> Tensor:
        """See `reference.neuron_matmul`: the same but for the order of the sum."""
        self._saw(neurons.block, gate)
        y = torch.zeros_like(x)
        starts = range(0, neurons.count, self._piece)
        number = self._worker.post(self._fill(neurons, starts[0], 0))
        for piece, start in enumerate(starts):
            self._worker.take(number)
            if piece + 1 < len(starts):
                number = self._worker.post(self._fill(neurons, starts[piece + 1], piece + 1))
            gates = gate[:, start : start + self._piece]
            rest = self._piece - gates.shape[1]  # in whose records lies what was there before
            gates = F.pad(gates, (0, rest))
            y = y + self._operations.neuron_matmul(self._staging[piece % 2], x, gates)
        return y

    def _fill(self, neurons: HostNeurons, start: int, piece: int) -> Callable[[], None]:
        """What brings a piece of a block's records into a staging buffer."""
        copy, to = self.copy_neurons, self._staging[piece % 2]
        slots = torch.from_numpy(self.residency.table[neurons.block])[start : start + self._piece]
        is_resident, position = slots != NOWHERE, torch.arange(len(slots), dtype=torch.int32)
        # Of the table nothing is read later: of a prefill that was interrupted nobody waits for the worker.
        resident, offloaded, from_slots = position[is_resident], position[~is_resident], slots[is_resident]

        def fill() -> None:
            copy(to, resident, self._slots, from_slots)
            copy(to, offloaded, neurons.records, start + offloaded)

        return fill

    def _copy(self, neurons: np.ndarray, slots: np.ndarray) -> None:
        count = self.residency.table.shape[1]
        for block, first, last in ranges_of_blocks(neurons, count):
            records = torch.from_numpy(neurons[first:last] - block * count)
            self.copy_neurons(self._slots, torch.from_numpy(slots[first:last]), self._blocks[block].records, records)

    def _saw(self, block: int, gate: Tensor) -> None:
        self._seen[block].append(np.packbits(gate.numpy() != 0, axis=1, bitorder="little"))


def _part(ffn: NeuronFfn, neurons: Any, x: Tensor, gate: Tensor, indices: Tensor) -> Callable[[], Tensor]:
    return lambda: ffn(neurons, x, gate, indices, torch.tensor(len(indices), dtype=torch.int32))
