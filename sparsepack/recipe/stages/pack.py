"""`pack`: the artifact, and its description."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.thresholds import AttentionOptions
from sparsepack.errors import PackingError, UserError
from sparsepack.files.atomic import write_json
from sparsepack.formats.kinds import DENSE, MlpKind
from sparsepack.formats.table import FORMATS
from sparsepack.inspection import score_rows
from sparsepack.packing import PackRequest
from sparsepack.progress import say
from sparsepack.recipe.section import Recipe, Section, Text, limit
from sparsepack.recipe.stage import Job, Stage, Value, Verdict, judged, read_json
from sparsepack.recipe.stages import distil, prune, rotate
from sparsepack.recipe.stages.calibrate import (
    AGAIN,
    CALIBRATE,
    FOLDER,
    Calibrate,
    folder_of,
    windows,
    windows_and_held_out,
)
from sparsepack.recipe.stages.prune import pruned
from sparsepack.recipe.stages.thresholds import TABLE, THRESHOLDS, predicted_thresholds, sparse
from sparsepack.tables import Part, Table
from sparsepack.terminal import tell

if TYPE_CHECKING:
    from sparsepack.formats.plan import Plan

DESCRIPTION = "pack.json"
_MADE_FROM = ("name", "model", "dtype", "calibrate", "rotate", "prune", "distil", "activation_sparsity", "pack")


class Pack(Section):
    """The artifact. Sparse attention takes its channels from the calibration, and weights are fitted to inputs on its
    text; of a rotated, pruned or distilled model it is made again."""

    key: ClassVar[str] = "pack"
    options: ClassVar[type] = PackRequest
    also: ClassVar[tuple[type, ...]] = (AttentionOptions, RefitOptions)

    format: str
    output_type: str
    embedding_type: str
    keep: int | None
    of: int | None
    gates: str
    score: bool
    refit: bool
    quantiser: str
    refit_windows: int | None
    refit_dense: float
    damping: float
    attention: str
    channels: int | None
    tokens: Text
    sinks: int
    recent: int
    min_context: int
    dense_layers: Text

    @property
    def sparse_attention(self) -> AttentionOptions:
        """What it asks for of attention."""
        return AttentionOptions(**self.told(AttentionOptions))

    def refit_options(self, recipe: Recipe) -> RefitOptions:
        """How weights come to be what is stored."""
        return RefitOptions(**self.told(RefitOptions), device=recipe.device, dtype=recipe.dtype)


def fitted(recipe: Recipe) -> RefitOptions | None:
    """How weights will be fitted to their inputs; None where they will not."""
    section = Pack.find_in(recipe)
    if section is None:
        return None
    calibrated = Calibrate.find_in(recipe) is not None and FORMATS[section.format].fits
    options = section.refit_options(recipe).decided(calibrated)
    return options if options.fits else None


def sparse_attention(recipe: Recipe) -> bool:
    """Whether the artifact will have attention that reads some of the tokens alone."""
    section = Pack.find_in(recipe)
    return section is not None and section.sparse_attention.sparse


def calibrated(recipe: Recipe) -> bool:
    """Whether the artifact takes something from the calibration itself, not by way of thresholds."""
    return sparse_attention(recipe) or mlp_kind(recipe).by_count or fitted(recipe) is not None


def mlp_kind(recipe: Recipe) -> MlpKind:
    """How the artifact stores MLPs; dense ones where there is none."""
    section = Pack.find_in(recipe)
    return DENSE if section is None else FORMATS[section.format].mlp


def _scored(recipe: Recipe, section: Pack) -> bool:
    """Whether there is a calibration of the very model that is packed, to score the artifact on what it holds out."""
    changed = rotate.rotated(recipe) or prune.pruned(recipe) or distil.distilled(recipe)
    of_changed = sparse(recipe) or calibrated(recipe)  # then the changed model is calibrated again
    return section.score and Calibrate.find_in(recipe) is not None and (of_changed or not changed)


def artifact_name(section: Pack) -> str:
    """The name of the artifact in the work folder."""
    return f"model{FORMATS[section.format].suffix}"


def artifact_of(job: Job) -> Path:
    """The path of the artifact of a recipe that packs."""
    section = Pack.find_in(job.recipe)
    assert section is not None
    return job.folder / artifact_name(section)


def provenance(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that the artifact depends on, for its manifest."""
    value = recipe.to_json()
    return {key: value[key] for key in _MADE_FROM}


def _problems(recipe: Recipe, section: Pack) -> Iterator[str]:
    if section.keep is not None and pruned(recipe):
        yield "pack.keep: it is for a model that was pruned elsewhere; leave it out, prune says what stays"
    if calibrated(recipe) and Calibrate.find_in(recipe) is None:
        what = "format: it stores neurons by how often they are active on"
        if sparse_attention(recipe):
            what = "attention: its channels are chosen on"
        elif (options := fitted(recipe)) is not None:
            what = f"{'refit' if options.refit else 'quantiser'}: weights are fitted to their inputs on"
        yield f"pack.{what} calibration text; add a calibrate section"
    try:
        _request(recipe, section, recipe.model, Path(), Path(FOLDER)).check()
    except PackingError as error:
        yield f"pack: {error}"


def _misfits(job: Job, section: Pack) -> Iterator[str]:
    """What the format cannot hold of the model, or the model does not have of what is asked, or the text is too short
    for."""
    from sparsepack.calibrate.refitting import check_tokens

    try:
        FORMATS[section.format].check_model(job.checkpoint)
        _planned(job, section)
        if (options := fitted(job.recipe)) is not None:
            check_tokens(job.checkpoint, _windows(job, options), options)
    except UserError as error:
        yield f"pack: {error}"


def request_of(job: Job, section: Pack) -> PackRequest:
    """The section as what `pack` takes."""
    return _request(job.recipe, section, job.model, job.folder, folder_of(job))


def _request(recipe: Recipe, section: Pack, model: str, folder: Path, calibration: Path) -> PackRequest:
    return PackRequest(
        model=model,
        output=folder / artifact_name(section),
        calibration=calibration if calibrated(recipe) or _scored(recipe, section) else None,
        thresholds=folder / TABLE if sparse(recipe) else None,
        device=recipe.device,
        overwrite=True,
        recipe=provenance(recipe),
        sparse_attention=section.sparse_attention,
        fitting=section.refit_options(recipe),
        **section.told(PackRequest),
    )


def _windows(job: Job, options: RefitOptions) -> tuple[int, int]:
    """How many calibration windows weights are fitted on, and of how many tokens each."""
    from sparsepack.calibrate.refitting import fitting_windows

    calibrate = Calibrate.find_in(job.recipe)
    assert calibrate is not None  # or the recipe would have been refused
    count, context = windows(job, calibrate)
    return fitting_windows(job.checkpoint, options, (count, context))


def _tokens(job: Job, section: Pack) -> int | None:
    """Each block is run once, and the products of its inputs cost as much again."""
    if (options := fitted(job.recipe)) is None:
        return _score_tokens(job, section) or None
    count, context = _windows(job, options)
    return 2 * count * context + _score_tokens(job, section)


def _score_tokens(job: Job, section: Pack) -> int:
    """Tokens that pass through a model to score what packing lost."""
    from sparsepack.packing_score import cost_of

    calibrate = Calibrate.find_in(job.recipe)
    if not _scored(job.recipe, section) or calibrate is None:
        return 0
    (count, held_out), context = windows_and_held_out(job, calibrate)
    skips = sparse(job.recipe) or sparse_attention(job.recipe)
    cost = cost_of(job.checkpoint, request_of(job, section), skips, (count, context))
    return cost.passes * min(held_out * context, cost.tokens)


def _memory(job: Job, section: Pack) -> int | None:
    """The bytes of the text's way through a block, and of what its widest site is fitted with."""
    from sparsepack.calibrate.refitting import AT_ONCE
    from sparsepack.models.family import SITES
    from sparsepack.recipe.plan import LIVE, block_by_block_bytes

    if (options := fitted(job.recipe)) is None:
        return None
    shapes = [job.checkpoint.stacked_shape(site) for site in SITES]
    # Products as they come and by size, their inverse, and three of that size on the way to it; then new weights.
    site = max(4 * (6 * columns**2 + LIVE * rows * columns) for rows, columns in shapes)
    count, context = _windows(job, options)
    batch = AT_ONCE.get(job.recipe.device.partition(":")[0], AT_ONCE["cpu"]) // context
    return block_by_block_bytes(job, count, context, min(count, max(batch, 1))) + site


def _planned(job: Job, section: Pack) -> "Plan":
    """The artifact as far as it is known before the stages in front of it have run."""
    from sparsepack.packing import plan_of, predicted_findings

    request = request_of(job, section)
    records = [stage.predicted_record(job) for stage in (prune, rotate, distil)]
    found = predicted_findings(job.checkpoint, request, predicted_thresholds(job), *records)
    return plan_of(job.checkpoint, request, found)


def _run(job: Job, section: Pack) -> None:
    from sparsepack.formats.inspect import describe
    from sparsepack.packing import pack

    made = pack(request_of(job, section), job.checkpoint)
    say(*(f"pack: {note}" for note in (*made.notes, made.unscored) if note))
    if made.warning:
        tell(f"WARNING: pack: {made.warning}", sys.stderr)
    # Without its path: a work folder may be moved, and what needs this stage compares the bytes of its outputs.
    description = {name: value for name, value in describe(artifact_of(job)).items() if name != "path"}
    write_json(job.folder / DESCRIPTION, description)


def _plan(job: Job, section: Pack | None) -> dict[str, Any]:
    if section is None:
        return {"artifact": None}
    planned = _planned(job, section)
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in planned.tensors:
        types[tensor.type]["tensors"] += 1
        types[tensor.type]["bytes"] += tensor.nbytes
    tensors = [
        {
            "name": t.name,
            "shape": t.shape,
            "logical": t.logical_shape,
            "padding_rows": t.padding_rows,
            "type": t.type,
            "bytes": t.nbytes,
        }
        for t in planned.tensors
    ]
    artifact = {
        "format": planned.format,
        "file_bytes": planned.total_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "types": dict(types),
        "tensors": tensors,
        "notes": list(planned.notes),
    }
    return {"artifact": artifact}


def _show_plan(plan: Mapping[str, Any]) -> Iterator[Part]:
    artifact = plan["artifact"]
    if artifact is None:
        return
    rows = [[kind, row["tensors"], f"{row['bytes']:,}"] for kind, row in artifact["types"].items()]
    yield Table(["type", "tensors", "bytes"], rows, f"artifact, {artifact['format']}")
    yield f"file: about {artifact['file_bytes']:,} bytes, {artifact['bits_per_weight']:.3f} bits per weight"
    yield from (f"note: {note}" for note in artifact["notes"])


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["pack"]
    if made is not None:
        bits = made["bits_per_weight"]
        yield (
            f"file: {report['artifact']}, {made['file_bytes']:,} bytes, {bits['file']:.3f} bits per weight "
            f"({bits['blocks']:.3f} in the blocks)"
        )
        yield from (f"{text}: {figures}" for text, figures in score_rows(made.get("score")))
        if made.get("refit"):
            yield f"weights of the blocks: {made['refit']['in_words']}"


def _unmeasured(recipe: Recipe, gates: Any) -> Iterator[str]:
    for name in ("bits_per_weight", "file_bytes"):
        if getattr(gates, name) is not None and Pack.find_in(recipe) is None:
            yield f"gates.{name}: there is no file; add a pack section"


def _judge(gates: Any, report: Mapping[str, Any]) -> Iterator[Verdict]:
    made = report["pack"]
    if made is not None:
        yield from judged(
            "bits_per_weight", gates.bits_per_weight, [Value("the file", made["bits_per_weight"]["file"])]
        )
        yield from judged("file_bytes", gates.file_bytes, [Value("the file", float(made["file_bytes"]))])


PACK = Stage(
    name="pack",
    key=Pack.key,
    type=Pack | None,
    needs=(CALIBRATE.name, *AGAIN, THRESHOLDS.name),
    outputs=lambda section: (artifact_name(section), DESCRIPTION),
    settings=lambda job, section: provenance(job.recipe),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    plan=_plan,
    show_plan=_show_plan,
    result=("pack", read_json(DESCRIPTION), None),
    show=_show,
    gates={"bits_per_weight": limit("Of the whole file."), "file_bytes": limit("Size of the file.")},
    unmeasured=_unmeasured,
    judge=_judge,
)
