"""Neuron records: up row and down column of a neuron, one after the other."""

import pytest
import torch
from codec_cases import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.orders import neuron as neurons
from sparsepack.formats.orders import zigzag


def matrices(count: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=generator), torch.randn(hidden, count, generator=generator)


@given(st.integers(1, 40), st.sampled_from([256, 512, 768]), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=30)
def test_records_come_back_as_q4_k_has_them(count: int, hidden: int, dtype: torch.dtype) -> None:
    up, down = (m.to(dtype) for m in matrices(count, hidden))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    records = neurons.pack(up, down, order)
    assert records.shape == (count, neurons.record_bytes(hidden))
    found_up, found_down = neurons.unpack(records)
    assert torch.equal(found_up, q4_k.decode(q4_k.encode(up))[order])
    assert torch.equal(found_down, q4_k.decode(q4_k.encode(down.t())).t()[:, order])
    assert relative_error(found_up, up[order].float()) < 0.12


def test_a_down_column_is_the_superblocks_of_zigzag() -> None:
    up, down = matrices(7, 512)
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    records = neurons.pack(up, down, order)
    columns = zigzag.pack(down)  # [bands, neurons, 144]
    for place, neuron in enumerate(order.tolist()):
        assert torch.equal(records[place, 288:], columns[:, neuron].reshape(-1))
        assert torch.equal(records[place, :288], q4_k.encode(up[neuron]))


def test_neurons_stand_by_falling_frequency_and_equal_ones_by_number() -> None:
    assert neurons.by_frequency(torch.tensor([3, 9, 3, 0, 9])).tolist() == [1, 4, 0, 2, 3]


@given(st.permutations(range(9)))
def test_the_original_order_is_the_inverse(order: list[int]) -> None:
    places = neurons.original_order(torch.tensor(order))
    assert torch.tensor(order)[places].tolist() == list(range(9))


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(PackingError, match="expected each of 3 neurons once"):
        neurons.pack(*matrices(3, 256), torch.tensor(order))


def test_what_does_not_fit_is_refused() -> None:
    up, down = matrices(3, 256)
    with pytest.raises(PackingError, match=r"expected \[n, h\] and \[h, n\]"):
        neurons.pack(up, down.t(), torch.arange(3))
    with pytest.raises(PackingError, match="order of 4 neurons, the model has 3"):
        neurons.pack(up, down, torch.arange(4))
    with pytest.raises(PackingError, match="hidden size 300: neuron records need a multiple of 256"):
        neurons.pack(*matrices(3, 300), torch.arange(3))
    with pytest.raises(PackingError, match="infinite or NaN"):
        neurons.pack(up * float("inf"), down, torch.arange(3))
    with pytest.raises(PackingError, match="a multiple of 288 bytes"):
        neurons.unpack(torch.zeros(3, 144, dtype=torch.uint8))
