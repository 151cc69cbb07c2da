"""What a packed model is planned to take: the bytes of its tensors, each counted once; refusals on both sides."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from packed_models import by_neurons, random_model

from sparsepack.bench.decode import stored_bytes
from sparsepack.errors import PlacementError, UserError
from sparsepack.formats.orders.gates import copied, limits
from sparsepack.formats.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.placement.budget import SPARE
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import FEATURES
from sparsepack.runtime.free_memory import cache_bytes
from sparsepack.runtime.hybrid import plan as module
from sparsepack.runtime.hybrid.plan import check_host, context_within, make_plan, parts_of
from sparsepack.runtime.options import EngineOptions

EXPERTS = {"model_type": "mixtral", "intermediate_size": 72, "num_local_experts": 4, "num_experts_per_tok": 1}
RELU = {"hidden_size": 256, "intermediate_size": 300, "hidden_act": "relu"}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def packed(request: pytest.FixtureRequest) -> PackedModel:
    return by_neurons(random_model("llama", **RELU, tie_word_embeddings=request.param))


def test_every_stored_byte_is_counted_once(packed: PackedModel) -> None:
    assert parts_of(packed, 64, "bf16").weights == stored_bytes(packed)


def test_copies_of_gates_are_for_gates_by_rows() -> None:
    rows = by_neurons(random_model("llama", **RELU), gates="rows")
    parts = parts_of(rows, 64, "bf16", gate_copies=True)
    assert parts.weights == stored_bytes(rows)
    assert parts.gate == 144
    gate = copied(torch.randn(300, 256))
    limit = limits(gate, gate.decoded() + 1, torch.full((300,), 0.1), 2)
    assert parts.copies == (gate.nbytes + limit.nbytes,) * 2
    with pytest.raises(PlacementError, match="gates in zigzag order; pack the model again with --gates rows"):
        parts_of(by_neurons(random_model("llama", **RELU)), 64, "bf16", gate_copies=True)
    budget = parts.least + parts.output + sum(parts.attention) + sum(parts.gates) * 3 // 4
    found = make_plan(rows, 64, "bf16", EngineOptions(vram=f"{budget / 1e6:.6f}MB", gate_copy=1.5))
    assert (found.gates, found.copied) == (0, 2)
    asked = EngineOptions(vram="8GB", gate_copy=1.5)
    (copies,) = (
        each
        for each in FEATURES
        if each.is_requested(asked, None) and not each.is_requested(EngineOptions(vram="8GB"), None)
    )
    with pytest.raises(UserError, match=r"gate_copy 1\.5: the cpu backend has no copies of gates; use device cuda"):
        copies.check(find_backend("cpu"), asked)


def test_texts_have_a_cache_each(packed: PackedModel) -> None:
    one, three = (parts_of(packed, 64, "bf16", texts) for texts in (1, 3))
    a = packed.architecture
    of_a_text = 2 * 2 * a.layers * a.kv_heads * a.head_dim * 64
    assert three.cache - one.cache == 2 * of_a_text
    assert one.cache == of_a_text + 64 * 4 * a.head_dim
    assert parts_of(packed, 64, "f32").cache == 2 * of_a_text + 64 * 4 * a.head_dim
    assert three.work.bytes > one.work.bytes


def test_labels_of_keys_are_planned() -> None:
    packed = random_model("llama", **RELU)
    channels = (None, torch.zeros(packed.architecture.kv_heads, 3, dtype=torch.long))
    policy = TokenPolicy(Fraction(1, 4), sinks=1, recent=3, min_context=16)
    selecting = replace(packed, attention=SparseAttention(policy, channels))
    of_a_head = 64 * (8 // 2 + 2)
    assert parts_of(selecting, 64, "bf16", 3).cache - parts_of(packed, 64, "bf16", 3).cache == (
        3 * packed.architecture.kv_heads * of_a_head
    )


def test_the_options_say_the_budget(packed: PackedModel) -> None:
    parts = parts_of(packed, 64, "bf16")
    assert make_plan(packed, 64, "bf16", EngineOptions()).whole
    assert make_plan(packed, 64, "bf16", EngineOptions(cached=0.5)).slots == round(0.5 * parts.all_neurons)
    budget = parts.least + parts.weights - parts.embedding - 300 * parts.record
    found = make_plan(packed, 64, "bf16", EngineOptions(vram=f"{budget / 1e6:.6f}MB"))
    assert (found.budget, found.slots) == (budget, 600 - 300 - SPARE)
    assert found.card_bytes <= budget
    with pytest.raises(PlacementError, match="give at least"):
        make_plan(packed, 64, "bf16", EngineOptions(vram="0.1MB"))


def test_a_host_without_room_is_refused_with_what_it_has(packed: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_plan(packed, 64, "bf16", EngineOptions(cached=0.5))
    check_host(found, None)
    check_host(found, found.host_bytes)
    monkeypatch.setattr(module, "free_host_bytes", lambda: found.host_bytes - 1)
    with pytest.raises(PlacementError, match=r"of the host's memory for what .*GB are free; end what takes it"):
        make_plan(packed, 64, "bf16", EngineOptions(cached=0.5))
    with pytest.raises(PlacementError, match="give a larger --vram"):
        check_host(replace(found, budget=1), 0)


def test_experts_have_no_plan() -> None:
    with pytest.raises(PlacementError, match="mixtures of experts, which no engine gives slots"):
        parts_of(random_model(**EXPERTS), 64, "bf16")


def test_a_budget_is_for_a_gpu_and_stands_alone(packed: PackedModel) -> None:
    with pytest.raises(UserError, match=r"vram 8GB: the cpu backend has no memory of a GPU to divide; use device cuda"):
        Engine(packed, vram="8GB", context=64, backend="cpu")
    with pytest.raises(UserError, match="vram 8GB: the reference backend has no memory of a GPU"):
        Engine(packed, vram="8GB", context=64, backend="reference")
    with pytest.raises(UserError, match="it does nothing with cached"):
        EngineOptions(vram="8GB", cached=0.3)
    with pytest.raises(UserError, match="expected gigabytes or megabytes"):
        EngineOptions(vram="8")
    assert EngineOptions(vram="8GB", policy="static").divided_by == "vram"
    with pytest.raises(UserError, match="policy static: it does nothing without cached"):
        EngineOptions(policy="static")


def test_without_a_context_keys_and_values_take_at_most_a_quarter_of_the_budget(packed: PackedModel) -> None:
    of_a_token = (cache_bytes(packed.architecture, 64, "bf16")) // 64
    for tokens, expected in ((1000, 64), (256, 64), (255, 32), (128, 32), (64, 16), (1, 16)):
        assert context_within(packed, 64, "bf16", 1, tokens * of_a_token) == expected
    assert context_within(packed, 64, "bf16", 2, 256 * of_a_token) == 32
