"""The model and the texts that benchmarks of neurons take where none are given, and the options of studies of slots."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from asked import asked_as

SHARED = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
"""The folder of models and texts."""


BOOKS = {
    "model": str(SHARED / "models" / "books-26m-relu"),
    "calibration_text": str(SHARED / "text" / "books.calibration.jsonl.xz"),
    "text": str(SHARED / "text" / "books.validation.jsonl.xz"),
}


def books_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for a model, its calibration text and the text that it is measured on: books-26m-relu and its own."""
    for name, default in reversed(BOOKS.items()):
        command = click.option(f"--{name.replace('_', '-')}", default=default)(command)
    return command


@dataclass(frozen=True)
class Study:
    """What a study of slots is asked for, or what it is asked for where nothing else is said.

    calibration_text -- by which slots are given out; text, and other, which is of another kind: what is played
    samples -- windows of the calibration
    tokens  -- of a session, and of a window
    cached  -- shares that have slots, with commas between them
    """

    model: str
    calibration_text: str
    text: str
    other: str
    samples: int
    sessions: int
    tokens: int
    cached: str


_STUDY_HELP = {
    "other": "Text of another kind.",
    "samples": "Windows of the calibration.",
    "tokens": "Of a session, and of a window.",
    "cached": "Shares that have slots.",
}


def study_options(otherwise: Study) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a study of slots."""
    options = (
        click.option(f"--{name.replace('_', '-')}", default=default, show_default=True, help=_STUDY_HELP.get(name))
        for name, default in asdict(otherwise).items()
    )
    return asked_as(Study, options)
