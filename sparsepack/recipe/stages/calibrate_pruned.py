"""`calibrate` once more, of the pruned model: thresholds are about what enters its matrices, heavy channels about its
keys."""

from dataclasses import replace

from sparsepack.recipe.stage import leaves
from sparsepack.recipe.stages.calibrate import AGAIN, CALIBRATE, FOLDER, files_of
from sparsepack.recipe.stages.pack import calibrated
from sparsepack.recipe.stages.prune import PRUNE, pruned
from sparsepack.recipe.stages.thresholds import sparse

CALIBRATE_PRUNED = replace(
    CALIBRATE,
    name=AGAIN,
    outputs=leaves(*files_of(f"{FOLDER}_{PRUNE.makes}")),
    wanted=lambda recipe, asked: pruned(recipe) and (sparse(recipe) or calibrated(recipe)),
)
