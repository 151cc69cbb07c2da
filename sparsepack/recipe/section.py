"""What the sections of a recipe share: unknown keys are errors, nothing is coerced.

Paths (what is marked as `PATH`) are taken as written, so relative ones resolve against the working directory, not
against the recipe's folder. A section that is absent or null is left out of the run.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.operation import Operation
from sparsepack.option import default_of, idle, options_of

PATH = "path"
"""Marks a field that holds paths, or names that may stand for one."""


def listed(value: Any) -> Any:
    """One name stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def written(value: Any) -> Any:
    """A number, or a list of them, as text: what YAML takes for a number is one of the things that the text may be."""
    if type(value) in (int, float):
        return str(value)
    return ",".join(map(str, value)) if isinstance(value, list) else value


Text = Annotated[str, BeforeValidator(written)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(listed)]


class Section(BaseModel):
    """What all sections share.

    A section may name the option dataclass that it becomes, `options`, and others that it has fields of, `also`. One of
    an `operation` has its name as its key, unless it says otherwise, and `every` one of its options. Its
    fields of the same names are declared there; here they only have their types. With `every` it has all that these
    declare, named here or not, but what the recipe says for all sections and what it is `without`; in place of a field
    it may have one with the plural of its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    operation: ClassVar[Operation]
    key: ClassVar[str]
    options: ClassVar[type]
    also: ClassVar[tuple[type, ...]] = ()
    every: ClassVar[bool] = False
    without: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # fields that only `options` declares

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        super().__pydantic_init_subclass__(**settings)
        if "operation" in cls.__dict__:
            cls.options, cls.every, cls.key = cls.operation.options, True, cls.__dict__.get("key", cls.operation.name)
        if "options" in cls.__dict__:
            if cls.every:
                cls._take_all()
            for options in (*reversed(cls.also), cls.options):
                for name in cls.model_fields.keys() & options_of(options).keys():
                    _declare(cls.model_fields[name], options, name)
            cls.model_rebuild(force=True)

    @classmethod
    def _take_all(cls) -> None:
        """Have all fields, in the order in which they are declared."""
        own = dict(cls.model_fields)
        declared: dict[str, FieldInfo] = {}
        for options in (cls.options, *cls.also):
            hints = get_type_hints(options)
            for name in (name for name in options_of(options) if name not in (*Recipe.model_fields, *cls.without)):
                key = f"{name}s" if f"{name}s" in own else name
                taken = FieldInfo(annotation=Names if hints[name] == tuple[str, ...] else hints[name])
                declared.setdefault(key, own.pop(key, taken))
        for name, field in declared.items():
            cls.model_fields.pop(name, None)
            cls.model_fields[name] = field

    def as_options(self, recipe: "Recipe") -> Any:
        """The option dataclass that it becomes, with the recipe's device and type."""
        names = [field.name for field in fields(self.options)]
        return self.options(
            **{name: getattr(self if name in type(self).model_fields else recipe, name) for name in names}
        )

    def told(self, options: type) -> dict[str, Any]:
        """What the section says of the fields of an option dataclass, by field."""
        return {
            field.name: getattr(self, field.name) for field in fields(options) if field.name in type(self).model_fields
        }

    def idle(self) -> Iterator[str]:
        """A line for each key that does nothing beside the others. One with the default counts as not given, since
        reports write out a recipe with its defaults."""
        declared = {name: each for options in (*self.also, self.options) for name, each in options_of(options).items()}
        defaults = {
            name: default_of(options, name) for options in (*self.also, self.options) for name in options_of(options)
        }
        given = [name for name in declared if name in self.model_fields_set and getattr(self, name) != defaults[name]]
        yield from idle(
            given,
            lambda name: getattr(self, name, None),
            lambda name: declared[name].counts,
            lambda name: f"{self.key}.{name}",
        )

    @classmethod
    def find_in(cls, recipe: "Recipe") -> Self | None:
        """This section of a recipe; None where it is left out."""
        found: Self | None = recipe.section(cls.key)
        return found


def _declare(field: FieldInfo, options: type, name: str) -> None:
    """Give a field what is declared of it in an option dataclass; one without a default there has to be given."""
    declared = options_of(options)[name]
    field.description = declared.help
    if default_of(options, name) is not None or type(None) in get_args(field.annotation):
        field.default = default_of(options, name)
    if declared.choices:
        # A literal cannot be spelt from names that a table holds in a way that mypy reads.
        chosen: Any = Literal[declared.choices]
        field.annotation = chosen | None if type(None) in get_args(field.annotation) else chosen
    bounds = {"ge": declared.least, "gt": declared.above, "le": declared.most, "lt": declared.below}
    given: dict[str, Any] = {kind: bound for kind, bound in bounds.items() if bound is not None}
    field.metadata += Field(**given).metadata


class Recipe(Section):
    """What every recipe has. `schema.RecipeModel` adds the sections of the stages, and the gates."""

    options: ClassVar[type] = CalibrateOptions

    version: Literal[1] = Field(alias="schema", description="The version of this format: 1.")
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="What the recipe is called; its outputs lie in `work/NAME` unless `--work` says otherwise.",
    )
    description: str = Field("", description="One line for people.")
    model: Annotated[str, PATH] = Field(
        min_length=1,
        description="A Hugging Face folder or hub name, a GGUF file, shipped:tiny, or shipped:tiny-mixture.",
    )
    device: str = Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    dtype: str

    def section(self, key: str) -> Any:
        """The value of a stage's key; None or False where it is left out."""
        return getattr(self, key)

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON-able values, defaults included."""
        return self.model_dump(mode="json", by_alias=True)
