"""Imports go one way: CONTRIBUTING.md says in a line which folder stands above which, and no import climbs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from parsed_sources import FOLDER, parsed_sources

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
PROGRAMS = ("integration/lm_eval",)
"""What others start, as they start `cli`: nothing of sparsepack imports it."""


def layers() -> dict[str, int]:
    """The number of each folder's layer, and that of `packing.py`, the lowest first."""
    (line,) = re.findall(r"^`(cli -> .*)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    lowest_first = enumerate(reversed(line.split(" -> ")))
    return {name: number for number, names in lowest_first for name in re.findall(r"\w+", names)}


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and module of every import of ours, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from ((node.lineno, name) for name in names if name.startswith("sparsepack."))


def test_no_import_climbs() -> None:
    layer = layers()
    climbing = []
    for path, tree in parsed_sources().items():
        here = path.relative_to(FOLDER).as_posix()
        above = max(layer.values()) if here.startswith(PROGRAMS) else layer.get(path.relative_to(FOLDER).parts[0])
        above = layer.get(here.removesuffix(".py"), above)
        for number, name in imported(tree):
            below = layer.get(name.split(".")[1])
            if above is not None and below is not None and below > above:
                climbing.append(f"{here}:{number}: {name}")
    assert climbing == []


def test_nothing_imports_what_others_start() -> None:
    programs = tuple(f"sparsepack.{program.replace('/', '.')}" for program in PROGRAMS)
    found = [(path, name) for path, tree in parsed_sources().items() for _, name in imported(tree)]
    within = [each for each in found if not each[0].relative_to(FOLDER).as_posix().startswith(PROGRAMS)]
    assert [path for path, name in within if name.startswith(programs)] == []
