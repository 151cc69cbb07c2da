"""Decoders on the GPU with sparse attention, beside the reference's; without a GPU their kernels are simulated."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import simulated
import torch
from packed_models import random_model
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.models.records.sparse_attention import SparseAttention, SparseFrom, TokenPolicy
from sparsepack.runtime.cuda.attention.double_sparsity_kv_cache import DoubleSparsityKvCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.reference.backend import operations as reference_operations
from sparsepack.runtime.sampling import Sampler, Sampling

CONTEXT, FIRST = 60, 20
POLICY = TokenPolicy(Fraction(1, 4), sinks=1, recent=3, min_context=FIRST)
IDS = torch.randint(40, (CONTEXT,), generator=torch.Generator().manual_seed(4))
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["simulated", pytest.param("GPU", marks=ON_GPU)])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "GPU":
        yield KERNELS
        return
    with simulated.launches(), torch.no_grad():
        yield simulated.KERNELS


@pytest.fixture(scope="module", params=["llama", "qwen3, wide heads, yarn", "mistral, sliding window"])
def packed(request: pytest.FixtureRequest) -> PackedModel:
    packed = random_model(request.param)
    a = packed.architecture
    random = torch.Generator().manual_seed(3)
    heavy = [
        torch.stack([torch.randperm(a.head_dim, generator=random)[:4].sort().values for _ in range(a.kv_heads)])
        for _ in range(a.layers)
    ]
    return replace(packed, attention=SparseAttention(POLICY, (None, *heavy[1:])))


def decoder(packed: PackedModel, kernels: Kernels) -> CudaDecoder:
    return CudaDecoder(packed, device_of(kernels), CONTEXT, 1, "f32", kernels, DoubleSparsityKvCache)


def oracle(packed: PackedModel) -> OperationsDecoder:
    return OperationsDecoder(packed, reference_operations, torch.device("cpu"), CONTEXT, None)


def device_of(kernels: Kernels) -> torch.device:
    return torch.device("cuda" if kernels is KERNELS else "cpu")


def test_steps_turn_sparse_where_the_policy_says(packed: PackedModel, kernels: Kernels) -> None:
    ours, theirs = decoder(packed, kernels), oracle(packed)
    assert ours.cache.sparse_from.tokens == FIRST
    fill(ours, 12)
    fill(theirs, 12)
    for id in IDS[12:50].tolist():
        assert_near(ours.step([id], True)[0], theirs.step([id], True)[0])
    for one in (ours, theirs):
        one.truncate(0, 25)
        fill(one, 7)
    for id in IDS[:20].tolist():
        assert_near(ours.step([id], True)[0], theirs.step([id], True)[0])


def test_prefill_labels_its_keys(packed: PackedModel, kernels: Kernels) -> None:
    """Its inputs are rounded to 16 bits, so that some tokens are read in place of others that score as well."""
    ours, theirs = decoder(packed, kernels), oracle(packed)
    ours.prefill(0, IDS[:35])
    theirs.prefill(0, IDS[:35])
    found, expected = (
        torch.stack([one.step([id], True)[0] for id in IDS[35:50].tolist()]).cpu() for one in (ours, theirs)
    )
    difference = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.median() <= 0.03


def test_dense_steps_read_everything(packed: PackedModel, kernels: Kernels) -> None:
    ours, plain = decoder(packed, kernels), oracle(replace(packed, attention=None))
    fill(ours, 30)
    fill(plain, 30)
    for id in IDS[30:40].tolist():
        assert_near(ours.step([id], False)[0], plain.step([id], False)[0])


def test_sparse_attention_begins_where_it_pays_but_is_measured_as_the_policy_says(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.attention.caches.break_even", lambda *_: 40)
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, 1, "f32", kernels)
    plain, theirs = oracle(replace(packed, attention=None)), oracle(packed)
    assert ours.cache.sparse_from == SparseFrom(FIRST, 40)
    for one in (ours, plain):
        fill(one, 25)
    for id in IDS[25:39].tolist():
        assert_near(ours.step([id], True)[0], plain.step([id], True)[0])
    for one in (ours, theirs):
        one.reset()
    assert_near(ours.teacher_forced(IDS[:35], 0, True), theirs.teacher_forced(IDS[:35], 0, True))
    assert ours.cache.sparse_from == SparseFrom(FIRST, 40)


def test_steps_ahead_know_which_kind_comes_next(packed: PackedModel, kernels: Kernels) -> None:
    greedy = Sampler(Sampling())
    ours, theirs = decoder(packed, kernels), oracle(packed)
    fill(ours, 15)
    fill(theirs, 15)
    id = other = 7
    for _ in range(30):
        (id,), (other,) = (one.decode_next([x], True, [greedy]) for one, x in ((ours, id), (theirs, other)))
        assert id == other


def test_short_texts_are_read_whole_beside_long_ones(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.attention.caches.break_even", lambda *_: 40)
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, 2, "f32", kernels)
    plain = oracle(replace(packed, attention=None))
    for id in IDS[:44].tolist():
        ours.step([id, id], False)
    ours.truncate(0, 25)
    fill(plain, 25)
    for id in IDS[25:39].tolist():
        assert_near(ours.step([id, id], True)[0], plain.step([id], True)[0])


def test_texts_of_different_length(packed: PackedModel, kernels: Kernels) -> None:
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, 3, "f32", kernels, DoubleSparsityKvCache)
    theirs = [oracle(packed) for _ in range(3)]
    for step in range(20):
        ids = IDS[step : step + 3].tolist()
        found = ours.step(ids, False)
        for row, one, id in zip(found, theirs, ids, strict=True):
            assert_near(row, one.step([id], False)[0])
    for n, length in ((0, 5), (1, 13)):
        ours.truncate(n, length)
        theirs[n].truncate(0, length)
    for step in range(16):
        ids = IDS[step : step + 3].tolist()
        found = ours.step(ids, True)
        for row, one, id in zip(found, theirs, ids, strict=True):
            assert_near(row, one.step([id], True)[0])


def fill(one: CudaDecoder | OperationsDecoder, count: int) -> None:
    """Append tokens one by one, which rounds nothing, unlike prefill on the GPU."""
    for id in IDS[:count].tolist():
        one.step([id], False)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found.cpu() - expected).abs().max() <= 2e-3 * expected.abs().max()
