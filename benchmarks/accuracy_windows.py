"""The windows on which the accuracy benchmarks score a model, evenly spread over a text."""

import torch

from sparsepack.eval.subject import Subject
from sparsepack.files.text import read_text
from sparsepack.models.tokenizer.windows import rolling_windows

Windows = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets: int64 [windows, context] each."""


def windows_of(subject: Subject, text: str, count: int, first: bool = False, context: int = 2048) -> Windows:
    """Windows of a text in the subject's tokens, `count` of them: the first ones, or else evenly spread ones."""
    inputs, targets = rolling_windows(subject.tokenizer, read_text(text), context)
    chosen = torch.arange(count) if first else torch.linspace(0, len(inputs) - 1, min(count, len(inputs))).long()
    return inputs[chosen], targets[chosen]


def windows_of_half(subject: Subject, text: str, count: int, second: bool) -> Windows:
    """Windows of 2048 tokens of the first or second half of a text, `count` of them evenly spread, or all there are."""
    inputs, targets = rolling_windows(subject.tokenizer, read_text(text), 2048)
    middle = len(inputs) // 2
    first, last = (middle, len(inputs) - 1) if second else (0, middle - 1)
    chosen = torch.linspace(first, last, min(count, last - first + 1)).round().long()
    return inputs[chosen], targets[chosen]
