"""`eval` with a held share: off unless asked for, told where it is on, refused where there is none."""

from dataclasses import replace
from pathlib import Path

import pytest
from artifacts_for_tests import write_zigzag
from commands_for_tests import fails, sparsepack, succeeds

from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.options import EngineOptions

HELD = EngineOptions(hold=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, half of it skipped on its calibration text."""
    folder = tmp_path_factory.mktemp("held")
    succeeds(
        "calibrate", "shipped:tiny", "--text", "shipped:train", "-o", folder / "cal", "--samples", 8, "--context", 64
    )
    pack(PackRequest("shipped:tiny", folder / "m.gguf", calibration=folder / "cal", allocation=AllocationOptions(0.5)))
    return folder / "m.gguf"


def asked(artifact: Path, **changes: object) -> EvalRequest:
    texts = {"perplexity": ("shipped:heldout",), "context": 256, "windows": 4, "runtime": "cpu"}
    return EvalRequest(str(artifact), **{**texts, **changes})  # type: ignore[arg-type]


def test_a_held_share_is_nearer_to_the_target_and_is_told(artifact: Path) -> None:
    plain = evaluate(asked(artifact))["perplexity"][0]
    held = evaluate(asked(artifact, engine=HELD))["perplexity"][0]
    assert (plain["held"], held["held"]) == (False, True)
    off = [abs(row["realised_sparsity"]["of_sparse_sites"] - 0.5) for row in (plain, held)]
    assert off[1] < 0.01
    assert off[1] <= off[0]
    assert held["perplexity"]["value"] == pytest.approx(plain["perplexity"]["value"], rel=0.1)


def test_backends_agree_on_a_trained_model(artifact: Path) -> None:
    small = {"context": 64, "windows": 1, "engine": HELD}
    rows = [evaluate(asked(artifact, runtime=name, **small))["perplexity"][0] for name in ("reference", "cpu")]
    shares = [row["realised_sparsity"]["of_sparse_sites"] for row in rows]
    assert shares[0] == pytest.approx(shares[1], abs=2e-3)


def test_commands_take_it_and_say_so(artifact: Path) -> None:
    text = ("--perplexity", "shipped:heldout", "--windows", 1)
    told = sparsepack("eval", artifact, *text, "--context", 64, "--backend", "cpu", "--hold")
    assert "decode, held" in told.stdout
    assert "50 % held" in told.stderr
    assert "50 % held" in sparsepack("generate", artifact, "--prompt", "The", "-n", 4, "--hold").stderr
    assert "50 % held" in succeeds("bench", artifact, "-p", 0, "-n", 8, "-r", 1, "--hold")


def test_where_nothing_is_held_that_is_said_in_a_line(artifact: Path, tmp_path: Path) -> None:
    write_zigzag(open_checkpoint("shipped:tiny"), {}, tmp_path / "dense.gguf")
    told = ("eval", artifact, "--perplexity", "shipped:heldout", "--hold")
    assert "--hold: it does nothing with --backend transformers" in fails(*told)
    assert "hold: protocol dense skips nothing whose share" in fails(*told, "--backend", "cpu", "--protocol", "dense")
    assert "--hold: it does nothing with --dense" in fails("generate", artifact, "--prompt", "a", "--hold", "--dense")
    for verb in (("generate", "--prompt", "a"), ("bench",), ("serve",)):
        line = fails(verb[0], tmp_path / "dense.gguf", *verb[1:], "--hold")
        assert "hold: the model has no thresholds that could be scaled" in line
    with pytest.raises(UserError, match="hold: transformers takes thresholds as they are; give --backend reference or"):
        evaluate(replace(asked(artifact, engine=HELD), runtime="transformers"))
