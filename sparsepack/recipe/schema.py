"""What a recipe may say: the keys of every recipe, a section per stage, and gates on what the stages measure."""

from typing import Any, get_args

from pydantic import create_model

from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stages import STAGES

_gates: dict[str, Any] = {key: field for stage in STAGES for key, field in stage.gates.items()}
Gates = create_model(
    "Gates",
    __base__=Section,
    __doc__="Limits on what was measured, each with `min`, `max` or both: `{max: 1.1}`. Each applies to every row that "
    "has the value, and the worst one is judged. A limit that is not kept, or a failed verification, ends `run` with "
    "exit status 3.",
    **_gates,
)

_sections: dict[str, Any] = {stage.key: (stage.type, stage.default) for stage in STAGES}
_sections["gates"] = (Gates | None, None)
RecipeModel: type[Recipe] = create_model("RecipeModel", __base__=Recipe, **_sections)
"""The model checks a whole recipe."""


def section_in(annotation: Any) -> Any:
    """The section in `Section | None` or in a mapping of mappings to sections; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)
