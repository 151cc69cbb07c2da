"""Gates without room on the GPU, which has copies of them in two bits a weight: these list who may be active, and exact
gates of the listed ones alone are read, from slots, over the bus, or by the processor.

    GPU        lists by the copy | exact gates of its own | those above zero: records, as of any list | waits, adds
    processor                    | exact gates of its own, and records of those above zero            |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cuda.decoder.buffers import Launch, MlpStep
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gate_copies import CudaGateCopy, kept_of, new_kept
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons, CudaNeurons
from sparsepack.runtime.cuda.products.tile_config import BLOCK_BYTES
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag

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
