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
    section = ActivationSparsity.find_in(recipe)
    return section is not None and section.sparsity > 0


def _problems(recipe: Recipe, section: ActivationSparsity) -> Iterator[str]:
    key = ActivationSparsity.key
    if section.sparsity and Calibrate.find_in(recipe) is None:
        yield f"{key}: thresholds are taken on calibration text; add a calibrate section, or set sparsity to 0"
    for name, problem in ALLOCATIONS[section.allocation].problems(
        section.upstream, section.windows != AllocationOptions.windows
    ):
        yield f"{key}.{name}: {problem}"


def _misfits(job: Job, section: ActivationSparsity) -> Iterator[str]:
    from sparsepack.models.sites import chosen_sites

    chosen_sites(job.checkpoint.layers, section.include, section.ignore)
    yield from ()


def _run(job: Job, section: ActivationSparsity) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.find_thresholds import make_thresholds

    make_thresholds(job.checkpoint, folder_of(job), section.as_options(job.recipe), job.folder / TABLE, overwrite=True)


def _tokens(job: Job, section: ActivationSparsity) -> int:
    from sparsepack.recipe.plan import trained_tokens

    calibrate = Calibrate.find_in(job.recipe)
    assert calibrate is not None  # or there would be no thresholds
    count, context = windows(job, calibrate)
    tokens = min(section.windows, count) * context if section.upstream == "sparse" else 0
    if ALLOCATIONS[section.allocation].trains:
        tokens += trained_tokens(section.steps, section.batch, min(section.length, context))
    return tokens


def _memory(job: Job, section: ActivationSparsity) -> int | None:
    """The bytes of one block and its activations; not known of an allocation that trains."""
    from sparsepack.calibrate.find_thresholds import BATCH
    from sparsepack.recipe.plan import block_by_block_bytes

    calibrate = Calibrate.find_in(job.recipe)
    if ALLOCATIONS[section.allocation].trains or calibrate is None:
        return None
    count, context = windows(job, calibrate)
    return block_by_block_bytes(job, min(section.windows, count), context, BATCH)


def _plan(job: Job, section: ActivationSparsity | None) -> dict[str, Any]:
    """What each pattern matches."""
    from sparsepack.models.sites import chosen_sites, site_name

    given = (
        [] if section is None else [("include", p) for p in section.include] + [("ignore", p) for p in section.ignore]
    )
    found = [[site_name(*key) for key in chosen_sites(job.checkpoint.layers, [p], [])] for _, p in given]
    rows = zip(given, found, strict=True)
    return {"patterns": [{"list": which, "pattern": pattern, "sites": sites} for (which, pattern), sites in rows]}


def predicted_thresholds(job: Job) -> "Thresholds | None":
    """What will be known of the thresholds; None: none will be."""
    from sparsepack.calibrate import find_thresholds as find

    section = ActivationSparsity.find_in(job.recipe)
    return (
        None
        if section is None or not section.sparsity
        else find.predicted_thresholds(job.checkpoint, section.as_options(job.recipe))
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
    wanted=lambda recipe, section: section.sparsity > 0,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    plan=_plan,
    show_plan=_show_plan,
    result=("thresholds", _read, None),
)
