"""`pack`: thresholds and weights into one artifact.

Nothing heavy is imported at the top: the command line and recipes read the defaults of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.artifacts.formats import DEFAULT_FORMAT, FORMATS, format_of, summaries, those_with
from sparsepack.codecs.types import LARGEST_GROUP, TYPES
from sparsepack.errors import PackingError
from sparsepack.option import option
from sparsepack.sparsity.attention_options import AttentionOptions
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.verb_module import callable_as

if TYPE_CHECKING:
    from sparsepack.artifacts.plan import Plan
    from sparsepack.models.checkpoint import Checkpoint
    from sparsepack.models.neurons import NeuronCounts
    from sparsepack.models.pruned import PruningRecord
    from sparsepack.sparsity.attention import FoundAttention
    from sparsepack.sparsity.thresholds import Thresholds


@dataclass(frozen=True)
class PackRequest:
    """What to pack. Sparsity comes from `calibration` and `allocation`, or ready-made from `thresholds`, or is none;
    `sparse_attention` is from `calibration`, too, and so is the order of neurons in formats that have one."""

    model: str
    output: Path
    format: str = option(summaries(), default=DEFAULT_FORMAT, choices=tuple(FORMATS))
    calibration: Path | None = None
    allocation: AllocationOptions | None = None
    thresholds: Path | None = None
    sparse_attention: AttentionOptions | None = None
    output_type: str = option("Type of the output matrix.", default="auto", choices=("auto", *TYPES))
    embedding_type: str = option("Type of the embedding.", default="auto", choices=("auto", *TYPES))
    keep: int | None = option(
        "Nonzero weights in a group, of a model that was pruned elsewhere (default: what `prune` recorded).",
        default=None,
        least=1,
    )
    of: int | None = option(
        "Inputs in a group (default: what `prune` recorded).", default=None, least=2, most=LARGEST_GROUP
    )
    device: str = "cpu"
    overwrite: bool = False
    recipe: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise `PackingError` where the parts do not go together."""
        format = format_of(self.format)
        if self.allocation is not None:
            self.allocation.check()
        sparse = self.thresholds is not None or (self.allocation is not None and self.allocation.sparsity > 0)
        if sparse and not format.thresholds:
            raise PackingError(
                f"format {format.name}: it has no place for thresholds; "
                f"leave --sparsity out or use {those_with('thresholds')}"
            )
        if (self.keep is None) != (self.of is None):
            raise PackingError("--keep and --of go together: give both, or neither for what `prune` recorded")
        if self.keep is not None and not format.weight_sparsity:
            raise PackingError(f"format {format.name}: it keeps zeros; --keep is for {those_with('weight_sparsity')}")
        if format.weight_sparsity and (self.output_type, self.embedding_type) != ("auto", "auto"):
            raise PackingError(f"format {format.name}: embedding and output matrix stay in the model's own type")
        if self.thresholds is not None and self.allocation is not None and self.allocation.sparsity > 0:
            raise PackingError("give --thresholds or --sparsity, not both: the table has its own sparsities")
        if self.thresholds is None and sparse and self.calibration is None:
            raise PackingError("--sparsity needs --calibration, a folder made by `sparsepack calibrate`")
        attention = self.sparse_attention or AttentionOptions()
        attention.check()
        if attention.sparse and not format.attention:
            raise PackingError(
                f"format {format.name}: it has no place for sparse attention; "
                f"leave --attention out or use {those_with('attention')}"
            )
        if attention.sparse and self.calibration is None:
            raise PackingError("--attention needs --calibration, a folder made by `sparsepack calibrate`")
        if format.neurons and self.calibration is None:
            raise PackingError(
                f"format {format.name}: it stores neurons by how often they are active; "
                "give --calibration, a folder made by `sparsepack calibrate`"
            )
        asked = format.neurons or self.thresholds is not None or self.allocation is not None or attention.sparse
        if self.calibration is not None and not asked:
            raise PackingError(
                "--calibration alone changes nothing; say what to take from it, --sparsity or --attention"
            )


CARD = "README.md"
"""The model card in a folder. It is not sealed: a new one with what was measured, or a word by hand, may replace it."""


@dataclass(frozen=True)
class Packed:
    """What came of it: the file or folder, what the user should be told, and the thresholds inside."""

    path: Path
    notes: tuple[str, ...]
    thresholds: Thresholds | None


def pack(request: PackRequest, checkpoint: Checkpoint | None = None) -> Packed:
    """Make an artifact, whole or not at all.

    checkpoint -- the model that the request names: for callers that have opened it already

    Raises `UserError` subclasses.
    """
    from sparsepack.artifacts.folder.layout import MANIFEST
    from sparsepack.artifacts.folder.writer import FolderPlan
    from sparsepack.files.atomic import check_output
    from sparsepack.files.resume import state_beside
    from sparsepack.models.checkpoint import open_checkpoint
    from sparsepack.models.families import check_packable
    from sparsepack.publish.card import model_card

    request.check()
    folder = format_of(request.format).folder
    check_output(request.output, request.overwrite, folder, MANIFEST if folder else None)
    checkpoint = checkpoint or open_checkpoint(request.model)
    check_packable(checkpoint.family, checkpoint.name)  # before anything is found for it
    attention, neurons = attention_for(checkpoint, request), neurons_for(checkpoint, request)
    with state_beside(request.output) as state:
        table = thresholds_for(checkpoint, request, state)
        plan = plan_of(checkpoint, request, table, None, attention, neurons)
        if isinstance(plan, FolderPlan):
            plan = replace(plan, beside=lambda made: {CARD: model_card(made, file=request.output.name)})
        plan.write(request.output, request.overwrite)
    return Packed(request.output, plan.notes, table)


def plan_of(
    checkpoint: Checkpoint,
    request: PackRequest,
    table: Thresholds | None,
    pruning: PruningRecord | None = None,
    attention: FoundAttention | None = None,
    neurons: NeuronCounts | None = None,
) -> Plan:
    """The artifact that a request makes with these thresholds, this attention and these counts of active neurons.

    pruning -- what a model that is still to be pruned will say of itself; None: what it says

    Raises `PackingError` for what does not fit.
    """
    from sparsepack.artifacts.attention import attention_section
    from sparsepack.artifacts.manifest import PRUNING
    from sparsepack.artifacts.plan import PlanRequest
    from sparsepack.codecs.pattern import Pattern
    from sparsepack.models.heads import heads_of_config
    from sparsepack.models.pruned import pruning_record

    section = None
    if attention is not None:
        heads = heads_of_config(checkpoint.config)
        section = attention_section(attention.sparse, heads, attention.calibration_sha256)
    record = pruning or pruning_record(checkpoint.path)
    provenance = {
        "calibration": {"sha256": table.calibration_sha256} if table else None,
        "recipe": dict(request.recipe) if request.recipe else None,
        "thresholds": table.summary() if table else None,
        **({PRUNING: dict(record.summary)} if record else {}),
    }
    inside = PlanRequest(
        rules=table.rules if table else {},
        provenance=provenance,
        output_type=request.output_type,
        embedding_type=request.embedding_type,
        patterns=record.patterns if record else {},
        pattern=None if request.keep is None or request.of is None else Pattern(request.keep, request.of),
        attention=section,
        neurons=neurons,
        notes=attention.notes if attention else (),
        device=request.device,
    )
    return format_of(request.format).plan(checkpoint, inside)


def thresholds_for(checkpoint: Checkpoint, request: PackRequest, state: Path | None = None) -> Thresholds | None:
    """The table that the request names or asks to be found; `state` as `find_thresholds` takes it."""
    from sparsepack.calibrate.folder import load
    from sparsepack.sparsity.find import find_thresholds
    from sparsepack.sparsity.thresholds import read_thresholds

    if request.thresholds is not None:
        table = read_thresholds(request.thresholds)
        table.check_model(checkpoint)
        return table
    if request.allocation is None or request.calibration is None:
        return None
    return find_thresholds(checkpoint, load(request.calibration), request.allocation, state)


def attention_for(checkpoint: Checkpoint, request: PackRequest) -> FoundAttention | None:
    """The sparse attention that the request asks to be found."""
    from sparsepack.calibrate.folder import load
    from sparsepack.sparsity.attention import find_attention

    options = request.sparse_attention
    if options is None or not options.sparse or request.calibration is None:
        return None
    return find_attention(checkpoint, load(request.calibration), options)


def neurons_for(checkpoint: Checkpoint, request: PackRequest) -> NeuronCounts | None:
    """How often each neuron was active, for a format that stores them by it."""
    import torch

    from sparsepack.calibrate.folder import load
    from sparsepack.calibrate.neurons import activity
    from sparsepack.models.neurons import NeuronCounts, check_neurons

    if not format_of(request.format).neurons or request.calibration is None:
        return None
    check_neurons(checkpoint.architecture)  # first: no other calibration would help
    calibration = load(request.calibration)
    calibration.check_model(checkpoint)
    layers = activity(calibration)
    return NeuronCounts(torch.stack([it.active for it in layers]), layers[0].tokens, calibration.sha256)


callable_as(__name__, "sparsepack.pack:pack")
