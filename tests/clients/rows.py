"""The rows of the table of clients, as the modules `rows_*.py` add them; runs in the clients' environment.

`python rows.py URL KEY` runs them all and prints a JSON line for each.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = "tiny"

_ROWS: list[tuple[str, str, Callable[[str, str], str]]] = []


def row(package: str, request: str) -> Callable[[Any], Any]:
    """Make a function a row: of a package, with a request. It gets the server's URL and key, checks what comes back and
    returns that in a few words, which are the same every time."""

    def add(function: Callable[[str, str], str]) -> Callable[[str, str], str]:
        _ROWS.append((package, request, function))
        return function

    return add


def results(url: str, key: str) -> Iterator[dict[str, Any]]:
    """Run every row."""
    for package, request, function in _ROWS:
        result = {"client": f"{package} {version(package)}", "request": request}
        try:
            yield {**result, "passed": True, "result": function(url, key)}
        except Exception as error:
            yield {**result, "passed": False, "result": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.modules["rows"] = sys.modules["__main__"]  # the modules add to this table
    for path in sorted(Path(__file__).parent.glob("rows_*.py")):
        import_module(path.stem)
    lines, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no row
    for result in results(*sys.argv[1:]):
        print(json.dumps(result), file=lines, flush=True)
