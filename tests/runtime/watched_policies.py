"""What an engine with slots saw of a text, so that the simulator can play it."""

from typing import Any

import numpy as np

from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.placement import Placement, budget_of
from sparsepack.placement.policies import Policy, Start


class Watched:
    """A policy that writes down what it sees."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.rows = policy, list[np.ndarray]()

    def begin(self, start: Start) -> tuple[Placement, Any]:
        self.rows.clear()
        placement, mover = self.policy(start)

        def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
            assert token == len(self.rows)
            self.rows.append(needed.copy())
            return resident if mover is None else mover(token, needed, resident)

        return placement, move


def start_of(packed: PackedModel, needed: np.ndarray, prompt: int, cached: float) -> Start:
    """What the simulator knows, by the model's numbers."""
    stored = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    frequency = np.stack([block.frequency[block.order.argsort()].double().numpy() for block in stored])
    return Start(frequency, budget_of(cached, frequency), needed, prompt)
