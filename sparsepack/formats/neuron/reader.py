"""Read a neuron GGUF: as `formats/zigzag/reader.py` does, its MLPs by neurons."""

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.codecs.neurons import original_order
from sparsepack.formats.mlp_kinds import MLP_GATE
from sparsepack.formats.neuron.layout import FREQUENCY, GATE_ROWS, ORDER, RECORDS, check_neurons
from sparsepack.formats.neuron.section import read_neuron_section
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.formats.zigzag.layout import WEIGHT
from sparsepack.formats.zigzag.reader import ModelReader


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
