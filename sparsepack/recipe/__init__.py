"""`run`: a whole job from one YAML file, stage by stage, with gates for CI."""

from sparsepack.recipe.run import RecipeOutcome, run_recipe

__all__ = ["RecipeOutcome", "run_recipe"]
