"""Blocks whose gates the GPU has as copies: the decoder, also with kernels in plain torch, against the reference with
the same lists; the worker is the native one."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from backends import largest_difference
from decoder_steps import steps
from hybrid_decoders import decoder_of
from native_build import skip_without_kernels
from operations_for_tests import normal
from packed_models import by_neurons, random_model
from pairwise import each_value
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders.gates import copied, limits
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.chained import layer as operations_layer
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import host_tensors
from sparsepack.runtime.cuda.products import gate_copies
from sparsepack.runtime.cuda.products.neurons import CudaNeurons, load_neurons, new_active_neurons
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.hybrid.slots import GateCopies
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference import products as oracle
from sparsepack.runtime.reference import products as reference

skip_without_kernels()

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1))
EVEN = BandwidthProfile(3.0, 1.0, 1.0)
LINKS = {
    "both": EVEN,
    "bus alone": BandwidthProfile(1.0, 1.0, 1.0, handover=1e9),
    "processor alone": BandwidthProfile(1.0, 1e-9, 1.0),
}
RELU = 1
EPS = 1e-5


@cache
def model(**changes: Any) -> PackedModel:
    size = {"hidden_size": 256, "intermediate_size": 301, "hidden_act": "relu", **changes}
    return by_neurons(random_model("llama", **size), gates="rows")


def decoder(
    kernels: Kernels,
    times: float,
    slots: int = 90,
    bandwidth: BandwidthProfile = EVEN,
    copied: range = range(2),
    packed: PackedModel | None = None,
    **options: Any,
) -> CudaDecoder:
    packed = packed or model()
    chosen = EngineOptions(device="cuda", vram="1GB", gate_copy=times, threads=2, bandwidth=bandwidth, **options)
    parts = parts_of(packed, 128, "f32", chosen.sequences or 1, gate_copies=True)
    plan = Plan(parts, slots, parts.blocks, copied.start, copied=len(copied))
    cpu_gpu = CpuGpu(packed, operations, torch.device("cuda"), chosen, plan, kernels=kernels)
    return decoder_of(packed, 128, chosen, kernels, plan, cpu_gpu)


def as_listed(product: Callable[[Tensor], Tensor], copy: oracle.ReferenceCopy, x: Tensor) -> Tensor:
    """The gates of neurons that are listed for any of the texts, one of which each row is."""
    listed = oracle.may_be_active(copy, x).any(0)
    return torch.where(listed, product(x), 0)


def reference_of(times: float, monkeypatch: pytest.MonkeyPatch, sequences: int = 1) -> Engine:
    """The reference's engine, which lists neurons by copies of their gates."""
    packed = model()
    usual = operations_layer._product_of
    by_gate = {id(layer.mlp.gate): layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)}

    def listing(matrix: PackedMatrix, *rest: Any) -> Callable[[Tensor], Tensor]:
        mlp, product, gate = by_gate[id(matrix)], usual(matrix, *rest), decode_matrix(matrix)
        copy = copied(gate)
        loaded = oracle.load_gate_copy(copy, limits(copy, gate, mlp.frequency, times))
        return partial(as_listed, product, loaded)

    monkeypatch.setattr(operations_layer, "_product_of", listing)
    return Engine(packed, backend="reference", sequences=sequences)


def stepped(engine: Engine) -> Tensor:
    return torch.stack([engine.step(id) for id in IDS.tolist()])


@each_value({"bandwidth": LINKS, "slots": [0, 90, 602]})
def test_steps_compute_what_the_reference_computes_with_the_same_lists(
    kernels: Kernels, slots: int, bandwidth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped(reference_of(1.05, monkeypatch))
    engine = decoder(kernels, 1.05, slots, LINKS[bandwidth])
    found = steps(engine, IDS)
    assert largest_difference(found, expected) < 0.05
    monkeypatch.undo()
    exact = Engine(model(), backend="reference")
    assert largest_difference(exact.teacher_forced(IDS.tolist(), 0), expected) > 0.05, "the copy loses some"
    traffic, counted = engine.traffic_stats.traffic, engine.hit_counts
    assert (traffic.resident, traffic.bus + traffic.worker) == (counted.hits, counted.needed - counted.hits)
    assert slots == 602 or (traffic.worker > 0) == (bandwidth != "bus alone")
    assert slots == 602 or (traffic.bus > 0) == (bandwidth != "processor alone")
    listed = [count for (_, name), count in engine.active().items() if name == "mlp_records"]
    read = [count for (_, name), count in engine.active().items() if name == "mlp_gate"]
    assert 0 < sum(listed) < 13 * 602
    for of_block, columns in zip(listed, read, strict=True):
        assert 0 <= 256 * of_block / 301 - columns <= 13
    engine.reset()
    assert torch.equal(steps(engine, IDS), found), "the same text since a reset has the same bits"


@pytest.mark.parametrize("copied", [range(2), range(1), range(1, 2)])
def test_where_all_are_listed_nothing_is_lost(kernels: Kernels, copied: range) -> None:
    engine, exact = decoder(kernels, 16.0, copied=copied), Engine(model(), backend="reference")
    assert largest_difference(steps(engine, IDS), exact.teacher_forced(IDS.tolist(), 0)) < 0.05
    engine.reset()
    exact.dense = True
    assert largest_difference(steps(engine, IDS, sparse=False), exact.teacher_forced(IDS.tolist(), 0)) < 0.05


def test_prefill_has_every_gate_and_a_dense_step_lists_all(kernels: Kernels) -> None:
    engine, exact = decoder(kernels, 1.0), Engine(model(), backend="reference", dense=True)
    expected = exact.teacher_forced([*IDS.tolist(), 5, 6], 13)
    assert largest_difference(engine.prefill(0, IDS), expected[12]) < 0.1
    assert largest_difference(steps(engine, torch.tensor([5, 6]), sparse=False), expected[13:]) < 0.1


def test_gates_move_with_their_records(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped(reference_of(1.2, monkeypatch))
    engine = decoder(kernels, 1.2, policy="lru")
    assert largest_difference(steps(engine, IDS), expected) < 0.05
    assert engine.hit_counts.moves > 0


@pytest.mark.parametrize("sequences", [2, 5])
def test_several_texts_share_the_list(kernels: Kernels, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = torch.randint(300, (sequences, 6), generator=torch.Generator().manual_seed(2))
    exact = reference_of(1.2, monkeypatch, sequences)
    engine = decoder(kernels, 1.2, sequences=sequences)
    for ids in texts.t().tolist():
        assert largest_difference(engine.step(ids, True), exact.step_all(ids)) < 0.05


def test_a_listed_neuron_takes_a_gate_and_the_record_of_some() -> None:
    bandwidth = GateCopies(range(2), 2.0).listed_bandwidth(BandwidthProfile(3.0, 2.0, 1.0, 5e-6))
    assert bandwidth == BandwidthProfile(3.0, 2.0, 1.0, 5e-6)
    assert GateCopies(range(2), 1.0).listed_bandwidth(BandwidthProfile(3.0, 1.5, 0.75)) == BandwidthProfile(
        2.0, 1.0, 0.5
    )


# The kernels by themselves.

CUDA = torch.device("cuda")


def stored(count: int, hidden: int) -> PackedMatrix:
    return PackedMatrix(BLOCKS["Q4_K"].encode(normal(count, hidden, seed=count)), MatrixFormat("Q4_K"), count, hidden)


@pytest.mark.gpu
@each_value({"texts": [1, 2, 5], "count, hidden": [(1, 256), (301, 768), (1280, 512), (2000, 5120), (500, 8192)]})
def test_scores_list_those_that_the_reference_lists(count: int, hidden: int, texts: int) -> None:
    matrix, times = stored(count, hidden), 1.5
    frequency = torch.linspace(0.5, 0.01, count)
    made = gate_copies.load_gate_copy(matrix, frequency, times, CUDA)
    x, norm = normal(texts, hidden, seed=4), 1 + 0.1 * normal(hidden, seed=9)
    listed = torch.full((texts, count), torch.nan, device=CUDA)
    gate_copies.score_neurons(made, x.to(CUDA), norm.to(CUDA), EPS, listed)
    decoded = oracle.load_gate_copy(copied(decode_matrix(matrix).to(CUDA)), made.limits, CUDA)
    normed = reference.rms_norm(x.to(CUDA), norm.to(CUDA), EPS)
    scores = (normed.double() @ decoded.weight.double().t()) + decoded.limits * normed.double().norm(dim=1)[:, None]
    sure = scores.abs() > 1e-5 * normed.double().norm(dim=1)[:, None] * decoded.weight.double().norm(dim=1)
    assert torch.equal(listed[sure], (scores > 0)[sure].float())
    assert set(listed.unique().tolist()) <= {0.0, 1.0}
    assert sure.float().mean() > 0.99


@pytest.mark.gpu
@each_value(
    {
        "texts": [1, 3, 5],
        "resident": [0, 1, 150, 280],
        "count, hidden": [(300, 256), (301, 768), (5000, 1280), (1000, 5120), (400, 8192)],
    }
)
def test_exact_gates_of_listed_ones_and_who_is_kept(count: int, hidden: int, resident: int, texts: int) -> None:
    matrix = stored(count, hidden)
    loaded = load_neurons(matrix, CUDA)
    (there,) = host_tensors(1, tuple(loaded.records.shape), torch.uint8, CUDA)
    there.copy_(loaded.records)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).int()
    slots = torch.zeros_like(loaded.records)
    slots[: len(order)] = loaded.records[order.to(CUDA).long()]
    to = new_active_neurons(count, hidden, texts, CUDA)
    entries = count - count // 20
    who = torch.cat([order[:resident], order[resident:entries].sort().values])
    to.index[:entries] = torch.cat([torch.arange(resident).int(), who[resident:]]).to(CUDA)
    to.counts.copy_(torch.tensor([resident, entries, 7]))
    x = normal(texts, hidden, seed=4)
    to.x.copy_(x)
    gate_copies.multiply_listed(CudaNeurons(slots, 1.0), to, RELU, host=CudaNeurons(there, 1.0))
    weight = decode_matrix(matrix).double()[who.long()]
    expected = x.double() @ weight.t()
    error = (to.gates[:, :entries].cpu().double() - expected.relu()).abs()
    assert (error <= 2e-5 * x.double().norm(dim=1)[:, None] * weight.norm(dim=1)).all()
    kept = gate_copies.kept_of(to, gate_copies.new_kept(count, texts, CUDA))
    read = torch.full((), 3, dtype=torch.int64, device=CUDA)
    gate_copies.keep_active(to, kept, read)
    chosen = (to.gates[:, :entries] != 0).any(0).nonzero()[:, 0]
    assert kept.counts.tolist() == [int((chosen < resident).sum()), len(chosen), 7]
    assert torch.equal(kept.index[: len(chosen)], to.index[chosen])
    assert torch.equal(kept.gates[:, : len(chosen)], to.gates[:, chosen])
    assert int(read) == 3 + hidden * (entries + 7) // count
    to.counts.zero_()
    gate_copies.multiply_listed(CudaNeurons(slots, 1.0), to, RELU, host=CudaNeurons(there, 1.0))
    gate_copies.keep_active(to, kept)
    assert kept.counts.tolist() == [0, 0, 0]
