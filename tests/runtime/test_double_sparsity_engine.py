"""Engines that read some of the tokens, against the reference's with a cache of the same type."""

import dataclasses
from fractions import Fraction
from functools import cache

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend_that
from packed_models import random_model, stock_model, with_rules
from rounding import check_logits, reference_logits
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

IDS = torch.randint(300, (48,), generator=torch.Generator().manual_seed(1)).tolist()
START = 24
POLICY = TokenPolicy(Fraction(1, 4), sinks=1, recent=3, min_context=8)
VARIANTS = ["llama", "qwen2, biases, tied", "qwen3, tied", "llama, one head, relu"]
every_backend = every_backend_that(lambda row: row.selects)


@cache
def model(variant: str, *, skips: bool = False) -> PackedModel:
    """With a dense layer before the sparse one; `skips`: columns as well."""
    packed = random_model(variant)
    if skips:
        packed = with_rules(packed, stock_model(packed), IDS, [0, START])
    a = packed.architecture
    random = torch.Generator().manual_seed(0)
    heavy = [torch.randperm(a.head_dim, generator=random)[: a.head_dim // 2].sort().values for _ in range(a.kv_heads)]
    return dataclasses.replace(packed, attention=SparseAttention(POLICY, (None, torch.stack(heavy))))


def cache_type(backend: str) -> str:
    return "f16" if "f16" in BACKENDS[backend].cache_types else "f32"


def engine(packed: PackedModel, backend: str, *, dense: bool = False) -> Engine:
    return engine_of(packed, backend, context=64, dense=dense, cache_type=cache_type(backend))


def expected(packed: PackedModel, backend: str, start: int) -> Tensor:
    return reference_logits(packed, IDS, start, cache_type(backend))


def far(found: Tensor, expected: Tensor, backend: str) -> int:
    """At how many positions the two are apart."""
    return int(((found.cpu() - expected.cpu()).abs().amax(-1) > TOLERANCE[backend]).sum())


@every_backend
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("start", [0, START])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_reference_s(backend: str, variant: str, start: int, skips: bool) -> None:
    packed = model(variant, skips=skips)
    found = engine(packed, backend).teacher_forced(IDS, start)
    check_logits(found, expected(packed, backend, start), backend, packed, IDS, start, cache_type(backend))
    all_read = expected(dataclasses.replace(packed, attention=None), backend, start)
    assert far(found[START:], all_read[START:], backend) > len(IDS[START:]) // 2, "the policy changes nothing"


@every_backend
def test_a_dense_engine_reads_every_token(backend: str) -> None:
    packed = model("llama")
    found = engine(packed, backend, dense=True).teacher_forced(IDS, 4)
    assert far(found, expected(packed, backend, len(IDS)), backend) == 0


@every_backend
def test_steps_are_what_teacher_forcing_does_and_go_on_after_truncation(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double_sparsity, "BREAK_EVEN", 0)  # the GPU's steps would read so few tokens all
    running = engine(model("qwen3, tied"), backend)
    whole = running.teacher_forced(IDS, START)
    running.reset()
    running.prefill(IDS[:20])
    running.prefill(IDS[20:START])
    for id in (7, 8, 9):
        running.step(id)
    running.truncate(START)
    assert far(torch.stack([running.step(id) for id in IDS[START:]]), whole[START:], backend) <= 2


@every_backend
def test_generation_takes_the_steps(backend: str) -> None:
    running = engine(model("llama, one head, relu"), backend)
    runs = []
    for together in (True, False):
        running.reset()
        sampler = Sampler(Sampling())
        id = sampler.choose(running.prefill(IDS[:START]))
        ids = [id]
        for _ in range(12):
            id = running.decode_next(id, sampler) if together else sampler.choose(running.step(id))
            ids.append(id)
        runs.append(ids)
    assert runs[0] == runs[1]
