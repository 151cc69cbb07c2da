"""YAML as a recipe may hold it: names as keys, each once, no references in a circle, and nothing that grows when it is
read."""

import datetime
from typing import Any

import yaml

from sparsepack.errors import RecipeError

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
