"""The neuron GGUF: as the zigzag GGUF, but each MLP stored by neurons, so that only active ones need be read.

    blk.I.mlp_gate.weight          [bands, hidden, 256]    Q4_K in zigzag order: the gate alone; it says who is active
    blk.I.mlp_records.weight       [neurons, 2 hidden]     Q4_K by rows: the neuron's row of up, then its column of down
    blk.I.mlp_frequency            [neurons]               F32: share of the calibration's tokens that need it
    blk.I.mlp_order                [neurons]               I32: the model's number of the neuron that is stored here

take the place of the sites mlp_in and mlp_mid. All four have the neurons of a block in one order, by falling frequency,
of equal ones the lower number first: those which should be near at hand are a prefix. What the activation makes exactly
zero is left out, so only models with ReLU are packed so, and there are no thresholds in the MLP. The manifest's section
is `artifacts.neurons`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.artifacts.artifact import Artifact
from sparsepack.artifacts.formats import Format
from sparsepack.artifacts.gguf.neuron_artifact import NeuronArtifact
from sparsepack.artifacts.gguf.neuron_layout import FREQUENCY, GATE, ORDER, RECORDS, SITES_BESIDE
from sparsepack.artifacts.gguf.writer import GgufPlan
from sparsepack.artifacts.gguf.zigzag import engine_plan, numbers_of, planned_site
from sparsepack.artifacts.neurons import neuron_section
from sparsepack.artifacts.plan import PlannedGroup, PlannedTensor, PlanRequest, alone
from sparsepack.artifacts.transfer import stacked_on
from sparsepack.codecs import neurons, zigzag
from sparsepack.errors import PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.neurons import NeuronCounts, check_counts, check_neurons


def opened(file: GgufFile, manifest: Mapping[str, Any]) -> Artifact:
    """A neuron GGUF that has been opened."""
    return NeuronArtifact(manifest, file)


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> GgufPlan:
    """A model as a neuron GGUF.

    Raises `PackingError` for a model without neurons that are exactly inactive, a width that 256 does not divide,
    biases or thresholds in the MLP, counts that are missing or of another model, and as `zigzag.plan`.
    """
    counts = request.neurons
    if counts is None:
        raise PackingError(f"format {format.name}: it stores neurons by how often they are active; give --calibration")
    numbers = numbers_of(checkpoint)
    try:
        check_neurons(numbers)
        check_counts(counts, numbers)
    except PackingError as error:
        raise PackingError(f"{checkpoint.name}: {error}") from error
    _check_mlps(format, checkpoint, request)

    def block(architecture: Architecture, layer: int) -> Iterator[PlannedGroup]:
        for site in SITES_BESIDE:
            yield from planned_site(checkpoint, architecture, layer, site, request)
        yield from _planned_neurons(checkpoint, architecture, layer, counts, request.device)

    return engine_plan(format, checkpoint, request, block, neuron_section(counts))


def _check_mlps(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> None:
    for (layer, site), rule in request.rules.items():
        if site not in SITES_BESIDE and not rule.dense:
            raise PackingError(
                f"blk.{layer}.{site}: {format.name} skips neurons exactly and has no place for thresholds there; "
                "leave the site dense: --include 'blk.*.attn_*'"
            )
    for site in ("mlp_in", "mlp_mid"):
        if checkpoint.stacked_bias(0, site) is not None:
            raise PackingError(
                f"{checkpoint.name}: biases at {site}, for which {format.name} has no place; use zigzag-q4_k"
            )


def _planned_neurons(
    checkpoint: Checkpoint, architecture: Architecture, layer: int, counts: NeuronCounts, device: str
) -> Iterator[PlannedGroup]:
    name, count, hidden = f"blk.{layer}", architecture.intermediate, architecture.hidden
    expected = {"mlp_in": (2 * count, hidden), "mlp_mid": (hidden, count)}
    for site, shape in expected.items():
        if checkpoint.stacked_shape(site, layer) != shape:
            found = checkpoint.stacked_shape(site, layer)
            raise PackingError(
                f"{name}.{site}: the weights are {found}, config.json means {shape}; is it this model's?"
            )
    order = neurons.by_frequency(counts.active[layer])

    def gate() -> Tensor:
        return zigzag.pack(stacked_on(device, [checkpoint.projections(layer, "mlp_in")[0][order]]))

    def records() -> Tensor:
        up, (down,) = checkpoint.projections(layer, "mlp_in")[1], checkpoint.projections(layer, "mlp_mid")
        return neurons.pack(stacked_on(device, [up]), stacked_on(device, [down]), order)

    bands = (zigzag.bands(count), hidden, zigzag.BAND_ROWS)
    yield alone(PlannedTensor(f"{name}.{GATE}", bands, "Q4_K", logical=(count, hidden)), gate)
    yield alone(PlannedTensor(f"{name}.{RECORDS}", (count, 2 * hidden), "Q4_K"), records)
    for vector, type, value in (
        (FREQUENCY, "F32", counts.frequency[layer][order]),
        (ORDER, "I32", order.to(torch.int32)),
    ):
        data = value.contiguous()
        yield alone(PlannedTensor(f"{name}.{vector}", (count,), type, weights=False), partial(data.view, torch.uint8))
