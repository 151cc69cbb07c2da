"""The ready-made recipes, which `sparsepack run` finds by their bare names."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

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
