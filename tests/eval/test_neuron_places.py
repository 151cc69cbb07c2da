"""`eval` of models by neurons: what is skipped and what places serve, and where neither is known, that is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from artifacts_for_tests import tiny_by_neurons
from click.testing import CliRunner

from sparsepack.artifacts.open import read_packed
from sparsepack.cli import main
from sparsepack.errors import UserError
from sparsepack.eval.engine_subject import EngineScorer, open_engine_subject
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import read_text
from sparsepack.models.windows import rolling_windows
from sparsepack.pack import PackRequest, pack
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.decoder import Places
from sparsepack.runtime.hybrid.options import PlacesOptions
from sparsepack.runtime.hybrid.served import Served

SOME = PlacesOptions(0.3)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> EvalRequest:
    """Three windows by the tiny model by neurons, as if it had been trained with ReLU."""
    path = tiny_by_neurons(tmp_path_factory.mktemp("places"))
    texts = {"perplexity": ("shipped:heldout",), "context": 32, "windows": 3}
    return EvalRequest(str(path), runtime="reference", **texts)


def test_places_change_nothing_but_what_is_told_of_them(asked: EvalRequest) -> None:
    (plain,) = evaluate(asked)["perplexity"]
    (placed,) = evaluate(replace(asked, places=SOME))["perplexity"]
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
    (found,) = evaluate(replace(asked, places=PlacesOptions(0.3, policy), protocol="all"))["perplexity"]
    packed = read_packed(Path(asked.subject))
    engine = Engine(packed, context=32, backend="reference", places=Places(0.3, policy))
    total = Served()
    subject = open_engine_subject(asked.subject, "reference")
    for ids in rolling_windows(subject.tokenizer, read_text("shipped:heldout"), 32, 3)[0].tolist():
        engine.reset()
        for id in ids:
            engine.step(id)
        assert engine.served is not None
        total += engine.served
    assert found["served"] == total.to_json()


def test_counts_begin_anew_with_each_text(asked: EvalRequest) -> None:
    scorer = EngineScorer(read_packed(Path(asked.subject)), "reference", places=SOME)
    assert scorer.served is None
    ids = rolling_windows(
        open_engine_subject(asked.subject, "reference").tokenizer, read_text("shipped:heldout"), 16, 1
    )
    scorer.hidden(ids[0], None, ids[0].new_tensor([8]))
    once = scorer.served
    scorer.reset()
    assert scorer.served is None
    scorer.hidden(ids[0], None, ids[0].new_tensor([8]))
    assert scorer.served == once is not None


def test_the_command_tells_what_had_places(asked: EvalRequest) -> None:
    flags = ["--perplexity", "shipped:heldout", "--context", "32", "--windows", "2"]
    done = CliRunner().invoke(main, ["eval", asked.subject, *flags, "--backend", "reference", "--cached", "0.3"])
    assert done.exit_code == 0, done.output
    assert "% of the active neurons had places" in done.stdout
    assert "30 % of the neurons with places, slow" in done.stderr


def test_what_transformers_does_not_leave_out_is_not_shown_as_nothing(asked: EvalRequest) -> None:
    flags = ["--perplexity", "shipped:heldout", "--context", "32", "--windows", "2"]
    done = CliRunner().invoke(main, ["eval", asked.subject, *flags])
    assert done.exit_code == 0, done.output
    assert "skipped: not counted, transformers computes inactive neurons like all others" in done.stdout
    assert _skipped_and_target(done.stdout) == ["-", "-"]
    counted = CliRunner().invoke(main, ["eval", asked.subject, *flags, "--backend", "reference"])
    assert counted.exit_code == 0, counted.output
    assert "not counted" not in counted.stdout
    skipped, target = _skipped_and_target(counted.stdout)
    assert "% of sparse sites" in skipped
    assert target == "-"


def _skipped_and_target(told: str) -> list[str]:
    (row,) = (line for line in told.splitlines() if "heldout" in line)
    return [cell.strip() for cell in row.split("|")][-3:-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "transformers"}, "cached: transformers gives neurons no places; give --backend reference or cpu"),
        ({"protocol": "dense"}, "cached: protocol dense decodes nothing that places could serve; take decode or all"),
    ],
)
def test_places_that_serve_nobody_are_refused(asked: EvalRequest, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(replace(asked, places=SOME, **changes))


def test_a_model_without_neurons_is_refused_before_anything_runs(tmp_path: Path) -> None:
    pack(PackRequest("shipped:tiny", tmp_path / "m.gguf"))
    request = EvalRequest(str(tmp_path / "m.gguf"), perplexity=("shipped:heldout",), runtime="cpu", places=SOME)
    with pytest.raises(UserError, match="cached: the model's MLPs are not stored by neurons"):
        evaluate(request)
    with pytest.raises(UserError, match="policy static: nothing has places"):
        PlacesOptions(None, "static")
