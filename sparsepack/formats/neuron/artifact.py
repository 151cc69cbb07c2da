"""An opened neuron GGUF: what its tensors are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepack.formats.artifact import Program
from sparsepack.formats.mlp_kinds import GATE_ORDERS, MLP_GATE
from sparsepack.formats.neuron.layout import FREQUENCY, GATE, ORDER, RECORDS
from sparsepack.formats.neuron.reader import NeuronReader
from sparsepack.formats.neuron.section import neuron_summary
from sparsepack.formats.zigzag.artifact import ZigzagArtifact
from sparsepack.formats.zigzag.layout import TAIL
from sparsepack.models.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class NeuronArtifact(ZigzagArtifact):
    """A neuron GGUF."""

    reader = NeuronReader

    def neurons(self) -> dict[str, Any]:
        summary = neuron_summary(self.manifest, self.path)
        gate = self.tensors.get(f"blk.0.{GATE}")  # without it there is a tail alone, in zigzag order
        order = GATE_ORDERS[gate is not None and len(gate.shape) == 2]
        return {**summary, "gates": order, "in_words": f"{summary['in_words']}; gates in the order {order}"}

    def holds_weights(self, name: str) -> bool:
        return super().holds_weights(name) and not name.endswith((FREQUENCY, ORDER))

    def source(self, name: str, checkpoint: Checkpoint) -> Tensor | None:
        block, _, part = name.rpartition(".mlp_")
        if not block:
            return super().source(name, checkpoint)
        layer = block.removeprefix("blk.")
        matrix = f"mlp_{part}"
        ours = matrix in (GATE, f"{MLP_GATE}{TAIL}", RECORDS)
        if not ours or not layer.isdecimal() or int(layer) >= checkpoint.layers:
            return super().source(name, checkpoint)
        (gate, up), (down,) = checkpoint.gate_and_up(int(layer)), checkpoint.projections(int(layer), "mlp_mid")
        order = self._order(f"{block}.{ORDER}")
        if len(order) != len(gate):
            return None  # another model's
        if matrix == RECORDS:
            return torch.cat([up[order], down.t()[order]], dim=1)
        return self.part_of(name, gate[order])

    def _order(self, name: str) -> Tensor:
        return self.stored(name).view(torch.int32).flatten().long()

    def programs(self) -> Iterator[Program]:
        for program in super().programs():
            if program.program == "sparsepack":
                what = "runs it on CPUs and NVIDIA GPUs, reading the records of active neurons alone while decoding"
                program = Program(program.program, program.loads, what)
            yield program
