"""Results that were measured of an artifact, from the JSON files that `run`, `eval` and `bench` write."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepack.errors import UserError

REPORT, EVALUATION = "recipe report", "evaluation"


@dataclass(frozen=True)
class Results:
    """Evaluations as `eval --json` writes them, and tests as `bench --json` does."""

    evaluations: Sequence[Mapping[str, Any]] = ()
    bench: Mapping[str, Any] | None = None


def read_results(paths: Sequence[Path], description: Mapping[str, Any]) -> Results:
    """What the files hold about one artifact; of several benches the last.

    description -- the artifact, as `formats.inspect.describe` gives it

    Raises `UserError` for a file that is none of `run`, `eval` or `bench`, or about another model.
    """
    evaluations: list[Mapping[str, Any]] = []
    bench = None
    for path in paths:
        try:
            value = read_json(path)
            if value.get("kind") == REPORT:
                found, bench = value["evaluations"], value["bench"] or bench
            elif value.get("kind") == EVALUATION:
                found = [value]
            else:
                found, bench = [], {"tests": value["tests"], "runtime": value["runtime"]}
            for evaluation in found:
                _check_subject(path, evaluation["subject"], description)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: no result of ours ({error!r}); expected what `run`, `eval` or `bench` writes with --json"
            ) from error
        evaluations += found
    return Results(evaluations, bench)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises `UserError` where it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); expected a result that sparsepack wrote with --json") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: {type(value).__name__}, expected an object; give a result written with --json")
    return value


def _check_subject(path: Path, subject: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    model = description["provenance"]["model"]
    if subject["source_sha256"] != model["sha256"]:
        raise UserError(f"{path}: measured on another model than {description['path']} was made from; measure this one")
    if subject["kind"] != description["kind"]:
        raise UserError(
            f"{path}: measured on {subject['kind']}, {description['path']} is {description['kind']}; measure this one"
        )
