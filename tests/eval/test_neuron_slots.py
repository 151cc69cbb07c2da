"""`eval` of models by neurons: what is skipped, and where that is not known, that is said."""

from dataclasses import replace

import pytest
from artifacts_for_tests import tiny_by_neurons
from commands_for_tests import succeeds

from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.runtime.options import EngineOptions

SOME = EngineOptions(cached=0.3)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> EvalRequest:
    """Three windows by the tiny model by neurons, as if it had been trained with ReLU."""
    path = tiny_by_neurons(tmp_path_factory.mktemp("slots"))
    texts = {"perplexity": ("shipped:heldout",), "context": 32, "windows": 3}
    return EvalRequest(str(path), runtime="reference", **texts)


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
        ({"runtime": "transformers"}, "cached: transformers gives neurons no slots; give --backend cuda"),
        ({"protocol": "dense"}, "cached: protocol dense decodes nothing that slots could serve; take decode or all"),
    ],
)
def test_slots_that_serve_nobody_are_refused(asked: EvalRequest, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(replace(asked, engine=SOME, **changes))


def test_a_policy_without_slots_is_refused() -> None:
    with pytest.raises(UserError, match="policy static: it does nothing without cached"):
        EngineOptions(policy="static")
