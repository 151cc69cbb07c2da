"""What a recipe may say: the keys of every recipe, a section per stage, and gates on what the stages measure; and these
keys as JSON Schema, and as the page docs/recipe.md."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import create_model
from pydantic.fields import FieldInfo

from sparsepack.recipe.gates import Gates, Limit
from sparsepack.recipe.section import PATH, Recipe, Section
from sparsepack.recipe.stages import STAGES

_sections: dict[str, Any] = {stage.key: (stage.type, stage.default) for stage in STAGES}
_sections["gates"] = (Gates | None, None)
RecipeModel: type[Recipe] = create_model("RecipeModel", __base__=Recipe, **_sections)
"""The model checks a whole recipe."""


def section_in(annotation: Any) -> Any:
    """The section in `Section | None` or in a mapping of mappings to sections; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)


_INTRODUCTION = """\
# Recipes
A recipe is a YAML file from which `sparsepack run RECIPE` does several steps, each with a section of its own. A step
runs where its section is there and not `null`; one whose settings and inputs have not changed is not run again.
`recipes/` has examples, and `--set KEY=VALUE` changes a key for one run, say `--set activation_sparsity.sparsity=0.4`.

Unknown keys are errors, and nothing is converted: `"3"` is no number. `--dry-run` says what would be made, and every
path as it was understood, without running the model.

**Relative paths start at the working directory**, the one in which `sparsepack run` is called, in the recipe and in
`--set` alike; the folder in which the recipe lies does not matter. Outputs lie in `work/NAME` there, or in the folder
that `--work` names.

**A work folder belongs to one recipe**: to one `name`, one name of a file and one `model` as it is written. For
another one `run` refuses it, unless `--overwrite` says that its outputs may be replaced.

**How much is skipped** is one figure everywhere, in gates, `eval`, `bench` and `generate`: the share of all block
weights that a decoded token does not read. Where sites are kept dense (`include`, `ignore`) a second figure stands
beside it, of the sites that may be sparse; the target `activation_sparsity.sparsity` is about these.

`sparsepack run --schema` prints the schema as JSON Schema, which editors understand, and
`sparsepack run --schema markdown` this page: do not edit it, a test compares the two.
"""


def json_schema() -> dict[str, Any]:
    """The schema of a recipe, as JSON Schema."""
    return RecipeModel.model_json_schema()


def markdown() -> str:
    """The page docs/recipe.md: every key with its type, default and meaning."""
    schema = json_schema()
    keys = RecipeModel.model_fields
    sections = {name: found for name, field in keys.items() if (found := section_in(field.annotation)) is not None}
    head = {_key(name, field): field for name, field in keys.items() if name not in sections}
    contents = " · ".join(["Contents: [At the top](#at-the-top)", *(f"[`{name}`](#{name})" for name in sections)])
    parts = [_INTRODUCTION, contents + "\n", "## At the top\n" + _table(head, schema)]
    for name, section in sections.items():
        fields = {_key(key, field): field for key, field in section.model_fields.items()}
        meaning = " ".join(section.__doc__.split())
        parts.append(f"## `{name}`\n{meaning}\n\n{_table(fields, schema['$defs'][section.__name__])}")
    return "\n".join(parts)


def _key(name: str, field: FieldInfo) -> str:
    return field.alias or name


def _table(fields: Mapping[str, FieldInfo], schema: Mapping[str, Any]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields.items():
        default = "required" if field.is_required() else _default(field.default)
        cells = (f"`{key}`", _type(field, schema["properties"][key]), default, field.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    return "-" if value is None else f"`{json.dumps(value)}`"


def _type(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    """A property's type for people."""
    inner = section_in(field.annotation)
    if inner is Limit:
        return "limits" if "anyOf" in schema else "limits by task and metric"
    if inner is not None:
        return f"list of `{{{', '.join(inner.model_fields)}}}`"
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    named = "path or name" if PATH in field.metadata else None
    return " or ".join(text for kind in kinds for text in _kind(kind, named))


_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _kind(schema: Mapping[str, Any], named: str | None) -> Iterator[str]:
    if schema.get("type") == "array":
        (each,) = _kind(schema["items"], named)
        yield f"{each}, or a list of them"
    elif "enum" in schema:
        yield ", ".join(f"`{name}`" for name in schema["enum"])
    elif "const" in schema:
        yield f"`{schema['const']}`"
    else:
        bounds = [f"{word} {schema[bound]}" for bound, word in _BOUNDS.items() if bound in schema]
        yield ", ".join([named or _KINDS[schema["type"]], *bounds])
