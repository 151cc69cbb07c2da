"""`prune`: the model with weights set to zero, which every later stage takes in its place."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from sparsepack.calibrate.prune import PruneOptions, SitePattern
from sparsepack.errors import UserError
from sparsepack.models.provenance import PRUNING_FILE
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job, Stage, leaves, read_json
from sparsepack.recipe.stages.calibrate import AGAIN, CALIBRATE, Calibrate, folder_of, windows

if TYPE_CHECKING:
    from sparsepack.models.provenance import Provenance

FOLDER = "pruned"


class OtherPattern(Section):
    """What stays at some of the sites."""

    options: ClassVar[type] = PruneOptions

    site: str = Field(min_length=1, description="A site, or a pattern of names.")
    keep: int
    of: int


class Prune(Section):
    """Weights that are set to zero before anything else is done with the model ([how](pruning.md)). Later steps
    take the pruned model, which lies as `pruned` in the work folder."""

    key: ClassVar[str] = "prune"
    options: ClassVar[type] = PruneOptions
    every: ClassVar[bool] = True

    sites: tuple[OtherPattern, ...]

    def as_options(self, recipe: Recipe) -> PruneOptions:
        sites = tuple(SitePattern(other.site, other.keep, other.of) for other in self.sites)
        options: PruneOptions = super().as_options(recipe)
        return replace(options, sites=sites)


def pruned(recipe: Recipe) -> bool:
    """Whether the model is pruned before it is packed."""
    return Prune.find_in(recipe) is not None


def prunes_by_text(recipe: Recipe) -> bool:
    """Whether it is, by what enters its matrices."""
    section = Prune.find_in(recipe)
    return section is not None and _reads_text(section)


def _reads_text(section: Prune) -> bool:
    """Whether its method must know what enters the matrices."""
    from sparsepack.calibrate.sparsegpt import METHODS

    return METHODS[section.method].needs != "nothing"


def _problems(recipe: Recipe, section: Prune) -> Iterator[str]:
    try:
        section.as_options(recipe).check()
    except UserError as error:
        yield f"prune: {error}"
    if Calibrate.find_in(recipe) is None and _reads_text(section):
        what = "looks at what enters a matrix; add a calibrate section, or take magnitude"
        yield f"prune.method: {section.method} {what}"


def _misfits(job: Job, section: Prune) -> Iterator[str]:
    from sparsepack.calibrate.pruning import site_patterns

    try:
        left = site_patterns(job.checkpoint, section.as_options(job.recipe))
    except UserError as error:
        yield f"prune: {error}"
    else:
        if not left:
            yield "prune.sites: they leave nothing to prune; leave one of them out"


def _run(job: Job, section: Prune) -> None:
    """A run that was killed within goes on where it stopped."""
    from sparsepack.calibrate.pruning import prune

    calibration = folder_of(job) if _reads_text(section) else None
    prune(job.checkpoint, job.folder / FOLDER, section.as_options(job.recipe), calibration, overwrite=True)


def predicted_record(job: Job) -> "Provenance | None":
    """What the pruned checkpoint will say of itself; None where the recipe prunes nothing."""
    from sparsepack.calibrate.pruning import site_patterns
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.models.provenance import Provenance

    section, checkpoint = Prune.find_in(job.recipe), job.checkpoint
    if section is None:
        return None
    patterns = {
        f"{checkpoint.family.block(layer)}.{projection}": pattern
        for (layer, site), pattern in site_patterns(checkpoint, section.as_options(job.recipe)).items()
        for projection in checkpoint.family.projections[site]
    }
    how = {"method": section.method, "permute": section.permute}
    source = {"model": checkpoint.name, "model_sha256": checkpoint.sha256}
    digest = NO_HASH if _reads_text(section) else None
    return Provenance({**how, **source, "calibration_sha256": digest}, patterns)


def _windows(job: Job, section: Prune) -> tuple[int, int]:
    """How many calibration windows are run, and of how many tokens each; none where the method reads no text."""
    calibrate = Calibrate.find_in(job.recipe)
    if calibrate is None or not _reads_text(section):
        return 0, 0
    count, context = windows(job, calibrate)
    return min(section.windows, count), context


def _tokens(job: Job, section: Prune) -> int:
    """Each block is run twice: as it is, and pruned."""
    count, context = _windows(job, section)
    return 2 * count * context


def _memory(job: Job, section: Prune) -> int:
    """The bytes of the text's way through a block while its inputs are counted, or of what its matrices are pruned
    with."""
    from sparsepack.calibrate.permute import AT_ONCE, SAMPLED_ROWS
    from sparsepack.calibrate.sparsegpt import METHODS
    from sparsepack.models.family import SITES
    from sparsepack.recipe.plan import LIVE, block_by_block_bytes, block_parameters, dtype_bytes

    checkpoint = job.checkpoint
    shapes = [checkpoint.stacked_shape(site) for site in SITES]
    products = [4 * columns**2 for _, columns in shapes] if METHODS[section.method].needs == "products" else [0]
    count, context = _windows(job, section)
    way = block_by_block_bytes(job, count, context, section.batch) + 2 * sum(products)  # of all windows and of a batch
    hidden = count * context * int(checkpoint.config.hidden_size) * dtype_bytes(job)
    block = block_parameters(checkpoint) * (dtype_bytes(job) + 2 * checkpoint.dtype.itemsize)
    matrix = 4 * LIVE * max(rows * columns for rows, columns in shapes)
    # Sums, means and factors of each site; of one its inverse on the way, and another order of both.
    inputs = 3 * sum(products) + (5 if section.permute else 3) * max(products)
    swaps = max(min(AT_ONCE, columns * section.of * min(rows, SAMPLED_ROWS)) for rows, columns in shapes)
    return max(way, hidden + block + inputs + matrix + (2 * 4 * swaps if section.permute else 0))


def _plan(job: Job, section: Prune | None) -> dict[str, Any]:
    """What stays at each site that is pruned."""
    from sparsepack.calibrate.pruning import site_patterns
    from sparsepack.models.sites import site_name

    patterns = site_patterns(job.checkpoint, section.as_options(job.recipe)) if section else {}
    return {"pruned": {site_name(*key): f"{pattern.keep} of {pattern.of}" for key, pattern in patterns.items()}}


def _show(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["prune"]
    if made is None:
        return
    rows = made["matrices"]
    counts = Counter(f"keep {row['keep']} of {row['of']}" for row in rows)
    patterns = ", ".join(f"{pattern} in {count} matrices" for pattern, count in counts.items())
    worst = max(rows, key=lambda row: row["error"])
    yield (
        f"pruned: {patterns}, by {made['options']['method']}{', permuted' if made['options']['permute'] else ''}; "
        f"relative error of their outputs {sum(row['error'] for row in rows) / len(rows):.3f} on average, "
        f"{worst['error']:.3f} at most ({worst['site']})"
    )


PRUNE = Stage(
    name="prune",
    key=Prune.key,
    type=Prune | None,
    needs=(CALIBRATE.name, *AGAIN),
    makes=FOLDER,
    outputs=leaves(FOLDER),
    run=_run,
    problems=_problems,
    misfits=_misfits,
    tokens=_tokens,
    memory=_memory,
    plan=_plan,
    result=("prune", read_json(f"{FOLDER}/{PRUNING_FILE}"), None),
    show=_show,
)
