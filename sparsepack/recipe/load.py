"""A recipe from its YAML file and `--set` overrides; every mistake is one line naming the place and the way out.

YAML as a recipe may hold it: names as keys, each once, no references in a circle, and nothing that grows when it is
read.

The ready-made recipes, which `sparsepack run` finds by their bare names.
"""

import datetime
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparsepack.errors import RecipeError
from sparsepack.recipe.gates import unmeasured
from sparsepack.recipe.schema import RecipeModel, section_in
from sparsepack.recipe.section import Recipe, Section
from sparsepack.recipe.stage import Job
from sparsepack.recipe.stages import STAGES


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` for the first contradiction."""
    for problem in _problems(recipe):
        raise RecipeError(problem)


def _problems(recipe: Recipe) -> Iterator[str]:
    for stage in STAGES:
        if section := recipe.section(stage.key):
            yield from stage.problems(recipe, section)
            if isinstance(section, Section) and hasattr(section, "options"):
                yield from section.idle()
    gates = recipe.section("gates")
    if gates is not None:
        yield from unmeasured(recipe, gates)


def open_job(recipe: Recipe, folder: Path) -> Job:
    """Open the model and read the texts.

    Raises `UserError` subclasses where one cannot be read or the model does not allow what the recipe asks for, so that
    no stage finds that out after hours.
    """
    from sparsepack.models.checkpoint.checkpoint import open_checkpoint

    job = Job(recipe, open_checkpoint(recipe.model), folder)
    for problem in _misfits(job):
        raise RecipeError(problem)
    return job


def _misfits(job: Job) -> Iterator[str]:
    device = job.recipe.device
    if device != "cpu" and not _available(device):
        yield f"device: {device}; torch finds none on this machine, use cpu"
    for stage in STAGES:
        if section := job.recipe.section(stage.key):
            yield from stage.misfits(job, section)
            job = job.ahead_of(stage)


def _available(device: str) -> bool:
    import torch

    if device == "mps":
        return torch.backends.mps.is_available()
    return int(device.partition(":")[2] or 0) < torch.cuda.device_count()


MOST_CHARACTERS = 1 << 20
MOST_NODES = 10_000
"""A recipe has at most this many keys and values after every alias is replaced by what the alias stands for: ten
aliases of ten of ten ... are soon more than any memory holds."""
_DEEPEST = 64
_MOST_BITS = 64


def read_yaml(text: str, where: str) -> Any:
    """What stands in a YAML text: dicts with text as keys, lists, text, numbers, booleans and None. Dates are text.

    Raises `RecipeError`, one line that begins with `where`, for anything else.
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{where}: {len(text):,} characters; expected at most {MOST_CHARACTERS:,} in a recipe")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{where}{line}: not YAML ({error.problem or error.context})") from None
    except RecursionError:
        raise RecipeError(f"{where}: not a recipe (nested too deeply)") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RecipeError(f"{where}: not YAML ({reason})") from None
    except RecipeError as error:
        raise RecipeError(f"{where}, {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes below and with this one, aliases replaced by what they stand for; each node is looked at once."""
    if id(node) in known:
        if not known[id(node)]:
            raise RecipeError(f"{_line(node)}: a value that holds itself; write it out")
        return known[id(node)]
    known[id(node)] = 0  # until it is known
    inner = node.value if isinstance(node, yaml.CollectionNode) else ()
    count = 1
    for child in inner:
        count += sum(_count(part, known) for part in child) if isinstance(child, tuple) else _count(child, known)
    if count > MOST_NODES:
        raise RecipeError(f"{_line(node)}: more than {MOST_NODES:,} values, aliases replaced; write fewer")
    known[id(node)] = count
    return count


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


class _Loader(yaml.SafeLoader):
    def fetch_flow_collection_start(self, token: Any) -> None:
        # What it takes to find out whether a bracket begins a key grows with the square of the depth.
        if self.flow_level == _DEEPEST:
            raise RecipeError(f"line {self.line + 1}: brackets in brackets, nested too deeply")
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{_line(key_node)}: a key that is a list or a mapping; expected a name")
            if key_node.value in seen:
                raise RecipeError(f"{_line(key_node)}: the key {key_node.value!r} stands twice; leave one of them")
            seen.add(key_node.value)
        self.flatten_mapping(node)  # `<<`
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                shown = str(key)[:60]
                raise RecipeError(f"{_line(key_node)}: the key {shown} is {_kind(key)}; expected a name, or quote it")
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value = super().construct_object(node, deep)
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise RecipeError(
                f"{_line(node)}: a whole number of {value.bit_length()} bits; expected at most {_MOST_BITS}"
            )
        if isinstance(value, bytes | set | tuple):
            raise RecipeError(f"{_line(node)}: {_kind(value)}; expected text, a number, a list or keys and values")
        return value


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", bytes: "binary", set: "a set"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")


_PACKAGE = Path(__file__).parents[1]
_INSTALLED = _PACKAGE / "recipes"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "recipes"
"""The recipes lie inside the package where that is installed, beside the package in a checkout: there is one copy,
which a wheel takes along."""


@cache
def shipped_recipes() -> Mapping[str, Path]:
    """The files by their names, in order. A workflow for CI lies among them, which is none."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml")) if "schema" in _keys(path)}


def listed() -> str:
    """A line for each, name and description, and where they lie."""
    width = max(map(len, shipped_recipes()), default=0)
    lines = (f"{name.ljust(width)}  {_keys(path)['description']}" for name, path in shipped_recipes().items())
    return "\n".join([*lines, f"in {FOLDER}, with a workflow for GitHub Actions"])


def _keys(path: Path) -> dict[str, str]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


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
