"""The values of training the tiny model: what is tried, the texts, what came of a run."""

from dataclasses import dataclass

import click
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """What of the architecture is tried: decoder blocks, FFN width, vocabulary."""

    layers: int
    ffn: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """`3x512x768` -> Shape(3, 512, 768)."""
        try:
            layers, ffn, vocabulary = (int(part) for part in text.split("x"))
        except ValueError:
            raise click.BadParameter(f"{text}: expected LAYERSxFFNxVOCABULARY, such as 3x512x768") from None
        if ffn % 256:
            raise click.BadParameter(f"{text}: FFN width {ffn} is not a multiple of 256")
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
class Trained:
    """The best checkpoint of one run: its weights, its bits per byte on the validation slice, where it was taken."""

    settings: Settings
    tokenizer: Tokenizer
    model: LlamaForCausalLM
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
