"""`pack` and `verify`: the artifact, its description, and the artifact against itself and against the model."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sparsepack.calibrate.thresholds import AttentionOptions
from sparsepack.files.atomic import write_json
from sparsepack.formats.table import FORMATS
from sparsepack.inspection import score_rows
from sparsepack.operation import Cost
from sparsepack.packing import PackRequest
from sparsepack.progress import say
from sparsepack.recipe.model_stages import (
    CALIBRATED,
    CALIBRATION,
    DISTIL,
    PRUNE,
    ROTATE,
    TABLE,
    THRESHOLDS,
    calibration_of,
    windows,
    windows_and_held_out,
)
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.sections import (
    ActivationSparsity,
    Calibrate,
    Distil,
    Pack,
    Prune,
    Rotate,
    calibrated,
    fitted,
    sparse,
    sparse_attention,
)
from sparsepack.recipe.stage import Job, Stage, leaves, read_json, refusals
from sparsepack.tables import Part, Table
from sparsepack.terminal import tell

if TYPE_CHECKING:
    from sparsepack.formats.plan import Plan

DESCRIPTION, VERIFIED = "pack.json", "verify.json"
_MADE_FROM = ("name", "model", "dtype", "calibrate", "rotate", "prune", "distil", "activation_sparsity", "pack")


def artifact_of(job: Job) -> Path:
    """The path of the artifact of a recipe that packs."""
    section = Pack.find_in(job.recipe)
    assert section is not None
    return job.folder / _artifact_name(section)


def _artifact_name(section: Pack) -> str:
    return f"model{FORMATS[section.format].suffix}"


def _provenance(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that the artifact depends on, for its manifest."""
    value = recipe.to_json()
    return {key: value[key] for key in _MADE_FROM}


def pack_request(job: Job, section: Pack) -> PackRequest:
    """The section as what `pack` takes."""
    return _pack_request(job.recipe, section, job.model, job.folder, calibration_of(job))


def _pack_request(recipe: Recipe, section: Pack, model: str, folder: Path, calibration: Path) -> PackRequest:
    """The calibration is named where something is taken from it, or where it is of the very model that is packed, to
    score the artifact on what it holds out: a changed model that nobody else wants to know has none."""
    changed = any(each.find_in(recipe) for each in (Rotate, Prune, Distil))
    scored = section.score and Calibrate.find_in(recipe) is not None and (sparse(recipe) or not changed)
    return PackRequest(
        model=model,
        output=folder / _artifact_name(section),
        calibration=calibration if calibrated(recipe) or scored else None,
        thresholds=folder / TABLE if sparse(recipe) else None,
        device=recipe.device,
        overwrite=True,
        recipe=_provenance(recipe),
        sparse_attention=AttentionOptions(**section.told(AttentionOptions)),
        fitting=section.refit_options(recipe),
        **section.told(PackRequest),
    )


def _problems_of_pack(recipe: Recipe, section: Pack) -> Iterator[str]:
    if section.keep is not None and Prune.find_in(recipe) is not None:
        yield "pack.keep: it is for a model that was pruned elsewhere; leave it out, prune says what stays"
    if calibrated(recipe) and Calibrate.find_in(recipe) is None:
        what = "format: it stores neurons by how often they are active on"
        if sparse_attention(recipe) is not None:
            what = "attention: its channels are chosen on"
        elif (options := fitted(recipe)) is not None:
            what = f"{'refit' if options.refit else 'quantiser'}: weights are fitted to their inputs on"
        yield f"pack.{what} calibration text; add a calibrate section"
    yield from refusals("pack", _pack_request(recipe, section, recipe.model, Path(), Path(CALIBRATION)).check)


def _misfits_of_pack(job: Job, section: Pack) -> Iterator[str]:
    """What the format cannot hold of the model, or the model does not have of what is asked, or the text is too short
    for."""
    from sparsepack.calibrate.refitting import check_tokens, fitting_windows

    def check_text() -> None:
        if (options := fitted(job.recipe)) is not None:
            check_tokens(job.checkpoint, fitting_windows(job.checkpoint, options, windows(job)), options)

    check_model = FORMATS[section.format].check_model
    return refusals("pack", lambda: check_model(job.checkpoint), lambda: _planned(job, section), check_text)


def _planned(job: Job, section: Pack) -> "Plan":
    """The artifact as far as it is known before the stages in front of it have run."""
    from sparsepack.calibrate.find_thresholds import predicted_thresholds
    from sparsepack.packing import plan_of, predicted_findings

    request, allocation = pack_request(job, section), ActivationSparsity.find_in(job.recipe)
    thresholds = None
    if allocation is not None and allocation.sparsity:
        thresholds = predicted_thresholds(job.checkpoint, allocation.as_options(job.recipe))
    records = (job.records.get(stage.name) for stage in (PRUNE, ROTATE, DISTIL))
    return plan_of(job.checkpoint, request, predicted_findings(job.checkpoint, request, thresholds, *records))


def _run_pack(job: Job, section: Pack) -> None:
    from sparsepack.formats.inspect import describe
    from sparsepack.packing import pack

    made = pack(pack_request(job, section), job.checkpoint)
    say(*(f"pack: {note}" for note in (*made.notes, made.unscored) if note))
    if made.warning:
        tell(f"WARNING: pack: {made.warning}", sys.stderr)
    # Without its path: a work folder may be moved, and what needs this stage compares the bytes of its outputs.
    description = {name: value for name, value in describe(artifact_of(job)).items() if name != "path"}
    write_json(job.folder / DESCRIPTION, description)


def _cost_of_pack(job: Job, section: Pack) -> Cost:
    from sparsepack.packing_forecast import cost

    (count, held_out), context = windows_and_held_out(job)
    return cost(job.checkpoint, pack_request(job, section), (count, context), held_out)


def _plan_of_pack(job: Job, section: Pack | None) -> dict[str, Any]:
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


def _show_plan_of_pack(plan: Mapping[str, Any]) -> Iterator[Part]:
    if (artifact := plan["artifact"]) is not None:
        rows = [[kind, row["tensors"], f"{row['bytes']:,}"] for kind, row in artifact["types"].items()]
        yield Table(["type", "tensors", "bytes"], rows, f"artifact, {artifact['format']}")
        yield f"file: about {artifact['file_bytes']:,} bytes, {artifact['bits_per_weight']:.3f} bits per weight"
        yield from (f"note: {note}" for note in artifact["notes"])


def _show_packed(report: Mapping[str, Any]) -> Iterator[str]:
    if (made := report["pack"]) is not None:
        bits = made["bits_per_weight"]
        yield (
            f"file: {report['artifact']}, {made['file_bytes']:,} bytes, {bits['file']:.3f} bits per weight "
            f"({bits['blocks']:.3f} in the blocks)"
        )
        yield from (f"{text}: {figures}" for text, figures in score_rows(made.get("score")))
        if made.get("refit"):
            yield f"weights of the blocks: {made['refit']['in_words']}"


PACK = Stage(
    name="pack",
    key=Pack.key,
    type=Pack | None,
    needs=(*CALIBRATED, THRESHOLDS.name),
    outputs=lambda section: (_artifact_name(section), DESCRIPTION),
    settings=lambda job, section: _provenance(job.recipe),
    run=_run_pack,
    problems=_problems_of_pack,
    misfits=_misfits_of_pack,
    cost=_cost_of_pack,
    plan=_plan_of_pack,
    show_plan=_show_plan_of_pack,
    result=("pack", read_json(DESCRIPTION), None),
    show=_show_packed,
)


def _run_verify(job: Job, section: bool) -> None:
    from sparsepack.formats.verify import verify

    artifact = artifact_of(job)
    report = verify(artifact, job.checkpoint).to_json()
    for problem in report["problems"]:
        say(f"verify: {problem}")
    # Without the work folder's path: it may be moved, and two runs of one recipe leave the same bytes.
    report["problems"] = [problem.replace(str(artifact), artifact.name) for problem in report["problems"]]
    del report["path"]
    write_json(job.folder / VERIFIED, report)


def _problems_of_verify(recipe: Recipe, section: bool) -> Iterator[str]:
    if Pack.find_in(recipe) is None:
        yield "verify: there is no artifact to verify; add a pack section"


VERIFY = Stage(
    name="verify",
    key="verify",
    type=Annotated[bool, Field(description="Check every byte of the artifact, and its weights against the model.")],
    default=False,
    needs=(PACK.name,),
    outputs=leaves(VERIFIED),
    settings=lambda job, section: {},
    run=_run_verify,
    problems=_problems_of_verify,
    result=("verify", read_json(VERIFIED), None),
)
