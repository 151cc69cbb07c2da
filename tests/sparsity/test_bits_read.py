"""Commands on a file with planes say how many bits of a weight are read beside the target, all in one way."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.cli.app import main
from sparsepack.formats.inspect import describe
from sparsepack.formats.open import read_packed
from sparsepack.formats.table import FORMATS
from sparsepack.models.activity import Skipped
from sparsepack.packing import PackRequest, pack
from sparsepack.packing_score import warning_of
from sparsepack.runtime.engine import Engine

FORMAT = "zigzag-q6_p"
BITS = FORMATS[FORMAT].bits
ALL = f"{BITS:.2f} bits read"
READ = re.compile(r"(\d\.\d\d) bits read \(target 3\.40\)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text) -> Path:
    """A random model `m`, its calibration `c`, `p.gguf`, of which a token reads 3.4 bits, and `whole.gguf`."""
    folder = tmp_path_factory.mktemp("bits")
    (folder / "t.txt").write_text("a b c d e f " * 200)
    calibrate(str(make_model(folder / "m", "qwen2")), text, folder / "c", CalibrateOptions(context=64, samples=8))
    run("pack", folder / "m", "--format", FORMAT, "--calibration", folder / "c", "--bits", 3.4, "-o", folder / "p.gguf")
    pack(PackRequest(str(folder / "m"), folder / "whole.gguf", FORMAT, score=False))
    return folder


def run(*arguments: object) -> str:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def result(*arguments: object) -> str:
    """What a command writes to standard output alone."""
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def bits_of(text: str) -> float:
    """The bits that are told; the target is beside them."""
    found = READ.search(text)
    assert found, text
    return float(found[1])


def test_pack_inspect_and_verify_say_what_is_expected(folder: Path) -> None:
    again = ("--format", FORMAT, "--calibration", folder / "c", "--bits", 3.4, "--no-score", "--overwrite")
    packed = run("pack", folder / "m", *again, "-o", folder / "again.gguf")
    for said in (packed, run("inspect", folder / "p.gguf"), run("verify", folder / "p.gguf")):
        assert bits_of(said) == pytest.approx(3.4, abs=0.02)
    told = json.loads(result("inspect", folder / "p.gguf", "--json", "-"))["bits_read"]
    assert told["target"] == pytest.approx(3.4)
    assert told["expected"] == pytest.approx(3.4, abs=0.02)


def test_the_card_says_what_is_expected(folder: Path) -> None:
    said = run("card", folder / "p.gguf")
    assert bits_of(said) == pytest.approx(3.4, abs=0.02)
    assert "sites that may be sparse" not in said
    assert "show the bytes of each site's Q6_P" in said


def test_what_reads_everything_has_no_target(folder: Path) -> None:
    assert describe(folder / "whole.gguf")["bits_read"] is None
    assert "bits read" not in run("inspect", folder / "whole.gguf") + run("verify", folder / "whole.gguf")
    packed = read_packed(folder / "whole.gguf")
    assert packed.describe_skipped(Skipped(0, 0)) == ALL
    assert ALL not in Engine(packed, context=64, backend="reference").description


def test_eval_and_its_json_say_what_was_read(folder: Path) -> None:
    evaluate = ("eval", folder / "p.gguf", "--perplexity", folder / "t.txt", "--context", 64, "--windows", 4)
    said = run(*evaluate)
    assert "of each weight" in said
    assert "of sparse sites" not in said
    found = json.loads(result(*evaluate, "--json", "-"))["perplexity"][0]["realised_sparsity"]
    assert found["bits"] == BITS
    assert found["bits_read"] == pytest.approx(BITS * (1 - found["overall"]))
    assert bits_of(said) == pytest.approx(found["bits_read"], abs=0.006)
    dense = run(*evaluate, "--protocol", "dense")
    assert ALL in dense
    assert "target" not in dense


def test_generate_says_it_with_and_without_the_controller(folder: Path) -> None:
    generate = ("generate", folder / "p.gguf", "--prompt", "a b c", "-n", 12)
    said = run(*generate)
    assert "target 3.40 bits read" in said
    assert 1 < bits_of(said) < BITS
    assert "held at 3.40 bits read" in run(*generate, "--hold")
    record = json.loads(result(*generate, "--json", "-").splitlines()[-1])
    assert record["bits_read"] == pytest.approx(BITS * (1 - record["skipped"]))
    dense = run(*generate, "--dense")
    assert f"{ALL} of each" in dense
    assert "target" not in dense


def test_hold_without_thresholds_names_the_option(folder: Path) -> None:
    done = CliRunner().invoke(main, ["generate", str(folder / "whole.gguf"), "--hold", "--prompt", "a"])
    assert done.exit_code == 2
    assert "pack it with --calibration and --bits" in done.output


def test_bench_says_it_of_each_mode(folder: Path) -> None:
    bench = ("bench", folder / "p.gguf", "-p", 4, "-n", 8, "-r", 1)
    said = run(*bench)
    assert f"{ALL} |" in said
    assert 1 < bits_of(said) < BITS
    _, dense, sparse = json.loads(result(*bench, "--json", "-"))["tests"]
    assert dense["bits_read"] == BITS
    assert sparse["bits_read"] == pytest.approx(BITS * (1 - sparse["realised_sparsity"]))


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"bits": 0.5}, "more --bits than 0.5"),
        ({"kl": 0.1}, "less than --kl 0.1"),
        ({"loss": "9%"}, "less than --loss 9%"),
    ],
)
def test_a_warning_names_the_option_that_leaves_bits_unread(option: dict[str, Any], advice: str) -> None:
    request = PackRequest("m", Path("o.gguf"), FORMAT, Path("c"), **option).settled()
    score = {name: {"perplexity_ratio": {"value": ratio}} for name, ratio in (("dense", 1.0), ("decode", 1.08))}
    warning = warning_of(score, request, torch.float32)
    assert warning
    assert warning.endswith(f"most of it by leaving bits unread; take {advice}")
