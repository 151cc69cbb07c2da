"""Local data for lm-eval task files: JSON lines, plain, .xz or .gz, found from any working directory.

In the YAML file of a task, with sparsepack installed, under any lm-eval front end:

    custom_dataset: !function sparsepack.eval.task_data.jsonl
    dataset_kwargs:
      file: ${MY_DATA:-../data}/questions.jsonl.xz
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sparsepack.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_OPEN: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_GOLDEN = (math.sqrt(5) - 1) / 2


def jsonl(*, file: str, split: str = "test", config_source: str = "", **_metadata: Any) -> dict[str, Dataset]:
    """The lines of `file` as the data set `{split: documents}`, in spread order (see `spread`).

    `${NAME}` and `${NAME:-default}` in `file` are taken from the environment. A relative path is looked for beside
    the YAML file (`config_source`, which lm-eval passes with the task's other metadata), then in the working
    directory. Raises UserError for a file that is missing, empty or not JSON lines.
    """
    import datasets

    path = _find(file, Path(config_source).parent)
    documents = _read(path)
    if not documents:
        raise UserError(f"{path}: no document in it; expected one JSON object per line")
    return {split: datasets.Dataset.from_list([documents[index] for index in spread(len(documents))])}


def spread(count: int) -> list[int]:
    """A fixed permutation of `range(count)` of which every beginning is spread evenly over the whole.

    Files are often sorted by subset, so the first documents would stand for one subset only; steps of the golden
    ratio visit all of them in proportion, and the same documents for the same limit every time.
    """
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) != 1:
        step += 1
    return [index * step % count for index in range(count)]


def _find(file: str, folder: Path) -> Path:
    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise UserError(f"data file {file}: the environment variable {match[1]} is not set; set it")
        return found

    path = Path(os.path.expanduser(_VARIABLE.sub(value, file)))  # which leaves ~ alone where nobody has a home
    candidates = [folder / path, Path.cwd() / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " or ".join(dict.fromkeys(os.path.normpath(candidate) for candidate in candidates))
    variables = ", ".join(match[1] for match in _VARIABLE.finditer(file))
    remedy = f"set {variables} or correct the task's YAML file" if variables else "correct the task's YAML file"
    raise UserError(f"data file {file} not found: no {looked}; {remedy}")


def _read(path: Path) -> list[dict[str, Any]]:
    documents = []
    number = 0
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                if line.strip():
                    documents.append(json.loads(line))
    except (ValueError, EOFError, OSError, lzma.LZMAError) as error:
        raise UserError(f"{path}: line {number or 1} cannot be read ({error}); expected JSON lines") from error
    return documents
