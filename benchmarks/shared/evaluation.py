"""Models, texts and windows on which the accuracy benchmarks score."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.eval.subject import Subject
from sparsepack.files.text import read_text
from sparsepack.models.tokenizer.windows import rolling_windows

SHARED = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[3] / "shared"))
"""The folder of models and texts."""
BOOKS_MODEL = str(SHARED / "models" / "books-26m-silu")
CALIBRATION_TEXT = str(SHARED / "text" / "books.calibration.jsonl.xz")
BOOKS_TEXT = str(SHARED / "text" / "books.validation.jsonl.xz")
WIKITEXT = str(SHARED / "text" / "wikitext2.test.txt.xz")

Windows = tuple[Tensor, Tensor]
"""Inputs and targets: int64 [windows, context] each."""


def windows_of(subject: Subject, text: str, count: int, context: int = 2048) -> Windows:
    """Return `count` windows of a text, evenly spread."""
    inputs, targets = rolling_windows(subject.tokenizer, read_text(text), context)
    chosen = torch.linspace(0, len(inputs) - 1, min(count, len(inputs))).long()
    return inputs[chosen], targets[chosen]


def windows_of_half(subject: Subject, text: str, count: int) -> Windows:
    """Return `count` windows of 2048 tokens of the second half of a text, evenly spread, or all there are."""
    inputs, targets = rolling_windows(subject.tokenizer, read_text(text), 2048)
    first, last = len(inputs) // 2, len(inputs) - 1
    chosen = torch.linspace(first, last, min(count, last - first + 1)).round().long()
    return inputs[chosen], targets[chosen]


@dataclass(frozen=True)
class ChangedWeights:
    """A source of weights, such as a checkpoint, with other tensors for those in `changed`, by Hugging Face name."""

    source: Any
    changed: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor by its Hugging Face name."""
        found = self.changed.get(name)
        own: Tensor = self.source.tensor(name) if found is None else found
        return own
