"""`calibrate` once more, of a model that was made: thresholds are about what enters its matrices, heavy channels about
its keys, and pruning about both."""

from collections.abc import Callable
from dataclasses import replace

from sparsepack.recipe.section import Recipe
from sparsepack.recipe.stage import Stage, leaves
from sparsepack.recipe.stages.calibrate import CALIBRATE, FOLDER, files_of, name_again
from sparsepack.recipe.stages.distil import DISTIL, distilled, distils_by_statistics
from sparsepack.recipe.stages.pack import calibrated
from sparsepack.recipe.stages.prune import PRUNE, pruned, prunes_by_text
from sparsepack.recipe.stages.rotate import ROTATE, rotated
from sparsepack.recipe.stages.thresholds import sparse


def _again(stage: Stage, wanted: Callable[[Recipe], bool]) -> Stage:
    """The stage that calibrates the model that another stage makes, where somebody wants to know it."""
    return replace(
        CALIBRATE,
        name=name_again(stage.makes),
        outputs=leaves(*files_of(f"{FOLDER}_{stage.makes}")),
        wanted=lambda recipe, section: wanted(recipe),
    )


def _of_rotated(recipe: Recipe) -> bool:
    """Distilling a pruned model takes the text of its teacher's calibration."""
    wanted = prunes_by_text(recipe) or distilled(recipe) or (not pruned(recipe) and _wanted_by_pack(recipe))
    return rotated(recipe) and wanted


def _of_pruned(recipe: Recipe) -> bool:
    wanted = distils_by_statistics(recipe) if distilled(recipe) else _wanted_by_pack(recipe)
    return pruned(recipe) and wanted


def _of_distilled(recipe: Recipe) -> bool:
    return distilled(recipe) and _wanted_by_pack(recipe)


def _wanted_by_pack(recipe: Recipe) -> bool:
    return sparse(recipe) or calibrated(recipe)


CALIBRATE_ROTATED = _again(ROTATE, _of_rotated)
CALIBRATE_PRUNED = _again(PRUNE, _of_pruned)
CALIBRATE_DISTILLED = _again(DISTIL, _of_distilled)
