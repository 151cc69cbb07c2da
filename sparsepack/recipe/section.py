"""What the sections of a recipe share: unknown keys are errors, nothing is coerced.

Paths (model, texts, task_path) are taken as written, so relative ones resolve against the working directory, not
against the recipe's folder. A section that is absent or null is left out of the run.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparsepack.calibrate.options import DTYPES, CalibrateOptions

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Length = Annotated[int, Field(ge=2)]


def listed(value: Any) -> Any:
    """One name stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def one_of(names: Sequence[str]) -> AfterValidator:
    """The check that a value is one of these names."""

    def check(value: str) -> str:
        if value not in names:
            quoted = [f"'{name}'" for name in names]
            raise ValueError(f"expected {', '.join(quoted[:-1])} or {quoted[-1]}")
        return value

    return AfterValidator(check)


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(listed)]


class Section(BaseModel):
    """What all sections share. Their defaults are those of the option dataclasses that they become."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    key: ClassVar[str]

    @classmethod
    def of(cls, recipe: "Recipe") -> Self | None:
        """This section of a recipe; None where it is left out."""
        found: Self | None = recipe.asked(cls.key)
        return found


class Limit(Section):
    """The values that pass: `min <= value <= max`."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _some_value_passes(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("expected min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: nothing could pass")
        return self


class Recipe(Section):
    """What every recipe has. `schema.RecipeModel` adds the sections of the stages, and the gates."""

    version: Literal[1] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    model: Annotated[str, Field(min_length=1)]
    device: Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] = CalibrateOptions.device
    dtype: Annotated[str, one_of(DTYPES)] = CalibrateOptions.dtype

    def asked(self, key: str) -> Any:
        """The value of a stage's key; None or False where it is left out."""
        return getattr(self, key)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values, defaults included."""
        return self.model_dump(mode="json", by_alias=True)
