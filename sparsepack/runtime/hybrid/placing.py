"""Choose who has the slots of a plan in a model by neurons, by the policy that options ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.placement.policies import POLICIES
from sparsepack.runtime.hybrid.following import FollowedNatively, Following, Played
from sparsepack.runtime.options import DEFAULT_POLICY, EngineOptions


@dataclass(frozen=True)
class Placing:
    """The slots of a model, and who follows a text to say who has them.

    shape -- blocks, neurons of each
    share -- of all neurons, that has slots
    name  -- of the policy; None: it is one of the caller's own
    """

    shape: tuple[int, int]
    share: float
    name: str | None
    follows: Following

    @property
    def description(self) -> str:
        """For people: `30 % of the neurons with slots, slow`."""
        return f"{100 * self.share:.3g} % of the neurons with slots{f', {self.name}' if self.name else ''}"


def placing_of(
    packed: PackedModel, options: EngineOptions, plan: Plan, slow: Callable[..., Any] | None = None
) -> Placing:
    """What options ask for, with the slots of a plan.

    slow -- the native `SlowPolicy`, for the policies that it knows; None: all run in numpy
    """
    mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    order = torch.stack([mlp.order for mlp in mlps]).numpy()
    stored = torch.stack([mlp.frequency for mlp in mlps]).double().numpy()
    frequency = np.empty_like(stored)
    np.put_along_axis(frequency, order, stored, axis=1)
    name, slots = options.policy or DEFAULT_POLICY, plan.slots
    row = POLICIES[name]
    follows: Following = (
        FollowedNatively(slow, row.slow, frequency, slots, order)
        if slow and row.slow and not options.begin
        else Played(options.begin or row.begin, frequency, slots, order)
    )
    shape: tuple[int, int] = frequency.shape
    return Placing(shape, plan.share, None if options.begin else name, follows)


def links_of(
    options: EngineOptions, measured: BandwidthProfile | None, assumed: tuple[str, BandwidthProfile]
) -> tuple[BandwidthProfile, str]:
    """The links by which neurons are divided, and for people where they come from: those that options give, else those
    that were measured on this machine, else the assumed ones, which have a name."""
    if options.links is not None:
        return options.links, "links given"
    if measured is not None:
        return measured, "links measured"
    name, links = assumed
    return links, f"links assumed {name}"
