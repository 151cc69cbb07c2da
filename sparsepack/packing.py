"""`pack`: thresholds and weights into one artifact.

Nothing heavy is imported at the top: the command line and recipes read the defaults of a request.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
from sparsepack.calibrate.trace import MANIFEST as TRACE
from sparsepack.errors import PackingError, WorkersError
from sparsepack.formats.blocks.table import TYPES
from sparsepack.formats.kinds import GATE_ORDERS
from sparsepack.formats.table import DEFAULT_FORMAT, FORMATS, format_of, summaries, those_with
from sparsepack.models.pattern import LARGEST_GROUP, Pattern
from sparsepack.operation import Input, Operation
from sparsepack.option import check_options, check_type, check_types, only_with, option, with_paths

if TYPE_CHECKING:
    from torch import Tensor

    from sparsepack.calibrate.attention import FoundAttention
    from sparsepack.calibrate.folder import Calibration
    from sparsepack.calibrate.refitting import Refit
    from sparsepack.calibrate.threshold_table import Thresholds
    from sparsepack.formats.plan import Plan, PlanRequest
    from sparsepack.models.activity import NeuronCounts
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Provenance
    from sparsepack.workers.shard import Shard

_PLANES = only_with("format", *(row.name for row in FORMATS.values() if row.levels), takes=True)
_FIRST_BITS = 3.4
"""Bits read at which a search for --kl or --loss begins."""
_SLID = only_with("format", *(row.name for row in FORMATS.values() if row.weight_sparsity))


@dataclass(frozen=True)
class PackRequest:
    """What to pack. Sparsity comes from `calibration` and `allocation`, or ready-made from `thresholds`, or is none;
    `sparse_attention` is from `calibration`, too, and so are the order of neurons in formats that have one, and the
    inputs that `fitting` fits weights to."""

    model: str
    output: Path
    format: str = option(summaries(), default=DEFAULT_FORMAT, choices=tuple(FORMATS))
    calibration: Path | None = None
    thresholds: Path | None = None
    allocation: AllocationOptions | None = None
    fitting: RefitOptions | None = None
    sparse_attention: AttentionOptions | None = None
    bits: float | None = option(
        "In place of --sparsity: bits of a weight that a decoded token reads in the mean, scales included. Takes a "
        "format with planes, zigzag-q6_p or planes-q6_p (default: all).",
        default=None,
        above=0,
        most=16,
        counts=(_PLANES,),
    )
    kl: float | None = option(
        "In place of --bits: find the bits at which text that the calibration holds out has this KL divergence from "
        "the model, in nats (default: no such goal).",
        default=None,
        above=0,
        counts=(_PLANES,),
    )
    loss: str | None = option(
        "In place of --bits: find the bits at which such text loses so much perplexity, 3% for one, and has a KL "
        "divergence of no more than twice that.",
        default=None,
        counts=(_PLANES,),
    )
    output_type: str = option("Type of the output matrix.", default="auto", choices=("auto", *TYPES))
    embedding_type: str = option("Type of the embedding.", default="auto", choices=("auto", *TYPES))
    keep: int | None = option(
        "Nonzero weights in a group, of a model that was pruned elsewhere (default: what `prune` recorded).",
        default=None,
        least=1,
        counts=(only_with("of"), _SLID),
    )
    of: int | None = option(
        "Inputs in a group (default: what `prune` recorded).",
        default=None,
        least=2,
        most=LARGEST_GROUP,
        counts=(only_with("keep"), _SLID),
    )
    gates: str = option(
        "Order in which gates are stored: of gates by rows, those of a few neurons can be read alone.",
        default=GATE_ORDERS[0],
        choices=GATE_ORDERS,
        counts=(only_with("format", *(row.name for row in FORMATS.values() if row.mlp.by_count)),),
    )
    score: bool = option(
        "Score what packing lost on the windows that the calibration holds out, in about a minute or a tenth of the "
        "time before.",
        default=True,
    )
    device: str = "cpu"
    overwrite: bool = False
    recipe: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise `PackingError` for a value of another type or out of range, and where the parts do not go together."""
        check_types(self, PackingError)
        format = format_of(self.format)
        check_options(self, PackingError, but=("format",))  # which the table of formats is asked for
        targets = [f"--{name}" for name in ("bits", "kl", "loss") if getattr(self, name) is not None]
        if len(targets) > 1:
            raise PackingError(f"give {' or '.join(targets)}, not both: each says how many bits are read")
        if targets and self.allocation is not None and self.allocation.sparsity > 0:
            raise PackingError(f"give {targets[0]} or --sparsity, not both: sparsity is the share of bits not read")
        if self.bits is not None and not self.bits < format.bits:
            raise PackingError(f"--bits {self.bits:g}: {format.name} has {format.bits:g} in all; expected fewer")
        if targets and (self.calibration is None or self.thresholds is not None):
            raise PackingError(
                f"{targets[0]} needs --calibration, a folder made by `sparsepack calibrate`, and no --thresholds"
            )
        _ = self.goal
        if self.allocation is not None:
            self.allocation.check()
        sparse = self.thresholds is not None or (self.allocation is not None and self.allocation.sparsity > 0)
        sparse = sparse or bool(targets)
        if sparse and not format.thresholds:
            raise PackingError(
                f"format {format.name}: it has no place for thresholds; "
                f"leave sparsity out or use {those_with('thresholds')}"
            )
        if format.folder and (self.output_type, self.embedding_type) != ("auto", "auto"):
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
        if format.mlp.by_count and self.calibration is None:
            raise PackingError(
                f"format {format.name}: it stores neurons by how often they are active; "
                "give --calibration, a folder made by `sparsepack calibrate` or `sparsepack trace`"
            )
        if self.fitting is not None:
            self.fitting.check()
        refit = self.fit
        if refit.fits and not format.fits:
            raise PackingError(
                f"format {format.name}: its matrices cannot be fitted to their inputs; leave --refit and --quantiser "
                f"out or use {those_with('fits')}"
            )
        if refit.refit and format.levels:
            raise PackingError(
                f"format {format.name}: --refit fits weights to inputs that are skipped, not to levels of planes; "
                "leave it out, error feedback (--quantiser gptq, the default) knows of levels"
            )
        if refit.refit and not sparse:
            raise PackingError(
                "--refit fits weights to what skipping leaves of their inputs, and nothing is skipped; give --sparsity "
                "or --thresholds, or take --quantiser gptq alone"
            )
        if refit.fits and self.calibration is None:
            raise PackingError(
                f"{'--refit' if refit.refit else '--quantiser gptq'} needs --calibration, a folder made by "
                "`sparsepack calibrate`"
            )
        used = format.mlp.by_count or self.thresholds is not None or self.allocation is not None
        used = used or attention.sparse or refit.fits or self.score or bool(targets)
        if self.calibration is not None and not used:
            options = "--sparsity, --attention, --quantiser gptq" if format.fits else f"--format {those_with('fits')}"
            alone = "--quantiser round" if format.fits else f"--format {format.name}"
            raise PackingError(
                f"--calibration changes nothing with {alone} and --no-score alone; say what to take from it: "
                f"{options}; or leave it out"
            )

    @property
    def goal(self) -> tuple[str, float]:
        """What may be lost at most: "KL", in nats, or "loss", a share of the perplexity. Zero: there is no such goal.

        Raises `PackingError` for a loss that is no share.
        """
        if self.loss is None:
            return "KL", self.kl or 0.0
        percent = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*", self.loss)
        try:
            share = float(percent[1]) / (100 if percent[2] else 1) if percent else 0.0
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise PackingError(f"--loss {self.loss[:40]!r}: expected a share of the perplexity, as 3% or 0.03")
        return "loss", share

    @property
    def shown_goal(self) -> str:
        """The option that says what may be lost, for messages."""
        return f"--kl {self.kl:g}" if self.loss is None else f"--loss {self.loss}"

    def settled(self) -> PackRequest:
        """The same request with the sparsity that `bits` mean, or that a search begins with, and of the format's own
        blocks."""
        format, allocation = format_of(self.format), self.allocation
        bits = self.bits or (min(_FIRST_BITS, format.bits / 2) if self.goal[1] else None)
        if bits is not None:
            sparsity = 1 - bits / format.bits
            shared = replace(allocation, sparsity=sparsity) if allocation else None
            allocation = shared or AllocationOptions(sparsity, device=self.device)
        if allocation is not None and format.levels:
            allocation = replace(allocation, block=format.matrices.block)
            allocation.check()
        return replace(self, bits=None, allocation=allocation)

    @property
    def fit(self) -> RefitOptions:
        """How the weights of the blocks come to be what is stored, `auto` decided. A trace knows no inputs."""
        options = self.fitting or RefitOptions()
        if options.quantiser != "auto" or self.calibration is None or not format_of(self.format).fits:
            return options.decided(calibrated=False)
        return options.decided(calibrated=not (Path(self.calibration) / TRACE).is_file())

    def check_workers(self, count: int) -> None:
        """Raise `WorkersError` for what so many workers do not make together."""
        if count == 1:
            return
        if self.allocation is not None and self.allocation.sparsity > 0:  # of `settled`, with --bits and --kl, too
            raise WorkersError(
                "--sparsity finds thresholds, which pack does in one process; find them with `sparsepack thresholds`, "
                "which takes --devices, too, and give --thresholds"
            )
        if self.fit.fits:
            raise WorkersError(
                f"{'--refit' if self.fit.refit else 'error feedback'} fits weights to the calibration in one process; "
                "leave out --devices and torchrun, or give --quantiser round"
            )


CARD = "README.md"
"""The model card in a folder. It is not sealed: a new one with what was measured, or a word by hand, may replace it."""


@dataclass(frozen=True)
class Packed:
    """What came of it: the file or folder, what the user should be told, and the thresholds inside.

    score    -- what was lost on held-out text: `packing_score.score_artifact`; None: it was not scored
    unscored -- why it was not, or what of the loss is not in it, in one line, where it was asked for
    warning  -- one line on a large loss, with what would bring most back
    """

    path: Path
    notes: tuple[str, ...]
    thresholds: Thresholds | None
    score: Mapping[str, Any] | None = None
    unscored: str | None = None
    warning: str | None = None


@dataclass(frozen=True)
class Found:
    """What is known of a model when its artifact is planned, beside the request; None: the artifact does without.

    thresholds -- of its sites
    attention  -- its sparse attention
    neurons    -- how often each of its neurons was active
    refit      -- its matrices, fitted to their inputs
    pruning    -- what a model that is still to be pruned will say of itself; None: what it says
    rotation   -- likewise of one that is still to be rotated
    distillation -- likewise of one that is still to be distilled
    held_out   -- tokens of the windows that the calibration holds out, int32 [windows, context]
    calibrated -- windows of the calibration, and positions in each
    """

    thresholds: Thresholds | None = None
    attention: FoundAttention | None = None
    neurons: NeuronCounts | None = None
    refit: Refit | None = None
    pruning: Provenance | None = None
    rotation: Provenance | None = None
    distillation: Provenance | None = None
    held_out: Tensor | None = None
    calibrated: tuple[int, int] = (0, 0)


def pack(request: PackRequest, checkpoint: Checkpoint | None = None, shard: Shard | None = None) -> Packed:
    """Make an artifact, whole or not at all.

    checkpoint -- the model that the request names: for callers that have opened it already
    shard      -- this worker's of several, who make its tensors together with the same bytes as one alone; all must
                  reach the folder of the first one's output, which writes the rest. None: this process alone

    Raises `UserError` subclasses, among them `WorkersError` where a worker does not reach the output, and `WorkerLost`.
    """
    from sparsepack.calibrate.find_thresholds import predicted_thresholds
    from sparsepack.calibrate.provenance import processor
    from sparsepack.files.atomic import check_inputs, check_output
    from sparsepack.formats.containers.write_tensors import write_planned
    from sparsepack.formats.manifest import SCORE
    from sparsepack.formats.open import open_artifact
    from sparsepack.models.checkpoint.checkpoint import checkpoint_of
    from sparsepack.models.checkpoint.configuration import MANIFEST
    from sparsepack.packing_goal import for_search, with_goal
    from sparsepack.packing_score import Scoring, score_artifact, scoring_of, warning_of
    from sparsepack.publish.card import model_card
    from sparsepack.workers.shard import ALONE

    shard = shard or ALONE
    check_type("request", request, PackRequest, PackingError)
    request.check()
    request = request.settled()
    request.check_workers(shard.world_size)
    request = with_paths(request)
    format = format_of(request.format)
    if shard.first:
        check_output(request.output, request.overwrite, format.folder, MANIFEST if format.folder else None)
    checkpoint = checkpoint_of(checkpoint or request.model)
    read = (checkpoint.path, *checkpoint.source.hash.files, request.calibration, request.thresholds)
    check_inputs(request.output, [each for each in read if each is not None])
    format.check_model(checkpoint)
    # Thresholds and fitted weights take long: whatever else does not fit is found before.
    if request.allocation or request.fit.fits:
        thresholds = predicted_thresholds(checkpoint, request.allocation) if request.allocation else None
        plan_of(checkpoint, request, predicted_findings(checkpoint, request, thresholds))
    if shard.world_size > 1:  # before each of them asks for it, to check what was found
        checkpoint.source.hash.share_beside(shard.all_gather, lambda: None)
    with shard.saved_beside(request.output) as shard:
        found = find(checkpoint, request, shard)
        plan = plan_of(checkpoint, request, found)
        if request.goal[1] and found.thresholds is not None:
            searched, kept = for_search(found.held_out)
            some = scoring_of(checkpoint, request, replace(found, held_out=searched))
            if some.windows is None:
                raise PackingError(f"{request.shown_goal}: {some.reason}; give --bits")
            thresholds = with_goal(plan, found.thresholds, checkpoint, request, some.windows)
            found = replace(found, thresholds=thresholds, held_out=kept)
            plan = plan_of(checkpoint, request, found)
        plan = plan.with_beside(lambda made: {CARD: model_card(made, file=request.output.name)})
        scoring = scoring_of(checkpoint, request, found) if request.score else Scoring(None)
        if (windows := scoring.windows) is not None:
            plan = plan.with_measure(lambda made: score_artifact(made, checkpoint, windows, request.device))
        shard.agree(lambda: {"model": checkpoint.sha256, "processor": processor(request.device), "plan": plan.identity})
        if shard.first:
            plan.write(request.output, request.overwrite, partial(write_planned, shard=shard))
        else:
            write_planned(plan.files(request.output), plan.at_once, shard)
    if windows is None or not shard.first:
        return Packed(request.output, plan.notes, found.thresholds, unscored=scoring.reason)
    score = open_artifact(request.output).manifest[SCORE]
    warning = warning_of(score, request, checkpoint.dtype)
    return Packed(request.output, plan.notes, found.thresholds, score, scoring.reason, warning)


def find(checkpoint: Checkpoint, request: PackRequest, shard: Shard | None = None) -> Found:
    """What the request asks to be read from its table, or found from its calibration, which is read once.

    shard -- as `find_thresholds` takes it; matrices that are fitted to their inputs are kept there. None: nowhere

    Raises `UserError` subclasses for what is damaged, of another model, or does not say what is asked of it.
    """
    from sparsepack.calibrate.attention import find_attention
    from sparsepack.calibrate.find_thresholds import find_thresholds
    from sparsepack.calibrate.refitting import check_tokens
    from sparsepack.calibrate.threshold_table import read_thresholds
    from sparsepack.calibrate.trace_file import Trace, calibration_or_trace, counts_of_zeros
    from sparsepack.workers.shard import ALONE

    thresholds, allocation, attention = None, request.allocation, request.sparse_attention
    refit = request.fit if request.fit.fits else None
    if request.thresholds is not None:
        thresholds, allocation = read_thresholds(request.thresholds), None
        thresholds.check_model(checkpoint)
    if attention is not None and not attention.sparse:
        attention = None
    format = format_of(request.format)
    by_neurons = format.mlp.by_count
    if request.calibration is None or not (by_neurons or attention or allocation or refit or request.score):
        return Found(thresholds)
    source = calibration_or_trace(request.calibration)
    neurons = counts_of_zeros(source, checkpoint) if by_neurons else None
    if isinstance(source, Trace):
        if attention or allocation or refit or not by_neurons:
            raise PackingError(
                f"{source.path}: a trace, which says how often neurons are active alone; --sparsity, --attention, "
                "--refit and --quantiser gptq need a folder made by `sparsepack calibrate`"
            )
        return Found(thresholds, neurons=neurons)
    if refit or request.score:
        source.check_model(checkpoint)
    if refit:
        check_tokens(checkpoint, (len(source.windows), source.windows.shape[1]), refit)
    heavy = find_attention(checkpoint, source, attention) if attention else None
    if allocation:  # late, since it takes long
        thresholds = find_thresholds(checkpoint, source, allocation, shard or ALONE)
    found = Found(thresholds, heavy, neurons)
    if request.score or request.goal[1]:
        found = replace(found, held_out=source.held_out, calibrated=(len(source.windows), source.windows.shape[1]))
    return replace(found, refit=_refit(checkpoint, request, found, source, shard or ALONE)) if refit else found


def _refit(checkpoint: Checkpoint, request: PackRequest, found: Found, calibration: Calibration, shard: Shard) -> Refit:
    """The matrices, fitted to what enters them where the rest of what was `found` is so."""
    from sparsepack.calibrate.refitting import fitted_sites, refit_model
    from sparsepack.formats.manifest import SCHEMA

    format, options, thresholds = format_of(request.format), request.fit, found.thresholds
    inside = _inside(checkpoint, request, found)
    encode = format.encoder(checkpoint, inside)
    how = f"{format.name} {inside.pattern} {inside.gates} {SCHEMA}"  # a newer schema may have other tensors
    sites = fitted_sites(checkpoint, format, options)
    return refit_model(checkpoint, calibration, sites, encode, thresholds, options, how, shard)


def predicted_findings(
    checkpoint: Checkpoint,
    request: PackRequest,
    thresholds: Thresholds | None,
    pruning: Provenance | None = None,
    rotation: Provenance | None = None,
    distillation: Provenance | None = None,
) -> Found:
    """What is known of `find`'s answer before anything is run: as much, but with values that are not the final ones.

    thresholds -- that are to come, too
    pruning, rotation, distillation -- of a model that is still to be pruned, rotated and distilled

    Raises `PackingError` for sparse attention that the model cannot have.
    """
    from sparsepack.calibrate.attention import predicted_attention
    from sparsepack.calibrate.refitting import predicted_refit
    from sparsepack.calibrate.trace_file import predicted_counts

    attention, refit = request.sparse_attention, request.fit
    return Found(
        thresholds=thresholds,
        attention=predicted_attention(checkpoint, attention) if attention is not None and attention.sparse else None,
        neurons=predicted_counts(checkpoint) if format_of(request.format).mlp.by_count else None,
        refit=predicted_refit(checkpoint, format_of(request.format), refit) if refit.fits else None,
        pruning=pruning,
        rotation=rotation,
        distillation=distillation,
    )


def plan_of(checkpoint: Checkpoint, request: PackRequest, found: Found | None = None) -> Plan:
    """The artifact that a request makes of a model with what was found for it.

    Raises `PackingError` for what does not fit.
    """
    from sparsepack.formats.open import check_readable

    plan = format_of(request.format).plan(checkpoint, _inside(checkpoint, request, found or Found()))
    return replace(plan, check=check_readable)


def _inside(checkpoint: Checkpoint, request: PackRequest, found: Found) -> PlanRequest:
    """What goes into the artifact beside the model's weights."""
    from sparsepack.formats.attention import attention_section
    from sparsepack.formats.manifest import DISTILLATION, PRUNING, REFIT, ROTATION, SCORE, SCORE_PLACEHOLDER
    from sparsepack.formats.plan import PlanRequest
    from sparsepack.models.hf_config import heads_of_config
    from sparsepack.models.provenance import distillation_record, pruning_record, rotation_record

    thresholds, attention = found.thresholds, found.attention
    pruning = found.pruning or pruning_record(checkpoint.path)
    rotation = found.rotation or rotation_record(checkpoint.path)
    distillation = found.distillation or distillation_record(checkpoint.path)
    section = None
    if attention is not None:
        heads = heads_of_config(checkpoint.config)
        section = attention_section(attention.sparse, heads, attention.calibration_sha256)
    provenance = {
        "calibration": {"sha256": thresholds.calibration_sha256} if thresholds else None,
        "recipe": dict(request.recipe) if request.recipe else None,
        "thresholds": thresholds.summary() if thresholds else None,
        **({PRUNING: dict(pruning.summary)} if pruning else {}),
        **({ROTATION: dict(rotation.summary)} if rotation else {}),
        **({DISTILLATION: dict(distillation.summary)} if distillation else {}),
        **({REFIT: dict(found.refit.section)} if found.refit else {}),
        **({SCORE: SCORE_PLACEHOLDER} if request.score and request.calibration else {}),
    }
    return PlanRequest(
        rules=thresholds.rules if thresholds else {},
        provenance=provenance,
        output_type=request.output_type,
        embedding_type=request.embedding_type,
        patterns=pruning.patterns if pruning else {},
        pattern=None if request.keep is None or request.of is None else Pattern(request.keep, request.of),
        attention=section,
        neurons=found.neurons,
        gates=request.gates,
        encoded=found.refit.encoded if found.refit else {},
        notes=attention.notes if attention else (),
        device=request.device,
    )


def _table(made: Packed, output: Path) -> str:
    from sparsepack.formats.inspect import describe
    from sparsepack.inspection import artifact_line, score_rows
    from sparsepack.progress import say

    say(*(f"note: {note}" for note in made.notes))
    return "\n".join([artifact_line(describe(output)), *(f"{text}: {row}" for text, row in score_rows(made.score))])


def _say_losses(made: Packed) -> None:
    from sparsepack.progress import say
    from sparsepack.terminal import tell

    say(*([f"note: {made.unscored}"] if made.unscored else []))
    if made.warning:
        tell(f"WARNING: {made.warning}", sys.stderr)


PACK = Operation(
    name="pack",
    summary="Pack a model into one artifact: a GGUF file or a folder.",
    help="""
Pack MODEL into one artifact, with the thresholds of a calibration inside if --sparsity is given, its heavy
channels of attention if --attention is, and weights fitted to their inputs if --refit or --quantiser gptq is.

With a calibration it also says what was lost on the text that this holds out (docs/what-is-lost.md), and warns from
5 % of perplexity on; --no-score leaves it out.

With --devices, or under torchrun, several workers share the blocks and write them into one file, which all must
reach; the artifact has the same bytes.
""",
    options=PackRequest,
    inputs={
        "calibration": Input(
            "A folder made by `sparsepack calibrate`; needed for --sparsity, --refit, --quantiser gptq, --attention "
            "and neuron-q4_k, for which a trace does, too."
        ),
        "thresholds": Input("A table made by `sparsepack thresholds`, in place of --sparsity."),
    },
    groups={
        "What is skipped": ("thresholds",),
        "Types": ("output_type", "embedding_type", "gates"),
        "Pruned models": ("keep", "of"),
        "Output": ("score",),
    },
    flags={"score": ("score", "--score/--no-score")},
    dtype_counts=(only_with("calibration"),),
    run="sparsepack.packing:pack",
    forecast="sparsepack.packing_forecast:forecast",
    table=_table,
    notes=_say_losses,
    output="The file or folder to make.",
)
