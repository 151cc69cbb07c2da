"""No docstring begins as a fragment, and none is a question."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from parsed_sources import FOLDER, parsed_sources

FRAGMENTS = ("Of ", "As ", "At ", "Where ")


def documented_assignments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of every constant of a module and of its classes."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Module | ast.ClassDef):
            for assigned, text in zip(owner.body, owner.body[1:], strict=False):
                if isinstance(assigned, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr):
                    target = assigned.target if isinstance(assigned, ast.AnnAssign) else assigned.targets[0]
                    if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                        yield ast.unparse(target), text.value.value


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of a module, its classes, its functions and its constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "name", "the module"), ast.get_docstring(node) or ""
    yield from documented_assignments(tree)


@cache
def every_docstring() -> list[tuple[Path, str, str]]:
    """Path, name and text."""
    return [(path, name, text) for path, tree in parsed_sources().items() for name, text in docstrings(tree)]


def test_docstrings_are_not_fragments() -> None:
    found = [
        f"{path.relative_to(FOLDER)}: {name}: {text}"
        for path, name, text in every_docstring()
        if text.startswith(FRAGMENTS)
    ]
    assert found == []


def test_no_docstring_is_a_question() -> None:
    found = [
        f"{path.relative_to(FOLDER)}: {name}: {text}"
        for path, name, text in every_docstring()
        if text.rstrip().endswith("?")
    ]
    assert found == []
