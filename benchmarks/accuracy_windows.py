"""The windows on which the accuracy benchmarks score a model, evenly spread over a text."""

import torch

from sparsepack.eval.subject import Subject
from sparsepack.files.text import read_text
from sparsepack.models.tokenizer.windows import rolling_windows

Windows = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets: int64 [windows, context] each."""


def windows_of(subject: Subject, text: str, count: int, first: bool = False, context: int = 2048) -> Windows:
    """So many windows of a text, in the subject's tokens; the first ones, or else evenly spread."""
    inputs, targets = rolling_windows(subject.tokenizer, read_text(text), context)
    chosen = torch.arange(count) if first else torch.linspace(0, len(inputs) - 1, min(count, len(inputs))).long()
    return inputs[chosen], targets[chosen]
