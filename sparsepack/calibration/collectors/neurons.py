"""How many tokens each neuron of the MLP is active for: what says which neurons are worth a slot near the processor.

A neuron is active for a token where the activation and the gate leave something to multiply its down column with: what
enters the last matrix of the MLP is not zero there. For ReLU and its kin that is a part of the neurons; SiLU and GELU
leave nearly nothing exactly zero, and their counts say so.
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector
from sparsepack.calibration.collectors.site_input import SiteInput


def _count(site: SiteInput) -> tuple[Tensor, ...]:
    counted = site.counted
    assert counted.active is not None
    assert counted.each is not None
    tokens = torch.full((1,), site.tokens, device=site.x.device)
    return counted.active, tokens, counted.each.long().square().sum()[None]


NEURONS = Collector("neurons", ("active", "tokens", "squares"), torch.int64, (0,), _count)
"""The counts are int64: [intermediate], the tokens for which each neuron was active; [1], the tokens counted; [1], the
sum over tokens of the square of how many neurons were active."""
