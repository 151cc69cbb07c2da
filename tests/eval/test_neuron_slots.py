"""`eval` of models by neurons: what is skipped and what slots serve, and where neither is known, that is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from artifacts_for_tests import tiny_by_neurons
from commands_for_tests import sparsepack, succeeds

from sparsepack.errors import UserError
from sparsepack.eval.engine_subject import EngineScorer, open_engine_subject
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import read_text
from sparsepack.formats.open import read_packed
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.packing import PackRequest, pack
from sparsepack.placement.counts import HitCounts
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions

SOME = EngineOptions(cached=0.3)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> EvalRequest:
    """Three windows by the tiny model by neurons, as if it had been trained with ReLU."""
    path = tiny_by_neurons(tmp_path_factory.mktemp("slots"))
    texts = {"perplexity": ("shipped:heldout",), "context": 32, "windows": 3}
    return EvalRequest(str(path), runtime="reference", **texts)


def test_slots_change_nothing_but_what_is_told_of_them(asked: EvalRequest) -> None:
    (plain,) = evaluate(asked)["perplexity"]
    (placed,) = evaluate(replace(asked, engine=SOME))["perplexity"]
    assert plain["protocol"] == placed["protocol"] == "decode"
    assert plain["served"] is None
    assert placed["perplexity"]["value"] == pytest.approx(plain["perplexity"]["value"], rel=1e-5)
    assert placed["realised_sparsity"] == plain["realised_sparsity"]
    assert 0.2 < placed["realised_sparsity"]["overall"] < 0.6
    served = placed["served"]
    assert served["tokens"] == placed["targets"]
    assert 0 < served["hits"] < served["needed"]
    assert served["hit_rate"] == served["hits"] / served["needed"]


@pytest.mark.parametrize("policy", ["slow", "static"])
def test_what_is_served_is_the_sum_over_windows(asked: EvalRequest, policy: str) -> None:
    (found,) = evaluate(replace(asked, engine=EngineOptions(cached=0.3, policy=policy), protocol="all"))["perplexity"]
    packed = read_packed(Path(asked.subject))
    engine = Engine(packed, context=32, backend="reference", cached=0.3, policy=policy)
    total = HitCounts()
    subject = open_engine_subject(asked.subject, EngineOptions(backend="reference"))
    for ids in rolling_windows(subject.tokenizer, read_text("shipped:heldout"), 32, 3)[0].tolist():
        engine.reset()
        for id in ids:
            engine.step(id)
        assert engine.hit_counts is not None
        total += engine.hit_counts
    assert found["served"] == total.to_json()


def test_counts_begin_anew_with_each_text(asked: EvalRequest) -> None:
    scorer = EngineScorer(read_packed(Path(asked.subject)), replace(SOME, backend="reference"))
    assert scorer.hit_counts is None
    tokenizer = open_engine_subject(asked.subject, EngineOptions(backend="reference")).tokenizer
    ids = rolling_windows(tokenizer, read_text("shipped:heldout"), 16, 1)
    scorer.hidden(ids[0], None, ids[0].new_tensor([8]))
    once = scorer.hit_counts
    scorer.reset()
    assert scorer.hit_counts is None
    scorer.hidden(ids[0], None, ids[0].new_tensor([8]))
    assert scorer.hit_counts == once is not None


def test_the_command_tells_what_had_slots(asked: EvalRequest) -> None:
    flags = ["--perplexity", "shipped:heldout", "--context", "32", "--windows", "2"]
    done = sparsepack("eval", asked.subject, *flags, "--backend", "reference", "--cached", 0.3)
    assert done.exit_code == 0, done.output
    assert "% of the active neurons" in done.stdout
    assert "30 % of the neurons with slots, slow" in done.stderr


def test_what_transformers_does_not_leave_out_is_not_shown_as_nothing(asked: EvalRequest) -> None:
    flags = ["--perplexity", "shipped:heldout", "--context", "32", "--windows", "2"]
    told = succeeds("eval", asked.subject, *flags)
    assert "skipped: not counted, transformers computes inactive neurons like all others" in told
    assert _skipped(told) == ["-", "-"]
    counted = succeeds("eval", asked.subject, *flags, "--backend", "reference")
    assert "not counted" not in counted
    overall, of_sparse_sites = (float(cell.removesuffix("%")) for cell in _skipped(counted))
    assert 0 < overall < of_sparse_sites


def _skipped(told: str) -> list[str]:
    (row,) = (line for line in told.splitlines() if "heldout" in line)
    return [cell.strip() for cell in row.split("|")][-3:-1]


def test_a_card_too_small_for_the_model_measures_it_dense_within_its_budget(asked: EvalRequest) -> None:
    engine = EngineOptions(vram="8GB")
    request = replace(asked, runtime="cuda", device="cuda", engine=engine, protocol="dense")
    request.check()
    with pytest.raises(UserError, match="vram: transformers gives neurons no slots; give --backend cuda"):
        replace(request, runtime="transformers").check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "transformers"}, "cached: transformers gives neurons no slots; give --backend reference or cpu"),
        ({"protocol": "dense"}, "cached: protocol dense decodes nothing that slots could serve; take decode or all"),
    ],
)
def test_slots_that_serve_nobody_are_refused(asked: EvalRequest, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(replace(asked, engine=SOME, **changes))


def test_a_model_without_neurons_is_refused_before_anything_runs(tmp_path: Path) -> None:
    pack(PackRequest("shipped:tiny", tmp_path / "m.gguf"))
    request = EvalRequest(str(tmp_path / "m.gguf"), perplexity=("shipped:heldout",), runtime="cpu", engine=SOME)
    with pytest.raises(UserError, match="cached: the model's MLPs are not stored by neurons"):
        evaluate(request)
    with pytest.raises(UserError, match="policy static: it does nothing without cached"):
        EngineOptions(policy="static")
