"""`activation_sparsity`: which channels a decoded token may skip, as a table of thresholds."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepack.calibrate.thresholds import ALLOCATIONS, AllocationOptions
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.calibrate import AGAIN, CALIBRATE, Calibrate, folder_of, windows

if TYPE_CHECKING:
    from sparsepack.calibrate.threshold_table import Thresholds

TABLE = "thresholds.json"


class ActivationSparsity(Section):
    """How much a decoded token skips, and how that is decided. Sites match patterns: `blk.3.mlp_mid`, `blk.*.attn_in`,
    `re:REGEX`."""

    key: ClassVar[str] = "activation_sparsity"
    options: ClassVar[type] = AllocationOptions
    every: ClassVar[bool] = True


def sparse(recipe: Recipe) -> bool:
    """Whether decoding will skip anything."""
    asked = ActivationSparsity.asked_in(recipe)
    return asked is not None and asked.sparsity > 0


def _problems(recipe: Recipe, asked: ActivationSparsity) -> Iterator[str]:
    key = ActivationSparsity.key
    if asked.sparsity and Calibrate.asked_in(recipe) is None:
        yield f"{key}: thresholds are taken on calibration text; add a calibrate section, or set sparsity to 0"
    for name, problem in ALLOCATIONS[asked.allocation].problems(
        asked.upstream, asked.windows != AllocationOptions.windows
    ):
        yield f"{key}.{name}: {problem}"


def _misfits(job: Job, asked: ActivationSparsity) -> Iterator[str]:
    from sparsepack.models.sites import chosen_sites

    chosen_sites(job.checkpoint, asked.include, asked.ignore)
    yield from ()


def _run(job: Job, asked: ActivationSparsity) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.find_thresholds import make_thresholds

    make_thresholds(job.checkpoint, folder_of(job), asked.as_options(job.recipe), job.folder / TABLE, overwrite=True)


def _tokens(job: Job, asked: ActivationSparsity) -> int:
    from sparsepack.recipe.plan import trained_tokens

    calibrate = Calibrate.asked_in(job.recipe)
    assert calibrate is not None  # or there would be no thresholds
    count, context = windows(job, calibrate)
    tokens = min(asked.windows, count) * context if asked.upstream == "sparse" else 0
    if ALLOCATIONS[asked.allocation].trains:
        tokens += trained_tokens(asked.steps, asked.batch, min(asked.length, context))
    return tokens


def _memory(job: Job, asked: ActivationSparsity) -> int | None:
    """The bytes of one block and its activations; not known of an allocation that trains."""
    from sparsepack.calibrate.find_thresholds import BATCH
    from sparsepack.recipe.plan import block_by_block_bytes

    calibrate = Calibrate.asked_in(job.recipe)
    if ALLOCATIONS[asked.allocation].trains or calibrate is None:
        return None
    count, context = windows(job, calibrate)
    return block_by_block_bytes(job, min(asked.windows, count), context, BATCH)


def _plan(job: Job, asked: ActivationSparsity | None) -> dict[str, Any]:
    """What each pattern matches."""
    from sparsepack.models.sites import chosen_sites, site_name

    given = [] if asked is None else [("include", p) for p in asked.include] + [("ignore", p) for p in asked.ignore]
    found = [[site_name(*key) for key in chosen_sites(job.checkpoint, [p], [])] for _, p in given]
    rows = zip(given, found, strict=True)
    return {"patterns": [{"list": which, "pattern": pattern, "sites": sites} for (which, pattern), sites in rows]}


def thresholds_to_come(job: Job) -> "Thresholds | None":
    """What will be known of the thresholds; None: none will be."""
    from sparsepack.calibrate import find_thresholds as find

    asked = ActivationSparsity.asked_in(job.recipe)
    return (
        None
        if asked is None or not asked.sparsity
        else find.thresholds_to_come(job.checkpoint, asked.as_options(job.recipe))
    )


def _show_plan(plan: Mapping[str, Any]) -> Iterator[str]:
    for row in plan["patterns"]:
        found = row["sites"]
        yield f"{row['list']} {row['pattern']}: {len(found)} sites, {found[0]} to {found[-1]}"


def _read(folder: Path) -> Any:
    """The table; its vectors stay in their file."""
    table = read_json(TABLE)(folder)
    for row in table["rows"]:
        row |= {name: row[name] is not None for name in ("channel_weights", "offset")}
    return table


THRESHOLDS = Stage(
    name="thresholds",
    key=ActivationSparsity.key,
    type=ActivationSparsity | None,
    needs=(CALIBRATE.name, *AGAIN),
    outputs=leaves(TABLE),
    run=_run,
    wanted=lambda recipe, asked: asked.sparsity > 0,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    plan=_plan,
    show_plan=_show_plan,
    result=("thresholds", _read, None),
)
