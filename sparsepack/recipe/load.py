"""A recipe from its YAML file and `--set` overrides; every mistake is one line naming the place and the way out."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparsepack.errors import RecipeError
from sparsepack.recipe.consistency import check_sections
from sparsepack.recipe.parse import MOST_CHARACTERS, read_yaml
from sparsepack.recipe.schema import RecipeModel, section_in
from sparsepack.recipe.section import Recipe
from sparsepack.recipe.shipped import shipped_recipes

_SHORT = 60
_EXPECTED = {
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "finite_number": "expected a finite number",
    "string_too_short": "expected at least one character",
    "too_short": "expected at least one name",
}
"""Pydantic's error types are told in these plain words; the rest are told in the library's own."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    overrides -- `a.b=c` each, c in YAML; in order, after the file and under the same schema
    Raises `RecipeError`, one line, for a file or an override that cannot be used.
    """
    path = locate(Path(path))
    value = _parsed(path)
    given = [_override(text) for text in overrides]
    for keys, override, text in given:
        _put(value, keys, override, text)
    try:
        recipe = RecipeModel.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise RecipeError(_told(path, error, {keys: text for keys, _, text in given})) from None
    try:
        check_sections(recipe)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    return recipe


def locate(path: Path) -> Path:
    """The recipe file of that name, or the ready-made recipe of that bare name.

    Raises `RecipeError` naming the nearest recipes where there is neither.
    """
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(path) in shipped:
        return shipped[str(path)]
    if path.is_dir():
        raise RecipeError(f"{path}: a folder; expected a recipe, a YAML file")
    beside = [found for pattern in ("*.yaml", "*.yml") for found in sorted(path.parent.glob(pattern))]
    by_stem = {**{name: name for name in shipped}, **{found.stem: str(found) for found in beside}}
    near = difflib.get_close_matches(path.stem, by_stem, 3, cutoff=0.3)
    hint = (
        f"nearest: {', '.join(by_stem[stem] for stem in near)}"
        if near
        else f"expected the path of a YAML file, or one of {', '.join(shipped)}"
    )
    raise RecipeError(f"{path}: no such recipe; {hint}")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 4 * MOST_CHARACTERS:  # of UTF-8
            raise RecipeError(f"{path}: {path.stat().st_size:,} bytes; expected a YAML file as people write it")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); expected a YAML file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    value = read_yaml(text, str(path))
    if value is None:
        raise RecipeError(f"{path}: empty; expected at least schema, name and model")
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: {_shown(value)}; expected keys and values, beginning with schema, name and model")
    return value


def _override(text: str) -> tuple[tuple[str, ...], Any, str]:
    place, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in place.split("."))
    if not equals or not all(keys):
        raise RecipeError(f"--set {text}: expected PATH=VALUE, such as activation_sparsity.sparsity=0.4")
    return keys, read_yaml(value, f"--set {text}"), text


def _put(value: dict[str, Any], keys: tuple[str, ...], override: Any, text: str) -> None:
    for position, key in enumerate(keys[:-1], 1):
        inner = {} if value.get(key) is None else value[key]
        if not isinstance(inner, dict):
            raise RecipeError(f"--set {text}: {'.'.join(keys[:position])} is {_shown(inner)}, it has no keys inside")
        value[key] = dict(inner)  # an alias may have put the same one elsewhere, too, where it stays
        value = value[key]
    value[keys[-1]] = override


def _told(path: Path, error: ValidationError, overrides: Mapping[tuple[str, ...], str]) -> str:
    """The first mistake as one line, and how many more there are."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    place = tuple(str(part) for part in first["loc"])
    where, kind = ".".join(place) or "the recipe", first["type"]
    if kind == "extra_forbidden":
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(place[-1], known, 1, cutoff=0.0)
        told = f"{where}: unknown key; nearest: {'.'.join((*place[:-1], *near))} (known: {', '.join(known)})"
    elif kind == "missing":
        told = f"{where}: missing; add it to the recipe, or give --set {where}=..."
    else:
        meant = _EXPECTED.get(kind) or first["msg"].replace("Input should be", "expected").replace("Value error, ", "")
        told = f"{where}: {_shown(first['input'])}; {meant[:1].lower()}{meant[1:]}"
    sources = [text for keys, text in overrides.items() if place[: len(keys)] == keys]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{path}: {told}{f' [from --set {sources[-1]}]' if sources else ''}{more}"


def _known_keys(place: tuple[str, ...]) -> list[str]:
    model: Any = RecipeModel
    for key in place:
        fields = {field.alias or name: field for name, field in getattr(model, "model_fields", {}).items()}
        model = section_in(fields[key].annotation) if key in fields else model
    return [field.alias or name for name, field in model.model_fields.items()]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHORT else text[:_SHORT] + "..."
