"""The neurons of an MLP: how often each was active on a text."""

from dataclasses import dataclass

from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.models.architecture import Architecture


@dataclass(frozen=True)
class NeuronCounts:
    """How often each neuron was active on a text.

    active -- int64 [layers, neurons]: tokens at which each was
    tokens -- that were counted
    sha256 -- of what counted them
    origin -- what that is: "calibration" or "trace"
    """

    active: Tensor
    tokens: int
    sha256: str
    origin: str = "calibration"

    @property
    def frequency(self) -> Tensor:
        """Share of the tokens at which each neuron was active: float64 [layers, neurons]."""
        return self.active.double() / self.tokens

    @property
    def density(self) -> list[float]:
        """For each layer, the share of its neurons that a token needs."""
        return [float(layer.double().mean() / self.tokens) for layer in self.active]


def check_counts(counts: NeuronCounts, architecture: Architecture) -> None:
    """Raise `PackingError` unless the counts can be those of the model."""
    found, expected = tuple(counts.active.shape), (architecture.layers, architecture.intermediate)
    if found != expected:
        raise PackingError(
            f"the {counts.origin} counted the neurons {list(found)} [layers, neurons], the model has {list(expected)}; "
            "calibrate this model"
        )
    if counts.tokens < 1 or not bool(((counts.active >= 0) & (counts.active <= counts.tokens)).all()):
        raise PackingError(f"counts of neurons: expected 0 to {counts.tokens} tokens each; calibrate again")
