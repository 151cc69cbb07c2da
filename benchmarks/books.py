"""The model and the texts that benchmarks of neurons take where none are given, and the options of studies of slots."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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


def study_options(
    *,
    model: str,
    calibration_text: str,
    text: str,
    other: str,
    samples: int,
    sessions: int,
    tokens: int,
    cached: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options, by their defaults, for a model, the text by which slots are given out, and those that are played."""
    options = (
        click.option("--model", default=model, show_default=True),
        click.option("--calibration-text", default=calibration_text, show_default=True),
        click.option("--text", default=text, show_default=True),
        click.option("--other", default=other, show_default=True, help="Text of another kind."),
        click.option("--samples", default=samples, show_default=True, help="Windows of the calibration."),
        click.option("--sessions", default=sessions, show_default=True),
        click.option("--tokens", default=tokens, show_default=True, help="Of a session, and of a window."),
        click.option("--cached", default=cached, show_default=True, help="Shares that have slots."),
    )

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return with_options
