"""How often each neuron was active, as a calibration or a trace says it: one record of either."""

from functools import reduce
from pathlib import Path

import torch

from sparsepack.calibration import folder
from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.neurons import Activity, activity
from sparsepack.errors import PackingError, PlacementError
from sparsepack.files.hashing import NO_HASH
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import MLP_MID
from sparsepack.models.records.neurons import NeuronCounts
from sparsepack.tracing.activity_report import added
from sparsepack.tracing.trace import Trace, is_trace, load


def calibration_or_trace(path: Path) -> Calibration | Trace:
    """What a folder holds, read and checked. Raises `CalibrationError` or `PlacementError` where it is damaged."""
    return load(path) if is_trace(path) else folder.load(path)


def neuron_counts(source: Calibration | Trace) -> NeuronCounts:
    """The counts of every block; of a trace those of all its sessions together.

    Raises `CalibrationError` where a calibration counted no neurons, `PlacementError` where a trace is damaged or
    blocks differ in width.
    """
    layers = _of_trace(source) if isinstance(source, Trace) else activity(source)
    widths = {len(layer.active) for layer in layers}
    if len(widths) > 1:
        raise PlacementError(f"blocks of {min(widths)} to {max(widths)} neurons; expected as many in each")
    origin = "trace" if isinstance(source, Trace) else "calibration"
    return NeuronCounts(torch.stack([layer.active for layer in layers]), layers[0].tokens, source.sha256, origin)


def counts_to_come(checkpoint: Checkpoint) -> NeuronCounts:
    """Counts of the number that there will be: which neurons are active is not known yet."""
    shape = (checkpoint.layers, checkpoint.stacked_shape(MLP_MID)[1])
    return NeuronCounts(torch.zeros(shape, dtype=torch.int64), 1, NO_HASH)


def counts_of_zeros(source: Calibration | Trace, checkpoint: Checkpoint) -> NeuronCounts:
    """`neuron_counts` of a model, where a neuron counts as inactive only if it is exactly zero.

    Raises `PackingError` for a trace by thresholds, and as `neuron_counts` and the `check_model` of either.
    """
    if isinstance(source, Trace) and source.manifest["rule"]["active"] != "nonzero":
        raise PackingError(
            f"{source.path}: its active neurons are those above thresholds, the format leaves out those that are "
            "exactly zero; trace again without --share"
        )
    source.check_model(checkpoint)
    return neuron_counts(source)


def _of_trace(trace: Trace) -> tuple[Activity, ...]:
    sessions = (trace.activity(number) for number in range(len(trace.sessions)))
    return reduce(lambda some, more: tuple(map(added, zip(some, more, strict=True))), sessions)
