"""Python that comes with a model: it is never run, nobody is asked whether it should be, and the user is told."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.progress import say

STOCK_ALONE: dict[str, Any] = {"trust_remote_code": False}
"""The arguments with which every `from_pretrained` and `from_config` is called: without them transformers asks on
standard input whether it may run the model's Python."""

_REFUSAL = "trust_remote_code"
"""What transformers says where it would need the model's Python names this argument."""


@cache
def tell_own_code(file: Path) -> None:
    """Say, once for each file, that a JSON file of a model's names Python of its own; transformers' classes stand in.

    Nothing is said where the file is none that can be read: whoever needs it says so.
    """
    try:
        if not file.is_file():  # nor a device, which has no end
            return
        named = json.loads(file.read_text(encoding="utf-8"))["auto_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if named:
        say(f"{file}: names Python that comes with the model, which sparsepack does not run; transformers' own runs")


def refused_own_code(error: Exception, file: Path) -> CheckpointError | None:
    """The error that tells a user of a file whose model transformers cannot load without the model's own Python; None
    where `error` is of another kind."""
    if _REFUSAL not in str(error):
        return None
    return CheckpointError(
        f"{file}: needs Python that comes with the model, which sparsepack does not run; expected a model that stock "
        "transformers loads"
    )
