"""Results as flat records, a row of a table each: what `pandas.read_json(FILE, lines=True)` opens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepack.files.atomic import write_bytes, write_json

LINES = ".jsonl"
ROWS = ("perplexity", "tests", "products", "results", "rows", "shapes")
"""The lists that are the rows of a result: of `eval`, `bench`, `bench slid`, `simulate`, thresholds and `tune`."""


def records(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, each a dictionary of scalars, which `pandas.DataFrame` takes.

    A list in `ROWS`, and the tasks of `eval`, give a row for each element, with the list's name in `table` and the rest
    of the result; without one the result is one row. What stands in objects has names with points, as
    `subject.name`; a list of values is JSON as text.
    """
    tables = {name: rows for name in ROWS if isinstance(rows := result.get(name), list | tuple) and rows}
    if tasks := (result.get("tasks") or {}).get("tasks") if isinstance(result.get("tasks"), Mapping) else None:
        tables["tasks"] = [{"task": name, **task} for name, task in tasks.items()]
    shared = _flat({name: value for name, value in result.items() if name not in (*tables, "tasks")})
    if not tables:
        return [_flat(result)]
    return [{"table": name, **shared, **_flat(row)} for name, rows in tables.items() for row in rows]


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, Mapping):
            flat |= _flat(each, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = json.dumps(each) if isinstance(each, list | tuple) else each
    return flat


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as one JSON object, or as a record a line where the file's name ends in `.jsonl`."""
    if path.suffix == LINES:
        write_bytes(path, "".join(f"{json.dumps(record)}\n" for record in records(result)).encode())
    else:
        write_json(path, result)
