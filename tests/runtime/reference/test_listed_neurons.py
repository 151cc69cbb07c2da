"""Neurons listed by a copy of the gate, and the exact gates of those: the oracle against sums in float64."""

import pytest
import torch
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.gates import copied, limits
from sparsepack.formats.orders.neuron import pack
from sparsepack.runtime.reference import products

SHAPES = [(1, 256), (7, 256), (300, 512), (65, 768)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zigzag_gate(count: int, hidden: int) -> PackedMatrix:
    return PackedMatrix(zigzag.pack(normal(count, hidden, seed=count)), MatrixFormat("Q4_K", "zigzag"), count, hidden)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-3, 0.5, 4.0, float("inf"), -4.0])
def test_listed_are_those_above_their_limits(shape: tuple[int, int], size: float) -> None:
    copy, x = copied(normal(*shape, seed=1)), normal(shape[1], seed=2)
    limit = size * torch.rand(shape[0], generator=torch.Generator().manual_seed(3)).add(0.5)
    indices, count = products.list_neurons(products.load_gate_copy(copy, limit), x)
    scores = copy.decoded().double() @ x.double()
    expected = (scores > -limit.double() * x.double().norm()).nonzero().flatten()
    assert (indices.dtype, indices.shape, count.dtype) == (torch.int32, (shape[0],), torch.int32)
    assert indices[: int(count)].tolist() == expected.tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_gates_of_the_listed_are_the_exact_ones_and_others_are_zero(shape: tuple[int, int], share: float) -> None:
    packed, x = zigzag_gate(*shape), normal(shape[1], seed=4)
    chosen = torch.randperm(shape[0], generator=torch.Generator().manual_seed(5))[: round(share * shape[0])].sort()[0]
    indices = torch.full((shape[0],), 1 << 30, dtype=torch.int32)  # beyond the count nothing is read
    indices[: len(chosen)] = chosen.int()
    found = products.listed_gates(products.load_gate_rows(packed), x, indices, torch.tensor(len(chosen)))
    exact = zigzag.unpack(packed.blocks, shape[0]).double() @ x.double()
    expected = torch.zeros(shape[0], dtype=torch.float64).index_copy(0, chosen, exact[chosen])
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert not found[expected == 0].any()


def test_gates_that_are_not_listed_are_never_read() -> None:
    gate = products.load_gate_rows(zigzag_gate(64, 256))
    gate[5:] = torch.nan
    indices = torch.tensor([1, 4, *range(5, 67)], dtype=torch.int32)
    assert products.listed_gates(gate, normal(256, seed=6), indices, torch.tensor(2)).isfinite().all()


@pytest.mark.parametrize("shape", [(300, 512), (512, 256)], ids=str)
def test_an_mlp_by_the_list_misses_only_who_is_not_listed(shape: tuple[int, int]) -> None:
    count, hidden = shape
    gate, x = zigzag_gate(*shape), normal(hidden, seed=7)
    dense = products.load_zigzag(gate)
    exact = products.zigzag_matmul(dense, x[None])[0].relu()
    records = pack(normal(count, hidden, seed=8), normal(hidden, count, seed=9), torch.arange(count))
    loaded = products.load_neurons(PackedMatrix(records, MatrixFormat("Q4_K"), count, 2 * hidden))
    decoded = zigzag.unpack(gate.blocks, count)
    copy = copied(decoded)
    limit = limits(copy, decoded, torch.full((count,), 0.4), 1.5)
    indices, listed = products.list_neurons(products.load_gate_copy(copy, limit), x)
    found = products.listed_gates(products.load_gate_rows(gate), x, indices, listed).relu()
    y = products.neuron_ffn(loaded, x, found, *products.collect(found, torch.zeros(())))
    inside = torch.zeros(count).index_fill(0, indices[: int(listed)].long(), 1.0)
    expected = products.neuron_matmul(loaded, x[None], (exact * inside)[None])[0]
    assert int(listed) < count
    assert (exact * inside).count_nonzero() > 0.9 * exact.count_nonzero()
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
