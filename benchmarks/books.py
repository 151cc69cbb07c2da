"""The model and the texts that benchmarks of neurons take where none are given."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

SHARED = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
"""The folder of models and texts."""


def books_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for a model, its calibration text and the text that it is measured on: books-26m-relu and its own."""
    texts = {"--calibration-text": "calibration", "--text": "validation"}
    for flag, name in reversed(texts.items()):
        command = click.option(flag, default=str(SHARED / "text" / f"books.{name}.jsonl.xz"))(command)
    return click.option("--model", default=str(SHARED / "models" / "books-26m-relu"))(command)
