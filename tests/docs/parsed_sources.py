"""The sources of the package, parsed once for all that look at them."""

import ast
from functools import cache
from pathlib import Path

import sparsepack

FOLDER = Path(sparsepack.__file__).parent


@cache
def parsed_sources() -> dict[Path, ast.Module]:
    """The tree of each file, in order of their paths; not to be changed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.rglob("*.py"))}
