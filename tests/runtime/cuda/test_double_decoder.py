"""Decoders on the GPU with sparse attention, beside the reference's; without a GPU their kernels are simulated."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import simulated
import torch
from packed_models import random_model
from torch import Tensor

from sparsepack.models.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime import reference_operations
from sparsepack.runtime.cuda.batch import CudaBatch
from sparsepack.runtime.cuda.decoder import CudaDecoder
from sparsepack.runtime.cuda.double.kv_cache import DoubleKvCache
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.operations_decoder import OperationsDecoder
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
    return CudaDecoder(packed, device_of(kernels), CONTEXT, "f32", kernels, DoubleKvCache)


def oracle(packed: PackedModel) -> OperationsDecoder:
    return OperationsDecoder(packed, reference_operations, torch.device("cpu"), CONTEXT, None)


def device_of(kernels: Kernels) -> torch.device:
    return torch.device("cuda" if kernels is KERNELS else "cpu")


def test_steps_turn_sparse_where_the_policy_says(packed: PackedModel, kernels: Kernels) -> None:
    ours, theirs = decoder(packed, kernels), oracle(packed)
    assert ours.attention_from == FIRST
    fill(ours, 12)
    fill(theirs, 12)
    for id in IDS[12:50].tolist():
        assert_near(ours.step(id, True), theirs.step(id, True))
    for one in (ours, theirs):
        one.truncate(25)
        fill(one, 7)
    for id in IDS[:20].tolist():
        assert_near(ours.step(id, True), theirs.step(id, True))


def test_prefill_labels_its_keys(packed: PackedModel, kernels: Kernels) -> None:
    """Its inputs are rounded to 16 bits, so that some tokens are read in place of others that score as well."""
    ours, theirs = decoder(packed, kernels), oracle(packed)
    ours.prefill(IDS[:35])
    theirs.prefill(IDS[:35])
    found, expected = (torch.stack([one.step(id, True) for id in IDS[35:50].tolist()]).cpu() for one in (ours, theirs))
    difference = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.median() <= 0.03


def test_dense_steps_read_everything(packed: PackedModel, kernels: Kernels) -> None:
    ours, plain = decoder(packed, kernels), oracle(replace(packed, attention=None))
    fill(ours, 30)
    fill(plain, 30)
    for id in IDS[30:40].tolist():
        assert_near(ours.step(id, False), plain.step(id, False))


def test_sparse_attention_begins_where_it_pays_but_is_measured_as_the_policy_says(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.double.kv_cache.pays_from", lambda *_: 40)
    paying = partial(DoubleKvCache, where_it_pays=True)
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, "f32", kernels, paying)
    plain, theirs = oracle(replace(packed, attention=None)), oracle(packed)
    assert ours.attention_from == 40
    for one in (ours, plain):
        fill(one, 25)
    for id in IDS[25:39].tolist():
        assert_near(ours.step(id, True), plain.step(id, True))
    for one in (ours, theirs):
        one.reset()
    assert_near(ours.teacher_forced(IDS[:35], 0, True), theirs.teacher_forced(IDS[:35], 0, True))
    assert ours.attention_from == 40


def test_steps_ahead_know_which_kind_comes_next(packed: PackedModel, kernels: Kernels) -> None:
    greedy = Sampler(Sampling())
    ours, theirs = decoder(packed, kernels), oracle(packed)
    fill(ours, 15)
    fill(theirs, 15)
    id = other = 7
    for _ in range(30):
        id, other = ours.decode_next(id, True, greedy), theirs.decode_next(other, True, greedy)
        assert id == other


def test_short_texts_are_read_whole_beside_long_ones(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.double.kv_cache.pays_from", lambda *_: 40)
    paying = partial(DoubleKvCache, where_it_pays=True)
    ours = CudaBatch(packed, device_of(kernels), CONTEXT, 2, "f32", kernels, paying)
    plain = oracle(replace(packed, attention=None))
    for id in IDS[:44].tolist():
        ours.step([id, id], False)
    ours.truncate(0, 25)
    fill(plain, 25)
    for id in IDS[25:39].tolist():
        assert_near(ours.step([id, id], True)[0], plain.step(id, True))


def test_texts_of_different_length(packed: PackedModel, kernels: Kernels) -> None:
    ours = CudaBatch(packed, device_of(kernels), CONTEXT, 3, "f32", kernels, DoubleKvCache)
    theirs = [oracle(packed) for _ in range(3)]
    for step in range(20):
        ids = IDS[step : step + 3].tolist()
        found = ours.step(ids, False)
        for row, one, id in zip(found, theirs, ids, strict=True):
            assert_near(row, one.step(id, False))
    for n, length in ((0, 5), (1, 13)):
        ours.truncate(n, length)
        theirs[n].truncate(length)
    for step in range(16):
        ids = IDS[step : step + 3].tolist()
        found = ours.step(ids, True)
        for row, one, id in zip(found, theirs, ids, strict=True):
            assert_near(row, one.step(id, True))


def fill(one: CudaDecoder | OperationsDecoder, count: int) -> None:
    """Append tokens one by one, which rounds nothing, unlike prefill on the GPU."""
    for id in IDS[:count].tolist():
        one.step(id, False)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found.cpu() - expected).abs().max() <= 2e-3 * expected.abs().max()
