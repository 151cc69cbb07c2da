"""The cuda decoder on models by neurons, its kernels in plain torch on the CPU, against the reference."""

from functools import cache
from typing import Any

import pytest
import torch
from backends import largest_difference
from packed_models import by_neurons, random_model, stock_model, with_rules
from pairwise import each_value
from simulated_decoders import IDS, check_prefill, check_steps, counts, decoder

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

pytestmark = pytest.mark.usefixtures("simulated_launches")

PLAIN: dict[str, Any] = {"variant": "arcee, without a gate", "hidden_act": "relu2", "mlp_bias": False, "head_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "odd count of neurons": {"intermediate_size": 301, "num_key_value_heads": 8},
    "one neuron": {"intermediate_size": 1},
    "three superblocks, tied": {"hidden_size": 768, "num_attention_heads": 8, "tie_word_embeddings": True},
    "segments": {"num_hidden_layers": 3, "bases": (1, 2)},
    "gates by rows": {"gates": "rows", "intermediate_size": 301},
    "without gates": PLAIN,
    "without gates, by rows": {**PLAIN, "gates": "rows", "intermediate_size": 301},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def model(variant: str, rules: bool = False) -> PackedModel:
    changes = {"hidden_size": 256, "intermediate_size": 300, "hidden_act": "relu", **VARIANTS[variant]}
    gates = changes.pop("gates", "zigzag")
    packed = by_neurons(random_model(changes.pop("variant", "llama"), **changes), gates=gates)
    return with_rules(packed, stock_model(packed), IDS.tolist(), [0]) if rules else packed


@each_value({"variant": VARIANTS, "rules": [False, True]})
def test_steps_compute_and_count_what_the_reference_does(variant: str, rules: bool) -> None:
    if rules and "bases" in VARIANTS[variant]:
        pytest.skip("thresholds of segments are test_chain's")
    packed = model(variant, rules)
    check_steps(packed)


@each_value({"variant": VARIANTS, "chunk": [2048, 4], "room": [1 << 28, 4 * 256 * 100]})
def test_prefill_computes_what_the_reference_computes(
    variant: str, chunk: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where neurons pass in pieces."""
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", chunk)
    monkeypatch.setattr(zigzag, "SCRATCH_BYTES", room)
    check_prefill(model(variant))


@each_value(
    {
        "sequences": [2, 5, 8],
        "variant": ["odd count of neurons", "gates by rows", "without gates"],
        "sparse": [True, False],
    }
)
def test_several_texts_share_the_union(sequences: int, variant: str, sparse: bool) -> None:
    packed = model(variant)
    texts = torch.randint(300, (sequences, 5), generator=torch.Generator().manual_seed(2))
    engine, reference = decoder(packed, sequences), Engine(packed, backend="reference", sequences=sequences)
    reference.dense = not sparse
    for ids in texts.t().tolist():
        assert largest_difference(engine.step(ids, sparse), reference.step_all(ids)) < 1e-3
    assert engine.active() == pytest.approx(counts(reference, 5))


def test_a_step_ahead_is_the_step_that_is_asked_for() -> None:
    packed = model("grouped queries")
    engine, reference = decoder(packed), Engine(packed, backend="reference")
    sampler, chosen = Sampler(Sampling()), [int(IDS[0])]
    for _ in range(8):
        (id,) = engine.decode_next([chosen[-1]], True, [sampler])
        assert id is not None
        chosen.append(id)
    expected = reference.teacher_forced(chosen[:-1], 0)
    assert chosen[1:] == expected.argmax(-1).tolist()
    assert engine.active() == pytest.approx(counts(reference, 8))
