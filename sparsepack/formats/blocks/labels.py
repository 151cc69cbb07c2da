"""Labels: the heavy channels of cached keys in 4 bits, and the queries that they are multiplied with in 8 (Double
Sparsity, 4.2).

A label is what the cache keeps of a key beside the key itself: r of its channels, each a number of four bits, and one
scale. r is rounded up to R, a multiple of 8, with channels that are zero.

    scale   float16: the largest |k_c| / 7
    number  k_c / scale, rounded, -8 .. 7; stored plus 8
    byte j  channel j in the low four bits, channel j + R / 2 in the high ones

Products of the numbers with a query of 8 bits are integers, so that every backend gets the same ones.
"""

import torch
from torch import Tensor

LABEL_BITS = 4
LABEL_STEPS = 7.0
"""The largest channel of a label becomes this integer."""
QUERY_STEPS = 127.0
"""The largest channel of a query becomes this integer."""
ALIGNMENT = 8
_ZERO = 8
"""Zero is stored as this value of 4 bits."""


def padded_channels(channels: int) -> int:
    """How many channels a label of so many has room for."""
    return -(-channels // ALIGNMENT) * ALIGNMENT


def encode_labels(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Heavy channels of keys [..., r], any floating type -> codes, uint8 [..., R / 2], and scales, float16 [...].

    Computed in float32; nearest, ties to even. Keys beyond what float16 holds of a scale are clamped; a key that is not
    finite has codes of no meaning.
    """
    values = keys.float()
    largest = values.abs().amax(-1)
    # Tensors divided by tensors: of a Python number torch makes a product with a reciprocal, which rounds twice.
    scale = (largest / largest.new_tensor(LABEL_STEPS)).clamp(max=torch.finfo(torch.float16).max).half()
    numbers = (values / scale.float()[..., None]).nan_to_num(0, 7, -8).round_().clamp_(-8, 7)
    room = (*keys.shape[:-1], padded_channels(keys.shape[-1]))
    codes = torch.full(room, _ZERO, dtype=torch.uint8, device=keys.device)
    codes[..., : keys.shape[-1]] = numbers.to(torch.int8).add_(_ZERO).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scale


def label_numbers(codes: Tensor) -> Tensor:
    """The numbers in codes, uint8 [..., R / 2]: int8 [..., R], -8 .. 7."""
    return torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int8) - _ZERO


def quantise_queries(queries: Tensor) -> Tensor:
    """Heavy channels of queries, float32 [..., r] -> int8 [..., R]. Their scale is left out: it ranks no token."""
    largest = queries.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, largest.new_tensor(QUERY_STEPS) / largest, 0)
    numbers = (queries * inverse).nan_to_num(0).clamp(-QUERY_STEPS, QUERY_STEPS).round_().to(torch.int8)
    return torch.nn.functional.pad(numbers, (0, padded_channels(queries.shape[-1]) - queries.shape[-1]))
