"""Engines on models whose MLPs are stored by neurons, against the stock model: skipping changes nothing."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import SHARE, TOLERANCE, device_of, engine_of, every_backend_that, largest_difference
from packed_models import by_neurons, random_model, stock_logits, stock_model, with_rules
from tokenizers import Tokenizer

from sparsepack.errors import UserError
from sparsepack.eval.engine_subject import EngineScorer
from sparsepack.files.text import read_text
from sparsepack.formats.kinds import DENSE, NEURONS, PLAIN_NEURONS
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.chained import decoder as operations_decoder
from sparsepack.runtime.cpu import decoder as native_decoder
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.features import check_features
from sparsepack.runtime.options import EngineOptions

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "odd count of neurons": {"intermediate_size": 301, "num_key_value_heads": 8},
    "one neuron": {"intermediate_size": 1},
    "tied, two superblocks": {"hidden_size": 512, "tie_word_embeddings": True},
    "gates by rows": {"gates": "rows"},
    "gates by rows, odd count": {"gates": "rows", "hidden_size": 512, "intermediate_size": 301},
}

PLAIN: dict[str, dict[str, Any]] = {
    "without gates": {"hidden_act": "relu2", "mlp_bias": False},
    "without gates, one neuron": {"hidden_act": "relu2", "mlp_bias": False, "intermediate_size": 1},
    "without gates, by rows, odd count": {
        "hidden_act": "relu2",
        "mlp_bias": False,
        "gates": "rows",
        "hidden_size": 512,
        "intermediate_size": 301,
    },
}

every_backend = every_backend_that(lambda row: NEURONS in row.mlps)
every_plain_backend = every_backend_that(lambda row: PLAIN_NEURONS in row.mlps)


@cache
def models(variant: str, rules: bool = False) -> tuple[PackedModel, Any]:
    changes = {"hidden_size": 256, "intermediate_size": 300, "hidden_act": "relu", **(VARIANTS | PLAIN)[variant]}
    gates = changes.pop("gates", "zigzag")
    packed = by_neurons(random_model("arcee, without a gate" if variant in PLAIN else "llama", **changes), gates=gates)
    stock = stock_model(packed)
    return (with_rules(packed, stock, IDS, [0, 6, 12]) if rules else packed), stock


@every_backend
@pytest.mark.parametrize("start", [0, 6, 13])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_stock_model_however_much_is_skipped(backend: str, variant: str, start: int) -> None:
    packed, stock = models(variant)
    expected, _ = stock_logits(stock, packed, IDS, len(IDS))
    for dense in (False, True):
        engine = engine_of(packed, backend, dense=dense)
        assert largest_difference(engine.teacher_forced(IDS, start), expected) < TOLERANCE[backend]


@every_backend
@pytest.mark.parametrize("variant", ["grouped queries", "gates by rows"])
def test_steps_skip_inactive_neurons_and_dense_ones_none(backend: str, variant: str) -> None:
    packed, stock = models(variant)
    expected, watch = stock_logits(stock, packed, IDS, 0)
    engine = engine_of(packed, backend)
    found = torch.stack([engine.step(id) for id in IDS])
    assert largest_difference(found, expected) < TOLERANCE[backend]
    activity = engine.activity()
    for layer in range(len(packed.layers)):
        active = float((watch.inputs[layer, "mlp_mid"] != 0).double().mean())
        assert activity[layer, "mlp_records"] == pytest.approx(active, abs=SHARE[backend])
        assert 0.3 < active < 0.7
        assert activity[layer, "mlp_gate"] == activity[layer, "attn_in"] == 1
    skipped = engine.skipped()
    assert skipped is not None
    assert 0.1 < skipped.overall < 0.4
    engine.reset()
    engine.dense = True
    for id in IDS:
        engine.step(id)
    assert set(engine.activity().values()) == {1.0}


@every_plain_backend
@pytest.mark.parametrize("variant", PLAIN)
def test_neurons_without_gates_are_the_stock_model_whatever_is_skipped(backend: str, variant: str) -> None:
    packed, stock = models(variant)
    assert packed.mlp_kind is PLAIN_NEURONS
    expected, watch = stock_logits(stock, packed, IDS, 0)
    for start in (0, 6, 13):
        for dense in (False, True):
            engine = engine_of(packed, backend, dense=dense)
            assert largest_difference(engine.teacher_forced(IDS, start), expected) < TOLERANCE[backend]
    engine = engine_of(packed, backend)
    assert largest_difference(torch.stack([engine.step(id) for id in IDS]), expected) < TOLERANCE[backend]
    for layer in range(len(packed.layers)):
        active = float((watch.inputs[layer, "mlp_mid"] != 0).double().mean())
        assert engine.activity()[layer, "mlp_records"] == pytest.approx(active, abs=SHARE[backend])
        assert engine.activity()[layer, "mlp_gate"] == 1


@every_plain_backend
def test_several_texts_share_neurons_without_gates(backend: str) -> None:
    packed, _ = models("without gates, by rows, odd count")
    together, alone = engine_of(packed, backend, sequences=2), engine_of(packed, backend)
    ids = IDS[::-1]
    found = torch.stack([together.step_all([one, other]) for one, other in zip(IDS, ids, strict=True)])
    for sequence, text in enumerate((IDS, ids)):
        alone.reset()
        expected = torch.stack([alone.step(id) for id in text])
        assert largest_difference(found[:, sequence], expected) < TOLERANCE[backend]


@every_backend
def test_attention_may_have_thresholds_beside_neurons(backend: str) -> None:
    packed, stock = models("odd count of neurons", rules=True)
    assert {site for _, site in packed.rules} == {"attn_in", "attn_out"}
    expected, _ = stock_logits(stock, packed, IDS, 6)
    dense, _ = stock_logits(stock, packed, IDS, len(IDS))
    engine = engine_of(packed, backend)
    assert largest_difference(engine.teacher_forced(IDS, 6), expected) < TOLERANCE[backend]
    assert largest_difference(expected[6:], dense[6:]) > 0.5, "the rules change nothing"


@every_backend
def test_no_active_neuron_leaves_the_residual(backend: str) -> None:
    silent = by_neurons(random_model("llama", hidden_size=256, intermediate_size=300, hidden_act="relu"))
    for layer in silent.layers:
        layer.matrices["mlp_gate"].blocks.zero_()
    engine = engine_of(silent, backend)
    found = torch.stack([engine.step(id) for id in IDS])
    expected, _ = stock_logits(stock_model(silent), silent, IDS, len(IDS))
    assert largest_difference(found, expected) < TOLERANCE[backend]
    assert engine.activity()[0, "mlp_records"] == 0


@every_backend
def test_long_texts_pass_in_chunks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = models("odd count of neurons")
    whole = engine_of(packed, backend).teacher_forced(IDS, 6)
    for module in (operations_decoder, native_decoder, cuda_decoder):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 4)
    assert largest_difference(engine_of(packed, backend).teacher_forced(IDS, 6), whole) < TOLERANCE[backend]


def test_a_backend_that_does_not_run_them_says_so() -> None:
    packed, _ = models("grouped queries")
    toy = replace(find_backend("reference"), name="toy", mlps=(DENSE,))
    with pytest.raises(UserError, match="the toy backend does not run models by neurons; use backend reference or cpu"):
        check_features(toy, EngineOptions(), packed)
    packed, _ = models("without gates")
    toy = replace(toy, mlps=(DENSE, NEURONS))
    with pytest.raises(UserError, match="the toy backend does not run models by neurons without a gate; use backend"):
        check_features(toy, EngineOptions(), packed)


@pytest.mark.parametrize("options", [{"cached": 0.5}, {"vram": "1GB"}])
def test_neurons_without_gates_are_not_divided(options: dict[str, Any]) -> None:
    packed, _ = models("without gates")
    with pytest.raises(UserError, match="neurons without a gate are not divided between a GPU and the host") as told:
        check_features(find_backend("cuda"), EngineOptions(**options), packed)
    assert "\n" not in str(told.value)


@every_backend
def test_a_trained_model_says_the_same_with_neurons_left_out(backend: str, trained: PackedModel, shared: Path) -> None:
    text = read_text(str(shared / "text" / "books.validation.jsonl.xz"))
    ids = [0, *Tokenizer.from_str(trained.tokenizer_json).encode(next(text.pieces())[:4000]).ids][:300]
    engine = engine_of(trained, backend)
    sparse = engine.teacher_forced(ids, 10).cpu()
    activity = [share for (_, name), share in engine.activity().items() if name == "mlp_records"]
    assert 0.08 < sum(activity) / len(activity) < 0.2
    dense = engine_of(trained, "reference", dense=True).teacher_forced(ids, len(ids))
    assert (sparse.argmax(-1) == dense.argmax(-1)).float().mean() >= 0.99
    divergence = (dense.softmax(-1) * (dense.log_softmax(-1) - sparse.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 1e-5


@every_backend
def test_eval_counts_the_neurons_that_steps_skip(backend: str) -> None:
    packed, _ = models("grouped queries")
    scorer = EngineScorer(packed, EngineOptions(backend=backend, device=device_of(find_backend(backend))))
    scorer.hidden(torch.tensor([IDS]), None, torch.tensor([6]))
    realised = scorer.realised()
    assert set(realised) == {(0, "mlp_records"), (1, "mlp_records")}
    assert all(0.3 < share < 0.7 for share in realised.values())
