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


def config_values(settings: "Settings", head_dim: int) -> dict[str, Any]:
    """What the configurations of the tiny models have in common: four heads of so many channels, and two of keys."""
    return {
        "vocab_size": settings.shape.vocabulary,
        "hidden_size": 4 * head_dim,
        "intermediate_size": settings.shape.ffn,
        "num_hidden_layers": settings.shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": settings.context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_dropout": settings.dropout,
        "bos_token_id": BOS,
        "eos_token_id": BOS,
        "pad_token_id": None,
    }


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
