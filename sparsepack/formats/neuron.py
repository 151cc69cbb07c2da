"""The neuron GGUF: as the zigzag GGUF, but each MLP stored by neurons, so that only active ones need be read.

    blk.I.mlp_gate.weight          [bands, hidden, 256]    Q4_K in zigzag order: the gate alone; it says who is active
                                or [neurons, hidden]       Q4_K by rows, if `PlanRequest.gates` is "rows"
    blk.I.mlp_gate.tail.weight     [superblocks, 256]      Q4_K in zigzag order: as the tail of a site
    blk.I.mlp_records.weight       [neurons, 2 hidden]     Q4_K by rows: the neuron's row of up, then its column of down
                                or [neurons, hidden]       without gates: the column of down alone
    blk.I.mlp_frequency            [neurons]               F32: share of the calibration's tokens that need it
    blk.I.mlp_order                [neurons]               I32: the model's number of the neuron that is stored here

take the place of the sites mlp_in and mlp_mid. All four have the neurons of a block in one order, by falling frequency,
of equal ones the lower number first: those which should be near at hand are a prefix. What the activation makes exactly
zero is left out, so only models with ReLU or its square are packed so, and there are no thresholds in the MLP. Of an
MLP without a gate `mlp_gate` has the rows of up, which say who is active. The manifest has a section `neurons`:

calibration   SHA-256 of the one that counted how often each neuron was active; or
trace         the same of a trace, of all its sessions
tokens        that were counted
density       of each layer, the share of its neurons that a token needed
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from sparsepack.errors import ArtifactError, PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.stored import Name, Size, Stored, shown, validate
from sparsepack.files.transfer import stacked_on
from sparsepack.formats import gptq
from sparsepack.formats.artifact import Artifact, Program
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.containers.gguf_writer import GgufPlan
from sparsepack.formats.kinds import GATE_ORDERS, MLP_GATE, MLP_RECORDS
from sparsepack.formats.manifest import NEURONS
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import neuron as neurons
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.neuron import original_order, record_bytes
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.formats.plan import EncodedSite, PlannedGroup, PlannedTensor, PlanRequest, SiteEncoder, alone, naming
from sparsepack.formats.table import Format
from sparsepack.formats.zigzag.artifact import ZigzagArtifact
from sparsepack.formats.zigzag.plan import (
    checked_shape,
    encoded_matrix,
    encoded_site,
    engine_plan,
    planned_matrix,
    planned_site,
    planned_vector,
)
from sparsepack.formats.zigzag.reader import TAIL, WEIGHT, ModelReader, zigzag_tensors
from sparsepack.models.activity import NeuronCounts, check_counts
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES
from sparsepack.reconstruction import Inputs

GATE, RECORDS = f"{MLP_GATE}.weight", f"{MLP_RECORDS}.weight"
FREQUENCY, ORDER = "mlp_frequency", "mlp_order"
GATE_ROWS = "Q4_K"
"""The type of gates that are stored by rows; of others it is zigzag-q4_k."""

EXACT_ZEROS = ("relu", "relu2")
"""Activations that make most of their outputs exactly zero, so that leaving these out changes nothing."""


def check_neurons(architecture: Architecture) -> None:
    """Raise `PackingError` unless a model's MLPs can be stored by neurons: every block has one, some neurons are
    inactive, engines know them, and records fit."""
    if architecture.activation not in EXACT_ZEROS:
        raise PackingError(
            f"activation {architecture.activation!r}: its neurons are never exactly inactive, so leaving any out "
            f"would change the model; expected {' or '.join(EXACT_ZEROS)}; use zigzag-q4_k, which skips by thresholds"
        )
    if any(block.mlp is None for block in architecture.blocks):
        raise PackingError("blocks without an MLP: neurons are stored of every block; use zigzag-q4_k")
    if architecture.activation == "relu2" and any(block.mlp.gated for block in architecture.blocks if block.mlp):
        raise PackingError(
            "activation 'relu2' with a gate: no engine runs such neurons; expected relu, or relu2 without a gate; use "
            "zigzag-q4_k"
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
            records=self.rows_matrix(
                f"{name}.{RECORDS}", ("Q4_K",), (count, (1 + self.architecture.row.gated) * hidden)
            ),
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
        gate, up, down = _matrices(checkpoint, int(layer))
        order = self._order(f"{block}.{ORDER}")
        if len(order) != len(gate):
            return None  # another model's
        if matrix == RECORDS:
            columns = down.t()[order]
            return columns if up is None else torch.cat([up[order], columns], dim=1)
        return self.part_of(name, gate[order])

    def _order(self, name: str) -> Tensor:
        return self.stored(name).view(torch.int32).flatten().long()

    def programs(self) -> Iterator[Program]:
        for program in super().programs():
            if program.program == "sparsepack":
                what = "runs it on CPUs and NVIDIA GPUs, reading the records of active neurons alone while decoding"
                program = Program(program.program, program.loads, what)
            yield program


def opened(file: GgufFile, manifest: Mapping[str, Any]) -> Artifact:
    """A neuron GGUF that has been opened."""
    return NeuronArtifact(manifest, file)


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model that no engine can run, `PackingError` for one without neurons that are
    exactly inactive, of a width that 256 does not divide, or with biases in the MLP."""
    with naming(checkpoint.name):
        check_neurons(checkpoint.architecture)
    for site in MLP_SITES:
        if checkpoint.stacked_bias(0, site) is not None:
            raise PackingError(
                f"{checkpoint.name}: biases at {site}, for which {format.name} has no place; use zigzag-q4_k"
            )


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> GgufPlan:
    """A model as a neuron GGUF.

    Raises `PackingError` for thresholds in the MLP, counts that are missing or of another model, and as `zigzag.plan`.
    """
    counts = request.neurons
    if counts is None:
        raise PackingError(f"format {format.name}: it stores neurons by how often they are active; give --calibration")
    with naming(checkpoint.name):
        check_counts(counts, checkpoint.architecture)
    _check_rules(format, request)

    def block(architecture: Architecture, layer: int) -> Iterator[PlannedGroup]:
        for site in ATTENTION_SITES:
            yield from planned_site(format, checkpoint, architecture, layer, site, request, row_scales=False)
        yield from _planned_neurons(checkpoint, architecture, layer, counts, request)

    return engine_plan(format, checkpoint, request, block, neuron_section(counts))


def _matrices(checkpoint: Checkpoint, layer: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows that say who is active, those of up where these are others, and the matrix of down."""
    (down,) = checkpoint.projections(layer, "mlp_mid")
    if checkpoint.family.gated:
        return *checkpoint.gate_and_up(layer), down
    (up,) = checkpoint.projections(layer, "mlp_in")
    return up, None, down


_UP, _DOWN = f"{RECORDS}.up", f"{RECORDS}.down"
"""Halves of the records, encoded before, have these names."""


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`); the halves of a block's records are encoded with their sites."""
    counts = request.neurons
    assert counts is not None

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        if site in ATTENTION_SITES:
            return encoded_site(GATE_ROWS, layer, site, weight, inputs, row_scales=False)
        name, order = f"blk.{layer}", neurons.by_frequency(counts.active[layer]).to(weight.device)
        if site != MLP_SITES[0]:  # down, of which a neuron has a column
            columns, unpacked = encoded_matrix(_DOWN, GATE_ROWS, weight, inputs)
            (blocks,) = columns.values()  # of a width that 256 divides: it has no tail
            found = {f"{name}.{_DOWN}": blocks.transpose(0, 1)[order].flatten(1)}
            return EncodedSite(found, unpacked, {f"{name}.{RECORDS}": slice(None)})
        gate, up = weight.chunk(2) if checkpoint.family.gated else (weight, None)
        gates, decoded_gate = _encoded_gate(layer, gate[order], inputs, request)
        decoded = torch.empty_like(weight)
        decoded[: len(gate)][order] = decoded_gate
        whole = len(gate) - zigzag.tail_rows(len(gate))
        rows_of: dict[str, slice | Tensor] = dict.fromkeys(gates, slice(0, len(gate)))
        if len(gates) > 1:
            rows_of = dict(zip(gates, (order[:whole], order[whole:]), strict=True))
        if up is None:
            return EncodedSite(gates, decoded, rows_of)
        ups = _encoded_rows(up[order], inputs)
        decoded[len(gate) :][order] = q4_k.decode(ups)
        rows_of[f"{name}.{RECORDS}"] = slice(len(gate), None)
        return EncodedSite({**gates, f"{name}.{_UP}": ups}, decoded, rows_of)

    return encode


def _encoded_gate(
    layer: int, gate: Tensor, inputs: Inputs | None, request: PlanRequest
) -> tuple[dict[str, Tensor], Tensor]:
    """A gate [neurons, hidden] in the order of `PlanRequest.gates`: its tensors by their names, and what they decode
    to."""
    if request.gates == "rows":
        rows = _encoded_rows(gate, inputs)
        return {f"blk.{layer}.{GATE}": rows}, q4_k.decode(rows)
    return encoded_matrix(f"blk.{layer}.{MLP_GATE}", GATE_ROWS, gate, inputs)


def _encoded_rows(weight: Tensor, inputs: Inputs | None) -> Tensor:
    """A matrix by rows, with error feedback where its inputs are known."""
    return q4_k.encode(weight) if inputs is None else gptq.q4_k_rows(weight, inputs)


def _check_rules(format: Format, request: PlanRequest) -> None:
    for (layer, site), rule in request.rules.items():
        if site not in ATTENTION_SITES and not rule.dense:
            raise PackingError(
                f"blk.{layer}.{site}: {format.name} skips neurons exactly and has no place for thresholds there; "
                "leave the site dense: --include 'blk.*.attn_*'"
            )


def _planned_neurons(
    checkpoint: Checkpoint, architecture: Architecture, layer: int, counts: NeuronCounts, request: PlanRequest
) -> Iterator[PlannedGroup]:
    name, count, hidden = f"blk.{layer}", architecture.intermediate, architecture.hidden
    for site in MLP_SITES:
        checked_shape(checkpoint, architecture, layer, site)
    order, device, encoded = neurons.by_frequency(counts.active[layer]), request.device, request.encoded

    def gate() -> Sequence[Tensor]:
        weight = stacked_on(device, [_matrices(checkpoint, layer)[0][order]])
        return [*_encoded_gate(layer, weight, None, request)[0].values()]

    def records() -> Tensor:
        if f"{name}.{_DOWN}" in encoded:
            return torch.cat([encoded[part]() for part in (f"{name}.{_UP}", f"{name}.{_DOWN}") if part in encoded], 1)
        _, up, down = _matrices(checkpoint, layer)
        return neurons.pack(None if up is None else stacked_on(device, [up]), stacked_on(device, [down]), order)

    planned = zigzag_tensors(f"{name}.{MLP_GATE}", GATE_ROWS, count, hidden)
    if request.gates == "rows":
        planned = (PlannedTensor(f"{name}.{GATE}", (count, hidden), GATE_ROWS),)
    yield planned_matrix(planned, encoded, gate)
    yield alone(PlannedTensor(f"{name}.{RECORDS}", (count, (1 + checkpoint.family.gated) * hidden), "Q4_K"), records)
    yield planned_vector(f"{name}.{FREQUENCY}", "F32", counts.frequency[layer].float()[order])
    yield planned_vector(f"{name}.{ORDER}", "I32", order.to(torch.int32))
