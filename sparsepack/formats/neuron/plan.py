"""The neuron GGUF: as the zigzag GGUF, but each MLP stored by neurons, so that only active ones need be read.

    blk.I.mlp_gate.weight          [bands, hidden, 256]    Q4_K in zigzag order: the gate alone; it says who is active
                                or [neurons, hidden]       Q4_K by rows, if `PlanRequest.gates` is "rows"
    blk.I.mlp_gate.tail.weight     [superblocks, 256]      Q4_K in zigzag order: as the tail of a site
    blk.I.mlp_records.weight       [neurons, 2 hidden]     Q4_K by rows: the neuron's row of up, then its column of down
    blk.I.mlp_frequency            [neurons]               F32: share of the calibration's tokens that need it
    blk.I.mlp_order                [neurons]               I32: the model's number of the neuron that is stored here

take the place of the sites mlp_in and mlp_mid. All four have the neurons of a block in one order, by falling frequency,
of equal ones the lower number first: those which should be near at hand are a prefix. What the activation makes exactly
zero is left out, so only models with ReLU are packed so, and there are no thresholds in the MLP. The manifest's section
is `formats.neuron.artifact`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.transfer import stacked_on
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.codecs import gptq, neurons, q4_k, zigzag
from sparsepack.formats.containers.gguf.writer import GgufPlan
from sparsepack.formats.encoded import EncodedSite, SiteEncoder
from sparsepack.formats.mlp_kinds import MLP_GATE
from sparsepack.formats.neuron.artifact import (
    FREQUENCY,
    GATE,
    GATE_ROWS,
    ORDER,
    RECORDS,
    NeuronArtifact,
    check_neurons,
    neuron_section,
)
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, PlanRequest, alone, naming
from sparsepack.formats.table import Format
from sparsepack.formats.zigzag.layout import zigzag_tensors
from sparsepack.formats.zigzag.plan import (
    checked_shape,
    encoded_matrix,
    encoded_site,
    engine_plan,
    planned_matrix,
    planned_site,
    planned_vector,
)
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES
from sparsepack.models.records.neurons import NeuronCounts, check_counts
from sparsepack.reconstruction import Inputs


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
            yield from planned_site(checkpoint, architecture, layer, site, request, row_scales=False)
        yield from _planned_neurons(checkpoint, architecture, layer, counts, request)

    return engine_plan(format, checkpoint, request, block, neuron_section(counts))


_UP, _DOWN = f"{RECORDS}.up", f"{RECORDS}.down"
"""Halves of the records, encoded before, have these names."""


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`); the halves of a block's records are encoded with their sites."""
    counts = request.neurons
    assert counts is not None

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        if site in ATTENTION_SITES:
            return encoded_site(layer, site, weight, inputs, row_scales=False)
        name, order = f"blk.{layer}", neurons.by_frequency(counts.active[layer]).to(weight.device)
        if site != MLP_SITES[0]:  # down, of which a neuron has a column
            columns, unpacked = encoded_matrix(_DOWN, weight, inputs)
            (blocks,) = columns.values()  # of a width that 256 divides: it has no tail
            found = {f"{name}.{_DOWN}": blocks.transpose(0, 1)[order].flatten(1)}
            return EncodedSite(found, unpacked, {f"{name}.{RECORDS}": slice(None)})
        gate, up = weight.chunk(2)
        gates, decoded_gate = _encoded_gate(layer, gate[order], inputs, request)
        ups = _encoded_rows(up[order], inputs)
        decoded = torch.empty_like(weight)
        for part, rows in zip(decoded.chunk(2), (decoded_gate, q4_k.decode(ups)), strict=True):
            part[order] = rows
        whole = len(gate) - zigzag.tail_rows(len(gate))
        rows_of: dict[str, slice | Tensor] = dict.fromkeys(gates, slice(0, len(gate)))
        if len(gates) > 1:
            rows_of = dict(zip(gates, (order[:whole], order[whole:]), strict=True))
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
    return encoded_matrix(f"blk.{layer}.{MLP_GATE}", gate, inputs)


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
        weight = stacked_on(device, [checkpoint.gate_and_up(layer)[0][order]])
        return [*_encoded_gate(layer, weight, None, request)[0].values()]

    def records() -> Tensor:
        if f"{name}.{_UP}" in encoded:
            return torch.cat([encoded[f"{name}.{part}"]() for part in (_UP, _DOWN)], 1)
        up, (down,) = checkpoint.gate_and_up(layer)[1], checkpoint.projections(layer, "mlp_mid")
        return neurons.pack(stacked_on(device, [up]), stacked_on(device, [down]), order)

    planned = zigzag_tensors(f"{name}.{MLP_GATE}", count, hidden)
    if request.gates == "rows":
        planned = (PlannedTensor(f"{name}.{GATE}", (count, hidden), GATE_ROWS),)
    yield planned_matrix(planned, encoded, gate)
    yield alone(PlannedTensor(f"{name}.{RECORDS}", (count, 2 * hidden), "Q4_K"), records)
    yield planned_vector(f"{name}.{FREQUENCY}", "F32", counts.frequency[layer].float()[order])
    yield planned_vector(f"{name}.{ORDER}", "I32", order.to(torch.int32))
