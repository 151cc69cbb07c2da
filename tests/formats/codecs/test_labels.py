"""Labels: their bits, what they stand for, and products with queries of 8 bits."""

import math

import pytest
import torch

from sparsepack.formats.blocks.labels import encode_labels, label_numbers, padded_channels, quantise_queries


@pytest.mark.parametrize("channels", [1, 4, 7, 8, 12, 16, 20, 32, 128])
def test_a_label_is_its_key_within_half_a_step(channels: int) -> None:
    keys = torch.randn(3, 50, channels, generator=torch.Generator().manual_seed(channels)) * 5
    codes, scales = encode_labels(keys)
    room = padded_channels(channels)
    assert (codes.dtype, codes.shape) == (torch.uint8, (3, 50, room // 2))
    assert (scales.dtype, scales.shape) == (torch.float16, (3, 50))
    numbers = label_numbers(codes)
    assert (numbers[..., channels:] == 0).all()
    step = scales.float()[..., None]
    assert ((numbers[..., :channels] * step - keys).abs() <= 0.5 * step * (1 + 2**-9)).all()


def test_the_bits_are_those_of_the_docstring() -> None:
    keys = torch.tensor([7.0, -7.0, 1.0, 2.5, -3.5, 0.4, 6.0, -1.0, 3.0])  # scale 1; halves go to the even number
    codes, scale = encode_labels(keys)
    numbers = [7, -7, 1, 2, -4, 0, 6, -1, 3, 0, 0, 0, 0, 0, 0, 0]
    assert scale == 1
    assert codes.tolist() == [(numbers[j] + 8) | (numbers[j + 8] + 8) << 4 for j in range(8)]


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-4, 1.0, 1e5, 1e7])
def test_keys_of_any_size_have_finite_labels(size: float) -> None:
    codes, scales = encode_labels(torch.full((1, 8), size))
    assert torch.isfinite(scales.float()).all()
    expected = 0 if size == 0 else 7
    assert (label_numbers(codes) == expected).all()


def test_queries_have_eight_bits_and_no_scale() -> None:
    queries = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(1))
    numbers = quantise_queries(queries)
    assert numbers.shape == (4, 6, 16)
    assert (numbers.abs().amax(-1) == 127).all()
    assert torch.equal(numbers, quantise_queries(queries * 4))
    assert (quantise_queries(torch.zeros(2, 8)) == 0).all()


def test_a_product_is_an_integer_times_the_scale() -> None:
    random = torch.Generator().manual_seed(2)
    keys, query = torch.randn(200, 16, generator=random), torch.randn(16, generator=random)
    codes, scales = encode_labels(keys)
    sums = label_numbers(codes).int() @ quantise_queries(query).int()
    exact, approximate = keys @ query, sums * scales.float() * query.abs().max() / 127
    assert torch.corrcoef(torch.stack([exact, approximate]))[0, 1] > 0.99
    assert int(sums.abs().max()) <= 16 * 8 * 127 < math.ldexp(1, 24)
