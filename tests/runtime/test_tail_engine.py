"""Engines on models whose matrices have tails, or scales of rows, against the stock model, and what they read of
them."""

from functools import cache
from typing import Any

import pytest
import torch
from backends import TOLERANCE, engine_of, every_backend, every_backend_that, largest_difference
from packed_models import by_neurons, random_model, stock_logits, stock_model, with_rules

from sparsepack.bench.decode import bytes_per_token, stored_bytes
from sparsepack.formats.kinds import EXPERTS, NEURONS
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import BACKENDS

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
WIDTHS: dict[str, dict[str, Any]] = {
    "one piece": {},
    "two pieces": {"hidden_size": 128, "intermediate_size": 301},
    "three pieces": {"hidden_size": 192, "intermediate_size": 350, "num_attention_heads": 6, "num_key_value_heads": 3},
    "scales of odd rows": {"intermediate_size": 301, "row_scales": True},
    "two pieces of Q8_0": {"hidden_size": 128, "intermediate_size": 301, "block": "Q8_0"},
    "three pieces of Q6_K": {"intermediate_size": 350, "row_scales": True, "block": "Q6_K"},
    "scales of rows, biases": {"intermediate_size": 256, "row_scales": True, "attention_bias": True, "mlp_bias": True},
}
EXPERT = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
RELU = {"hidden_act": "relu", "hidden_size": 256}


@cache
def model(widths: str) -> tuple[PackedModel, Any]:
    packed = random_model("llama", tails=True, **WIDTHS[widths])
    assert packed.layers[0].attention["attn_out"].matrix.tail is not None
    stock = stock_model(packed)
    return with_rules(packed, stock, IDS, [0, 6, 12]), stock


@every_backend
@pytest.mark.parametrize("start", [0, 6, 13])
@pytest.mark.parametrize("widths", WIDTHS)
def test_logits_are_those_of_the_stock_model(backend: str, widths: str, start: int) -> None:
    """Dense after a prompt: what CUDA rounds there makes inputs fall on the other side of thresholds, and of so few
    channels one moves logits by 0.4 (H200)."""
    packed, stock = model(widths)
    if packed.block not in BACKENDS[backend].blocks:
        pytest.skip("no kernels for these blocks")
    dense = start == 6
    expected, _ = stock_logits(stock, packed, IDS, len(IDS) if dense else start)
    found = engine_of(packed, backend, dense=dense).teacher_forced(IDS, start)
    assert largest_difference(found, expected) < TOLERANCE[backend]


@every_backend_that(lambda row: row.sequences > 1)
@pytest.mark.parametrize("widths", ["three pieces", "three pieces of Q6_K", "scales of rows, biases"])
def test_several_texts_have_the_logits_of_each(backend: str, widths: str) -> None:
    packed, _ = model(widths)
    alone, together = (engine_of(packed, backend, dense=True, sequences=count) for count in (1, 2))
    expected = [alone.teacher_forced(ids, len(ids) - 1)[-1] for ids in (IDS, IDS[::-1])]
    for number, ids in enumerate((IDS, IDS[::-1])):
        together.prefill(ids[:-1], number)
    found = together.step_all([IDS[-1], IDS[0]])
    for number in range(2):
        assert largest_difference(found[number], expected[number]) < TOLERANCE[backend]


@every_backend_that(lambda row: EXPERTS in row.mlps)
@pytest.mark.parametrize("intermediate", [32, 65, 96])
def test_experts_have_tails(backend: str, intermediate: int) -> None:
    packed = random_model("llama", tails=True, **EXPERT, intermediate_size=intermediate)
    stock = stock_model(packed)
    for start in (0, 13):
        expected, _ = stock_logits(stock, packed, IDS, start)
        found = engine_of(packed, backend).teacher_forced(IDS, start)
        assert largest_difference(found, expected) < TOLERANCE[backend]


@every_backend_that(lambda row: NEURONS in row.mlps)
@pytest.mark.parametrize("intermediate", [64, 300, 450])
def test_gates_of_neurons_have_tails(backend: str, intermediate: int) -> None:
    dense = random_model("llama", tails=True, **RELU, intermediate_size=intermediate)
    packed = by_neurons(dense, tails=True)
    expected, _ = stock_logits(stock_model(packed), packed, IDS, len(IDS))
    for start in (0, 13):
        found = engine_of(packed, backend).teacher_forced(IDS, start)
        assert largest_difference(found, expected) < TOLERANCE[backend]


def test_a_token_reads_a_tail_and_a_gpu_a_whole_band() -> None:
    packed = random_model("llama", tails=True)  # hidden 64, intermediate 172, 96 rows of queries, keys and values
    pieces = 2 * 64 + 1 * 64 + 1 * 172  # of attn_in, attn_out and mlp_mid; 344 rows of mlp_in are a band and 2 pieces
    pieces += (4 + 2) * 64
    of_layer = {name: site.matrix.nbytes for name, site in packed.layers[0].sites.items()}
    assert sum(of_layer.values()) == 36 * pieces
    bands = (1 + 1 + 2) * 64 + 172
    row = packed.embedding.blocks.nbytes / packed.embedding.rows
    on_cpu, on_gpu = (bytes_per_token(packed, {}, pads) for pads in (False, True))
    assert on_gpu - on_cpu == len(packed.layers) * (144 * bands - 36 * pieces)
    assert on_cpu == stored_bytes(packed) - packed.embedding.blocks.nbytes + row
    assert [name for name, row in BACKENDS.items() if row.pads_tails] == ["cuda", "metal"]
