"""`rotate`: the model in another basis, which every later stage takes in its place."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.errors import UserError
from sparsepack.models.provenance import ROTATION_FILE
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.calibrate import CALIBRATE, Calibrate, folder_of, windows

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Provenance

FOLDER = "rotated"


class Rotate(Section):
    """The same model in a basis in which later steps lose less, or in several, before anything else is done with it
    ([how](rotation.md)). They take the rotated model, which lies as `rotated` in the work folder."""

    key: ClassVar[str] = "rotate"
    options: ClassVar[type] = RotateOptions
    every: ClassVar[bool] = True


def rotated(recipe: Recipe) -> bool:
    """Whether the model is rotated before it is packed."""
    return Rotate.find_in(recipe) is not None


def _problems(recipe: Recipe, section: Rotate) -> Iterator[str]:
    if Calibrate.find_in(recipe) is None:
        yield "rotate: it takes statistics and text from a calibration; add a calibrate section"


def _misfits(job: Job, section: Rotate) -> Iterator[str]:
    from sparsepack.calibrate.rotation import check_model

    try:
        check_model(job.checkpoint, section.as_options(job.recipe))
    except UserError as error:
        yield f"rotate: {error}"


def _run(job: Job, section: Rotate) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.rotation import rotate

    rotate(job.checkpoint, folder_of(job), job.folder / FOLDER, section.as_options(job.recipe), overwrite=True)


def _expected(job: Job, section: Rotate) -> "Checkpoint":
    """The rotated model as far as it is known before its bases are, with segments as long as each other."""
    from sparsepack.models.checkpoint.rotated import Bases, rotated

    return rotated(job.checkpoint, Bases(_even(job, section)), section.weights)


def _even(job: Job, section: Rotate) -> tuple[int, ...]:
    return tuple(segment * job.checkpoint.layers // section.segments for segment in range(section.segments))


def predicted_record(job: Job) -> "Provenance | None":
    """What the rotated checkpoint will say of itself; None where the recipe rotates nothing."""
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.files.tensors import type_name
    from sparsepack.models.provenance import Provenance

    section, checkpoint = Rotate.find_in(job.recipe), job.checkpoint
    if section is None:
        return None
    source = {"model": job.recipe.model, "model_sha256": checkpoint.sha256, "calibration_sha256": NO_HASH}
    made = {"weights": type_name(checkpoint.dtype), "error": 1.2345678901234567e-07}
    how = {"basis": section.basis, "boundaries": [*_even(job, section)[1:]], "seed": section.seed}
    return Provenance({**how, **made, **source})


def _tokens(job: Job, section: Rotate) -> int:
    """Each block is run twice, as it was and rotated, over a few tokens; bases that are learnt are trained."""
    from sparsepack.calibrate.bases import ROTATIONS
    from sparsepack.calibrate.rotation import TOKENS, WINDOWS
    from sparsepack.recipe.plan import trained_tokens

    calibrate = Calibrate.find_in(job.recipe)
    if calibrate is None:
        return 0
    count, context = windows(job, calibrate)
    learnt = ROTATIONS[section.basis].trains
    learning = trained_tokens(section.steps, section.batch, min(section.length, context)) if learnt else 0
    return learning + 2 * min(count, WINDOWS) * min(context, TOKENS)


def _memory(job: Job, section: Rotate) -> int | None:
    """The bytes of the bases and of what is largest beside them: their search, the embedding, or a block;
    not known of bases that are trained."""
    from sparsepack.calibrate.bases import ROTATIONS
    from sparsepack.calibrate.folder import residual_of
    from sparsepack.models.checkpoint.rotated import PIECE
    from sparsepack.models.hf_config import heads_of_config
    from sparsepack.recipe.plan import block_parameters

    if ROTATIONS[section.basis].trains:
        return None
    checkpoint = job.checkpoint
    basis = 8 * int(checkpoint.config.hidden_size) ** 2  # a change of it between segments takes no more
    vocabulary, hidden = checkpoint.source.shapes[checkpoint.family.embedding]
    matrices = 2 * 4 * vocabulary * hidden  # two at a time: of the model and rotated
    block = block_parameters(checkpoint) * (2 * 4 + checkpoint.dtype.itemsize) + (basis if section.segments > 1 else 0)
    residual = residual_of(checkpoint)
    moments = residual["runs"] if residual and ROTATIONS[section.basis].needs == "moments" else 0
    heads = heads_of_config(checkpoint.config)
    values = 8 * checkpoint.layers * heads.kv_heads * heads.head_dim**2
    found = int(section.segments) * basis + values
    search = (moments + 4) * basis + (values if moments else 0)
    return found + max(search, matrices + 2 * 8 * PIECE, block + 2 * 8 * PIECE)


def _plan(job: Job, section: Rotate | None) -> dict[str, Any]:
    """What the rotated model will cost."""
    from sparsepack.calibrate.rotation import notes_of

    if section is None:
        return {"rotation": None}
    options = section.as_options(job.recipe)
    notes = notes_of(job.checkpoint, _expected(job, section), options.basis)
    return {"rotation": {"basis": options.basis, "notes": list(notes)}}


def _show_plan(plan: Mapping[str, Any]) -> Iterator[str]:
    made = plan["rotation"]
    if made is not None:
        yield from (f"rotated: {note}" for note in made["notes"])


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["rotate"]
    if made is not None:
        from sparsepack.models.provenance import basis_in_words

        into = basis_in_words(made["options"]["basis"], made.get("boundaries", ()))
        yield (
            f"rotated: into {into}; over {made['tokens']:,} tokens the logits differ by {made['error']:.1e} of their "
            "size"
        )


ROTATE = Stage(
    name="rotate",
    key=Rotate.key,
    type=Rotate | None,
    needs=(CALIBRATE.name,),
    makes=FOLDER,
    expected=_expected,
    outputs=leaves(FOLDER),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    plan=_plan,
    show_plan=_show_plan,
    result=("rotate", read_json(f"{FOLDER}/{ROTATION_FILE}"), None),
    show=_show,
)
