"""A record beside a checkpoint's weights says what was done to it, in a JSON file of its own: how one is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.stored import Model, shown, validate

Record = TypeVar("Record")


def read_record(
    path: Path, schema: int, model: type[Model], made: Callable[[Model], Record], again: str
) -> Record | None:
    """The record in a file; None where there is no such file.

    made  -- makes it of what the file holds; raises ValueError or `PackingError` where that makes no sense
    again -- what the user can do about a damaged one: "prune the model again"

    Raises `CheckpointError` for one that is damaged or of another schema.
    """
    if not path.is_file():
        return None
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["schema"] != schema:
            raise ValueError(f"schema {str(value['schema'])[:60]}, this sparsepack reads schema {schema}")
        return made(validate(model, value))
    except (ValueError, KeyError, TypeError, RecursionError, PackingError) as error:
        raise CheckpointError(f"{path}: damaged ({shown(error)}); {again}") from error
