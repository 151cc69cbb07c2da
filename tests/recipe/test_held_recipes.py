"""Recipes with a held share."""

from pathlib import Path

import pytest
from recipes_for_tests import TINY, refused, write_recipe

from sparsepack.recipe import run_recipe

HELD = {
    "eval": {**TINY["eval"], "backend": "cpu", "hold": True},
    "generate": {**TINY["generate"], "hold": True},
    "bench": {"prompt": 0, "generate": 4, "repetitions": 1, "hold": True},
}
NOTHING = "nothing is skipped whose share could be held; expected activation_sparsity.sparsity above 0"


@pytest.mark.long
def test_the_share_is_held_where_tokens_skip(tmp_path: Path) -> None:
    outcome = run_recipe(write_recipe(tmp_path, **HELD), work=tmp_path / "work")
    rows = [row for evaluation in outcome.report["evaluations"] for row in evaluation["perplexity"]]
    assert {row["protocol"]: row["held"] for row in rows} == {"decode": True, "dense": False}
    assert "50 % held" in outcome.report["bench"]["runtime"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("eval.backend=transformers", "eval.hold: transformers takes thresholds as they are; expected eval.backend"),
        ("eval.protocols=dense", "eval.hold: nothing is skipped whose share could be held; expected protocol decode"),
        ("activation_sparsity=null eval=null bench=null", f"generate.hold: {NOTHING}"),
        ("activation_sparsity.sparsity=0 eval=null generate=null", f"bench.hold: {NOTHING}"),
    ],
)
def test_a_share_that_nobody_skips_is_told(tmp_path: Path, changes: str, message: str) -> None:
    assert message in refused(write_recipe(tmp_path, **HELD, gates=None), *changes.split())
