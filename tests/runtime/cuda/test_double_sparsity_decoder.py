"""Decoders on the GPU with sparse attention, beside the reference's; without a GPU their kernels are simulated."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from pairwise import each_value
from sparse_decoders import CONTEXT, IDS, assert_near, device_of, oracle, policy_from, sparse_model

from sparsepack.formats.packed import PackedModel
from sparsepack.models.sparse_attention import SparseFrom
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.cuda.attention.kv_cache import CudaDoubleSparsityKvCache, OffloadedKvCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.generation.sampling import Sampler, Sampling

FIRST = 20
Cache = type[CudaDoubleSparsityKvCache]
VARIANTS = ["llama", "qwen3, wide heads, yarn", "mistral, sliding window", "gemma2, soft caps"]
CACHES = [CudaDoubleSparsityKvCache, OffloadedKvCache]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_cache = each_value({"variant": VARIANTS, "new_cache": CACHES})


@pytest.fixture
def packed(variant: str) -> PackedModel:
    return _packed(variant)


@cache
def _packed(variant: str) -> PackedModel:
    return sparse_model(variant, policy_from(FIRST))


def decoder(
    packed: PackedModel,
    kernels: Kernels,
    sequences: int = 1,
    new_cache: type[CudaDoubleSparsityKvCache] = CudaDoubleSparsityKvCache,
) -> CudaDecoder:
    return CudaDecoder(packed, device_of(kernels), CONTEXT, sequences, "f32", kernels, new_cache)


@every_variant
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


@every_variant
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


@every_variant
def test_dense_steps_read_everything(packed: PackedModel, kernels: Kernels) -> None:
    ours, plain = decoder(packed, kernels), oracle(replace(packed, attention=None))
    fill(ours, 30)
    fill(plain, 30)
    for id in IDS[30:40].tolist():
        assert_near(ours.step([id], False)[0], plain.step([id], False)[0])


@every_variant
def test_sparse_attention_begins_where_it_pays_but_is_measured_as_the_policy_says(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.attention.kv_cache.break_even", lambda *_: 40)
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


@every_cache
def test_steps_ahead_know_which_kind_comes_next(packed: PackedModel, kernels: Kernels, new_cache: Cache) -> None:
    greedy = Sampler(Sampling())
    ours, theirs = decoder(packed, kernels, new_cache=new_cache), oracle(packed)
    fill(ours, 15)
    fill(theirs, 15)
    id = other = 7
    for n in range(30):
        (id,), (other,) = (one.decode_next([x], True, [greedy]) for one, x in ((ours, id), (theirs, other)))
        assert id == other
        if n % 7 == 6:
            id = other = int(IDS[n])  # not what was begun ahead


@every_variant
def test_short_texts_are_read_whole_beside_long_ones(
    packed: PackedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsepack.runtime.cuda.attention.kv_cache.break_even", lambda *_: 40)
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, 2, "f32", kernels)
    plain = oracle(replace(packed, attention=None))
    for id in IDS[:44].tolist():
        ours.step([id, id], False)
    ours.truncate(0, 25)
    fill(plain, 25)
    for id in IDS[25:39].tolist():
        assert_near(ours.step([id, id], True)[0], plain.step([id], True)[0])


@every_cache
def test_a_copied_text_goes_on_as_its_source(packed: PackedModel, kernels: Kernels, new_cache: Cache) -> None:
    """In place of a longer one, whose tokens have slots where keys lie in the host's memory."""
    assert packed.attention is not None
    packed = replace(packed, attention=replace(packed.attention, policy=policy_from(4)))
    ours, theirs = decoder(packed, kernels, 2, new_cache), oracle(packed)
    for first, other in zip(IDS[:30].tolist(), IDS[30:60].tolist(), strict=True):
        ours.step([first, other], True)
        theirs.step([first], True)
    ours.copy(0, 1, 25)
    assert list(ours.cache.lengths) == [30, 25]
    for one in (ours, theirs):
        one.truncate(0, 25)
    for id in IDS[:12].tolist():
        first, second = ours.step([id, id], True)
        assert torch.equal(first, second)
        assert_near(second, theirs.step([id], True)[0])


@every_cache
def test_texts_of_different_length(packed: PackedModel, kernels: Kernels, new_cache: Cache) -> None:
    """Dense steps and sparse ones in turns, from the fourth token on."""
    assert packed.attention is not None
    packed = replace(packed, attention=replace(packed.attention, policy=policy_from(4)))
    ours = decoder(packed, kernels, 3, new_cache)
    theirs = [oracle(packed) for _ in range(3)]

    def step(number: int, sparse: bool) -> None:
        ids = IDS[number : number + 3].tolist()
        for row, one, id in zip(ours.step(ids, sparse), theirs, ids, strict=True):
            assert_near(row, one.step([id], sparse)[0])

    for number in range(20):
        step(number, number % 3 > 0)
    for n, length in ((0, 5), (1, 13)):
        ours.truncate(n, length)
        theirs[n].truncate(0, length)
    for number in range(16):
        step(number, True)


def fill(one: CudaDecoder | OperationsDecoder, count: int) -> None:
    """Append tokens one by one, which rounds nothing, unlike prefill on the GPU."""
    for id in IDS[:count].tolist():
        one.step([id], False)
