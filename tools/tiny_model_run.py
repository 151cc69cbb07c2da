"""The values of training a tiny model: its kind, what is tried, the texts, what came of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

BOS = 0
BOS_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """What of the architecture is tried: decoder blocks, FFN width (of one expert, in a mixture), vocabulary."""

    layers: int
    ffn: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str, widths: int) -> "Shape":
        """`3x512x768` -> Shape(3, 512, 768); `widths` divides the FFN width."""
        try:
            layers, ffn, vocabulary = (int(part) for part in text.split("x"))
        except ValueError:
            raise click.BadParameter(f"{text}: expected LAYERSxFFNxVOCABULARY, such as 3x512x768") from None
        if ffn % widths:
            raise click.BadParameter(f"{text}: FFN width {ffn} is not a multiple of {widths}")
        return cls(layers, ffn, vocabulary)

    def __str__(self) -> str:
        return f"{self.layers}x{self.ffn}x{self.vocabulary}"


@dataclass(frozen=True)
class Corpus:
    """Documents: topics to train on, topics to select on, topics to report on, docstrings to train on."""

    topics: list[str]
    validation: list[str]
    held_out: list[str]
    docstrings: list[str]


@dataclass(frozen=True)
class Settings:
    """How one model is trained. Sizes in tokens and windows; `topic_share` of the windows come from the topics."""

    shape: Shape
    dropout: float
    steps: int
    context: int
    batch: int
    lr: float
    weight_decay: float
    topic_share: float
    seed: int
    device: str

    def __str__(self) -> str:
        return f"{self.shape} dropout {self.dropout} steps {self.steps} topic share {self.topic_share}"


@dataclass(frozen=True)
class Kind:
    """A kind of tiny model.

    title     -- of its card
    about     -- what its card says that it is, of its settings and the number of its weights
    widths    -- divides every FFN width
    build     -- a model of random weights
    more_loss -- what is added to the loss of predicting tokens, from the model and its output
    """

    title: str
    about: Callable[[Settings, int], str]
    widths: int
    build: Callable[[Settings], PreTrainedModel]
    more_loss: Callable[[PreTrainedModel, Any], torch.Tensor | float]


@dataclass(frozen=True)
class Trained:
    """The best checkpoint of one run: its weights, its bits per byte on the validation slice, where it was taken."""

    settings: Settings
    tokenizer: Tokenizer
    model: PreTrainedModel
    validation_bits: float
    best_step: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table of results."""

    name: str
    training_perplexity: float
    heldout_perplexity: float
    heldout_bits: float
