"""`neuron_ffn` and `neuron_matmul` of every backend that has them, against float64 sums over decoded records."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations_for_tests import Backend, Bounds, every_backend, normal
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import neuron as neurons
from sparsepack.runtime.chained.decoder import torch_threads

pytestmark = every_backend

SHAPES = [(1, 256), (7, 256), (300, 512), (65, 768), (129, 1280), (40, 5120)]


@cache
def packed(count: int, hidden: int) -> PackedMatrix:
    up, down = normal(count, hidden, seed=count), normal(hidden, count, seed=count + 1)
    return PackedMatrix(neurons.pack(up, down, torch.arange(count)), MatrixFormat("Q4_K"), count, 2 * hidden)


def gates(count: int, active: int, seed: int = 3) -> Tensor:
    """What a ReLU leaves of the gates of neurons: so many are above zero."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:active]
    return torch.zeros(count).index_put((chosen,), normal(active, seed=seed).abs() + 0.01)


def ffn(backend: Backend, records: PackedMatrix, x: Tensor, gate: Tensor) -> Tensor:
    loaded = backend.neurons.load_neurons(records, backend.device)
    gate = gate.to(backend.device)
    indices, count = backend.neurons.collect(gate, torch.zeros((), device=backend.device))
    return backend.neurons.neuron_ffn(loaded, x.to(backend.device), gate, indices, count).cpu()


def assert_close(bounds: Bounds, y: Tensor, records: PackedMatrix, x: Tensor, gate: Tensor) -> None:
    """y [..., hidden] against the sum in float64.

    Errors add up over two products, and few terms average out less: of 6,000 random cases of 1 to 20 neurons half are
    within 0.5 of the bound of one product, one in a thousand is beyond 2, the worst is 2.5.
    """
    up, down = (half.double() for half in neurons.unpack(records.blocks))
    inner = gate.double() * (x.double() @ up.t())
    expected = inner @ down.t()
    assert (y.dtype, y.shape) == (torch.float32, expected.shape)
    assert torch.isfinite(y).all()
    # What both would be if the terms had random signs: sums whose terms cancel say nothing.
    uncancelled = gate.double() * (x.double().square() @ up.t().square()).sqrt()
    typical = (uncancelled.square() @ down.t().square()).sum(-1).sqrt()
    error = (y.double() - expected).norm(dim=-1)
    assert (error <= 4 * bounds.normwise * expected.norm(dim=-1).maximum(typical)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_over_active_neurons(backend: Backend, shape: tuple[int, int]) -> None:
    records, x = packed(*shape), normal(shape[1], seed=2)
    for share in (0.0, 0.1, 0.5, 1.0):
        gate = gates(shape[0], round(share * shape[0]))
        assert_close(backend.bounds, ffn(backend, records, x, gate), records, x, gate)


def test_any_number_of_active_neurons(backend: Backend) -> None:
    records, x = packed(300, 512), normal(512, seed=4)
    for active in (0, 1, 2, 3, 5, 15, 63, 64, 65, 127, 128, 129, 299, 300):
        gate = gates(300, active)
        y = ffn(backend, records, x, gate)
        assert_close(backend.bounds, y, records, x, gate)
        assert active or not y.any()


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 200),
    width=st.integers(1, 6),
    share=st.floats(0, 1),
    size=st.sampled_from([1e-12, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_random_neurons(backend: Backend, count: int, width: int, share: float, size: float, seed: int) -> None:
    records, x = packed(count, 256 * width), size * normal(256 * width, seed=seed)
    gate = gates(count, round(share * count), seed)
    assert_close(backend.bounds, ffn(backend, records, x, gate), records, x, gate)


def test_inactive_records_and_indices_beyond_the_count_are_never_read(backend: Backend) -> None:
    records, x, gate = packed(64, 256), normal(256, seed=5), gates(64, 64)
    blocks = records.blocks.clone()
    blocks[4:60, [1, 3, 145, 147]] = 0x7E  # d and dmin are NaN
    loaded = backend.neurons.load_neurons(PackedMatrix(blocks, MatrixFormat("Q4_K"), 64, 512), backend.device)
    indices = torch.full((64,), 1 << 30, dtype=torch.int32)
    indices[:3] = torch.tensor([2, 3, 61])
    count = torch.tensor(3, dtype=torch.int32)
    y = backend.neurons.neuron_ffn(loaded, *(v.to(backend.device) for v in (x, gate, indices, count))).cpu()
    kept = torch.zeros(64).index_put((indices[:3].long(),), gate[indices[:3].long()])
    assert_close(backend.bounds, y, records, x, kept)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_same_bits_every_run(backend: Backend, threads: int) -> None:
    records, x, gate = packed(700, 512), normal(512, seed=6), gates(700, 301)
    with torch_threads(threads):
        first = ffn(backend, records, x, gate)
        assert all(torch.equal(ffn(backend, records, x, gate), first) for _ in range(3))
    assert_close(backend.bounds, first, records, x, gate)


def test_an_input_that_is_not_finite_does_not_stay_unseen(backend: Backend) -> None:
    records, gate = packed(40, 512), gates(40, 9)
    for value in (float("nan"), float("inf")):
        x = normal(512, seed=7)
        x[300] = value
        assert not torch.isfinite(ffn(backend, records, x, gate)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_positions(backend: Backend, shape: tuple[int, int]) -> None:
    records, loaded = packed(*shape), backend.neurons.load_neurons(packed(*shape), backend.device)
    for batch, threads in ((1, 1), (2, 1), (17, 1), (70, 1), (70, 3)):
        x, gate = normal(batch, shape[1], seed=2), normal(batch, shape[0], seed=8).clamp_min(0)
        gate[-1] = 0
        with torch_threads(threads):
            y = backend.neurons.neuron_matmul(loaded, x.to(backend.device), gate.to(backend.device)).cpu()
        assert_close(backend.many, y, records, x, gate)
        assert not y[-1].any()


@pytest.mark.parametrize("hidden", [256, 1280])
def test_copied_records_are_those_that_were_loaded(backend: Backend, hidden: int) -> None:
    if not hasattr(backend.neurons, "copy_neurons"):
        pytest.skip("no records move there")
    records, x, gate = packed(70, hidden), normal(hidden, seed=2), gates(70, 30)
    loaded = backend.neurons.load_neurons(records, backend.device)
    room = backend.neurons.new_neurons(100, hidden, backend.device)
    taken = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:40].to(torch.int32)
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:40].to(torch.int32)
    backend.neurons.copy_neurons(room, slots[:0], loaded, taken[:0])
    nothing = torch.ones(100, device=backend.device)
    y = backend.neurons.neuron_matmul(room, x[None].to(backend.device), nothing[None])
    assert not y.any(), "room is not empty"
    backend.neurons.copy_neurons(room, slots[:15], loaded, taken[:15])
    backend.neurons.copy_neurons(room, slots[15:], loaded, taken[15:])
    in_slots = torch.zeros(100).index_put((slots.long(),), gate[taken.long()])
    y = backend.neurons.neuron_matmul(room, x[None].to(backend.device), in_slots[None].to(backend.device)).cpu()
    kept = torch.zeros(70).index_put((taken.long(),), gate[taken.long()])
    assert_close(backend.many, y[0], records, x, kept)
