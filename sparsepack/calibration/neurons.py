"""What a calibration knows of neurons, or of experts: how often each is active, and how far that says where they should
live."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sparsepack.calibration.experts import given, has_experts
from sparsepack.calibration.folder import Calibration
from sparsepack.errors import CalibrationError


@dataclass(frozen=True)
class Activity:
    """How often the neurons of one decoder block are active, or its experts, who are where a token is given to them.

    active  -- int64 [neurons], tokens for which each neuron was active
    tokens  -- how many were counted
    squares -- the sum over tokens of the square of how many neurons were active
    """

    active: torch.Tensor
    tokens: int
    squares: int

    @property
    def frequency(self) -> torch.Tensor:
        """The share of tokens for which each neuron is active: float64 [neurons]."""
        return self.active.double() / self.tokens

    @property
    def density(self) -> float:
        """The share of the neurons that a token has active, mean over tokens."""
        return float(self.frequency.mean())

    @property
    def spread(self) -> float:
        """The standard deviation over tokens of the share of the neurons that are active."""
        neurons = len(self.active)
        variance = self.squares / self.tokens - (self.density * neurons) ** 2
        return float(max(variance, 0.0) ** 0.5 / neurons)


def activity(calibration: Calibration) -> tuple[Activity, ...]:
    """The activity of the neurons, or of the experts, of every layer. Raises `CalibrationError` for counts that
    contradict each other."""
    return tuple(_of_layer(calibration, layer) for layer in range(len(calibration.layers)))


def _of_layer(calibration: Calibration, layer: int) -> Activity:
    statistics: Mapping[str, torch.Tensor] = calibration.layers[layer]
    model = calibration.manifest["model"]["name"]
    if has_experts(calibration):
        each, count = given(calibration)[layer], int(statistics["experts.routed_tokens"])
        return Activity(each, count, count * (int(each.sum()) // count) ** 2)
    active, tokens, squares = (statistics[f"neurons.{name}"] for name in ("active", "tokens", "squares"))
    fits = len(tokens) == len(squares) == 1 and int(tokens) > 0 and bool(((active >= 0) & (active <= tokens)).all())
    total = int(active.sum())
    # By Cauchy and Schwarz; whole numbers of Python, which do not overflow.
    if not fits or not total**2 <= int(squares) * int(tokens) <= total * len(active) * int(tokens):
        raise CalibrationError(
            f"the calibration of {model}: neurons.active of block {layer} is no count of the tokens; calibrate again"
        )
    return Activity(active, int(tokens), int(squares))
