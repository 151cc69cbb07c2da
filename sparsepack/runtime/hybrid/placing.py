"""Who has slots in a model by neurons as options ask for it: how many, and the policy that says who."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.placement import budget_of
from sparsepack.placement.policies import POLICIES
from sparsepack.runtime.hybrid.following import FollowedNatively, Following, Played
from sparsepack.runtime.options import DEFAULT_POLICY, EngineOptions


@dataclass(frozen=True)
class Placing:
    """The slots of a model, and who follows a text to say who has them.

    shape -- blocks, neurons of each
    share -- of all neurons, that has slots; slots: so many
    name  -- of the policy; None: it is one of the caller's own
    """

    shape: tuple[int, int]
    share: float
    slots: int
    name: str | None
    follows: Following

    @property
    def description(self) -> str:
        """For people: `30 % of the neurons with slots, slow`."""
        return f"{100 * self.share:g} % of the neurons with slots{f', {self.name}' if self.name else ''}"


def placing_of(packed: PackedModel, options: EngineOptions, slow: Callable[..., Any] | None = None) -> Placing:
    """What options ask for. slow: the native `SlowPolicy`, for the policies that it knows; None: all run in numpy."""
    mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    order = torch.stack([mlp.order for mlp in mlps]).numpy()
    stored = torch.stack([mlp.frequency for mlp in mlps]).double().numpy()
    frequency = np.empty_like(stored)
    np.put_along_axis(frequency, order, stored, axis=1)
    share, name = options.cached or 0.0, options.policy or DEFAULT_POLICY
    slots, row = budget_of(share, frequency), POLICIES[name]
    follows: Following = (
        FollowedNatively(slow, row.slow, frequency, slots, order)
        if slow and row.slow and not options.begin
        else Played(options.begin or row.begin, frequency, slots, order)
    )
    shape: tuple[int, int] = frequency.shape
    return Placing(shape, share, slots, None if options.begin else name, follows)
