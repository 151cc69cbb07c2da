"""The stages of a recipe, in the order in which they run: a row each, from a file each.

A stage whose fingerprint and outputs are unchanged is skipped; a changed one runs again with everything that needs it.
Nothing heavy is imported at the top of these files: a mistake in a recipe is told without waiting for torch.
"""

from sparsepack.recipe.stages.bench import BENCH
from sparsepack.recipe.stages.calibrate import CALIBRATE
from sparsepack.recipe.stages.calibrate_again import CALIBRATE_DISTILLED, CALIBRATE_PRUNED, CALIBRATE_ROTATED
from sparsepack.recipe.stages.distil import DISTIL
from sparsepack.recipe.stages.eval import EVAL
from sparsepack.recipe.stages.eval_pruned import EVAL_PRUNED
from sparsepack.recipe.stages.generate import GENERATE
from sparsepack.recipe.stages.pack import PACK
from sparsepack.recipe.stages.prune import PRUNE
from sparsepack.recipe.stages.rotate import ROTATE
from sparsepack.recipe.stages.thresholds import THRESHOLDS
from sparsepack.recipe.stages.verify import VERIFY

_MODEL = (CALIBRATE, ROTATE, CALIBRATE_ROTATED, PRUNE, CALIBRATE_PRUNED, DISTIL, CALIBRATE_DISTILLED)
STAGES = (*_MODEL, THRESHOLDS, PACK, VERIFY, EVAL, EVAL_PRUNED, BENCH, GENERATE)
