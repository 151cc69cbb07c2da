"""An opened neuron GGUF: what its tensors are.

What a neuron GGUF holds in place of the sites `mlp_in` and `mlp_mid`, and of which models it can: for the writer and
the reader.

MLPs by neurons in a manifest: the section `neurons`, of formats that store them so.

calibration   SHA-256 of the one that counted how often each neuron was active; or
trace         the same of a trace, of all its sessions
tokens        that were counted
density       of each layer, the share of its neurons that a token needed

Read a neuron GGUF: as `formats/zigzag/reader.py` does, its MLPs by neurons.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.stored import Name, Size, Stored, shown, validate
from sparsepack.formats.artifact import Program
from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.codecs.neurons import original_order, record_bytes
from sparsepack.formats.manifest import NEURONS
from sparsepack.formats.mlp_kinds import GATE_ORDERS, MLP_GATE, MLP_RECORDS
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.formats.zigzag.artifact import ZigzagArtifact
from sparsepack.formats.zigzag.layout import TAIL, WEIGHT
from sparsepack.formats.zigzag.reader import ModelReader
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.records.neurons import NeuronCounts

GATE, RECORDS = f"{MLP_GATE}.weight", f"{MLP_RECORDS}.weight"
FREQUENCY, ORDER = "mlp_frequency", "mlp_order"
GATE_ROWS = "Q4_K"
"""The type of gates that are stored by rows; of others it is `codecs.matrices.ZIGZAG`."""

EXACT_ZEROS = ("relu",)
"""Activations that make most of their outputs exactly zero, so that leaving these out changes nothing."""


def check_neurons(architecture: Architecture) -> None:
    """Raise `PackingError` unless a model's MLPs can be stored by neurons: some are inactive, and records fit."""
    if architecture.activation not in EXACT_ZEROS:
        raise PackingError(
            f"activation {architecture.activation!r}: its neurons are never exactly inactive, so leaving any out "
            f"would change the model; expected {' or '.join(EXACT_ZEROS)}; use zigzag-q4_k, which skips by thresholds"
        )
    record_bytes(architecture.hidden)


_Share = Annotated[float, Field(ge=0, le=1)]


class NeuronSection(Stored):
    """What a manifest says of neurons."""

    calibration: Name | None = None
    trace: Name | None = None
    tokens: Size
    density: Annotated[list[_Share], Field(min_length=1)]


def neuron_section(counts: NeuronCounts) -> dict[str, Any]:
    """The section of a model whose neurons were counted, JSON-able."""
    return {counts.origin: counts.sha256, "tokens": counts.tokens, "density": counts.density}


def read_neuron_section(manifest: Mapping[str, Any], where: object) -> NeuronSection:
    """What a manifest says of neurons. Raises `ArtifactError` where that is missing or not understood."""
    try:
        section = validate(NeuronSection, manifest.get(NEURONS))
        if (section.calibration is None) == (section.trace is None):
            raise ValueError("expected the hash of either a calibration or a trace")
        return section
    except ValueError as error:
        raise ArtifactError(f"{where}: {NEURONS}: {shown(error)}; pack the model again") from error


def neuron_summary(manifest: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The section, JSON-able, with the mean of the layers and all of it in words. Raises as `read_neuron_section`."""
    section = read_neuron_section(manifest, where)
    density = section.density
    origin = "trace" if section.calibration is None else "calibration"
    mean = sum(density) / len(density)
    words = (
        f"{100 * mean:.1f} % of them were active at a token of the {origin} ({section.tokens:,} tokens; by layer "
        f"{100 * min(density):.1f} to {100 * max(density):.1f} %); decoding reads the records of active ones alone"
    )
    return {**section.model_dump(exclude_none=True), "mean_density": mean, "in_words": words}


class NeuronReader(ModelReader):
    """Takes the tensors of a neuron GGUF as its base does, those of the MLPs by neurons."""

    def model(self) -> PackedModel:
        density = read_neuron_section(self.manifest, self.file.path).density
        if len(density) != self.architecture.layers:
            raise self.wrong(f"density of {len(density)} layers, the model has {self.architecture.layers}")
        try:
            check_neurons(self.architecture)
        except PackingError as error:
            raise self.wrong(str(error)) from error
        return super().model()

    def mlp(self, layer: int) -> NeuronMlp:
        name, count, hidden = f"blk.{layer}", self.architecture.intermediate, self.architecture.hidden
        return NeuronMlp(
            gate=self.gate(f"{name}.{MLP_GATE}", count, hidden),
            records=self.rows_matrix(f"{name}.{RECORDS}", ("Q4_K",), (count, 2 * hidden)),
            frequency=self.frequency(f"{name}.{FREQUENCY}", count),
            order=self.order(f"{name}.{ORDER}", count),
        )

    def gate(self, name: str, count: int, hidden: int) -> PackedMatrix:
        """A gate by rows, or in zigzag order: the number of its dimensions tells."""
        found = self.file.tensors.get(name + WEIGHT)
        if found is not None and len(found.shape) == 2:
            return self.rows_matrix(found.name, (GATE_ROWS,), (count, hidden))
        return self.zigzag_matrix(name, count, hidden)

    def frequency(self, name: str, count: int) -> Tensor:
        value = self.vector(name, count)
        # NaN fails all of these.
        if not bool((value >= 0).all() and (value <= 1).all() and (value[1:] <= value[:-1]).all()):
            raise self.wrong(f"{name}: expected shares from 1 to 0, falling")
        return value

    def order(self, name: str, count: int) -> Tensor:
        value = self.mapped(self.take(name, ("I32",), (count,))).clone().view(torch.int32).long()
        try:
            original_order(value)
        except PackingError as error:
            raise self.wrong(f"{name}: {error}") from error
        return value


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
