"""What a recipe may say: the keys of every recipe, a section per stage, and gates on what the stages measure."""

from typing import Any

from pydantic import create_model

from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stages import STAGES

_gates: dict[str, Any] = {key: field for stage in STAGES for key, field in stage.gates.items()}
Gates = create_model("Gates", __base__=Section, **_gates)

_sections: dict[str, Any] = {stage.key: (stage.type, stage.default) for stage in STAGES}
_sections["gates"] = (Gates | None, None)
RecipeModel: type[Recipe] = create_model("RecipeModel", __base__=Recipe, **_sections)
"""A whole recipe."""
