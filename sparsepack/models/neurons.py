"""The neurons of an MLP: how often each was active on a text, and whether a model has any that are ever inactive."""

from dataclasses import dataclass

from torch import Tensor

from sparsepack.codecs.neurons import record_bytes
from sparsepack.errors import PackingError
from sparsepack.models.architecture import Architecture

EXACT_ZEROS = ("relu",)
"""Activations that make most of their outputs exactly zero, so that leaving these out changes nothing."""


@dataclass(frozen=True)
class NeuronCounts:
    """How often each neuron was active on a calibration's text.

    active             -- int64 [layers, neurons]: tokens at which it was
    tokens             -- that were counted
    calibration_sha256 -- of the calibration
    """

    active: Tensor
    tokens: int
    calibration_sha256: str

    @property
    def frequency(self) -> Tensor:
        """Share of the tokens at which each neuron was active: float32 [layers, neurons]."""
        return (self.active.double() / self.tokens).float()

    @property
    def density(self) -> list[float]:
        """Of each layer, the share of its neurons that a token needs."""
        return [float(layer.double().mean() / self.tokens) for layer in self.active]


def check_neurons(architecture: Architecture) -> None:
    """Raise `PackingError` unless a model's MLPs can be stored by neurons: some are inactive, and records fit."""
    if architecture.activation not in EXACT_ZEROS:
        raise PackingError(
            f"activation {architecture.activation!r}: its neurons are never exactly inactive, so leaving any out "
            f"would change the model; expected {' or '.join(EXACT_ZEROS)}; use zigzag-q4_k, which skips by thresholds"
        )
    record_bytes(architecture.hidden)


def check_counts(counts: NeuronCounts, architecture: Architecture) -> None:
    """Raise `PackingError` unless the counts can be those of the model."""
    found, expected = tuple(counts.active.shape), (architecture.layers, architecture.intermediate)
    if found != expected:
        raise PackingError(
            f"the calibration counted the neurons {list(found)} [layers, neurons], the model has {list(expected)}; "
            "calibrate this model"
        )
    if counts.tokens < 1 or not bool(((counts.active >= 0) & (counts.active <= counts.tokens)).all()):
        raise PackingError(f"counts of neurons: expected 0 to {counts.tokens} tokens each; calibrate again")
