"""How a command ends: 0, 1 for what failed, 2 for what was asked wrongly, 130 for Ctrl-C; never with a traceback."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands_for_tests import fails
from forks_for_tests import Fork
from models_for_tests import make_model

from sparsepack.cli import main
from sparsepack.formats.table import FORMATS

MISSING = {
    "calibrate": ("calibrate", "NONE", "--text", "shipped:train", "-o", "OUT"),
    "calibrate merge": ("calibrate", "merge", "NONE", "NONE", "-o", "OUT"),
    "thresholds": ("thresholds", "shipped:tiny", "--calibration", "NONE", "--sparsity", "0.5", "-o", "OUT"),
    "pack": ("pack", "NONE", "-o", "OUT"),
    "inspect": ("inspect", "NONE"),
    "verify": ("verify", "NONE"),
    "verify --against": ("verify", "NONE", "--against", "shipped:tiny"),
    "eval": ("eval", "NONE", "--perplexity", "shipped:heldout"),
    "bench": ("bench", "NONE"),
    "tune": ("tune", "NONE"),
    "generate": ("generate", "NONE", "--prompt", "a"),
    "run": ("run", "NONE"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_file_is_a_mistake_in_what_was_asked(case: str, tmp_path: Path) -> None:
    places = {"NONE": tmp_path / "none.gguf", "OUT": tmp_path / "out"}
    assert "none.gguf" in fails(*(places.get(word, word) for word in MISSING[case]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["inspect", "verify", "bench", "generate", "pack --calibration"])
def test_a_name_that_the_system_refuses_is_not_told_as_missing(case: str) -> None:
    name = "n" * 300
    commands = MISSING | {"pack --calibration": ("pack", "shipped:tiny", "-o", "OUT", "--calibration", "NONE")}
    line = fails(*(name if word == "NONE" else word for word in commands[case]))
    assert f"{name}: cannot be read (File name too long); expected " in line


def test_a_mistake_names_the_verb_however_the_program_was_called() -> None:
    for program, asked in ((None, "xyzzy"), ("python -m sparsepack.cli", "xyzzy")):
        told = CliRunner().invoke(main, [asked], prog_name=program).stderr
        assert told.startswith("sparsepack: xyzzy: no such verb; ")
        assert told.endswith("; see sparsepack --help\n")
    told = CliRunner().invoke(main, ["inspect", "--zzz"], prog_name="python -m sparsepack.cli").stderr
    assert told == "sparsepack: inspect: No such option '--zzz'; see sparsepack inspect --help\n"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("case", ["calibrate", "pack", "eval --json", "run -w"])
def test_a_place_that_cannot_be_written_is_one_line_before_any_work(case: str) -> None:
    commands = {
        "calibrate": ("calibrate", "shipped:tiny", "--text", "shipped:train", "-o", "/proc/x"),
        "pack": ("pack", "shipped:tiny", "-o", "/proc/x"),
        "eval --json": ("eval", "shipped:tiny", "--perplexity", "shipped:heldout", "--json", "/proc/x"),
        "run -w": ("run", "quickstart", "-w", "/proc/x"),
    }
    line = fails(*commands[case])
    assert re.match(r"sparsepack: /proc/x: (cannot be written|no folder can be made there) \(", line)


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as errors:
        run = Fork(["run", "quickstart", "-w", str(tmp_path / "work")], {**os.environ}, None, errors)
    with os.fdopen(reading) as lines:
        assert "running" in next(line for line in lines if "calibrate" in line)
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        said = lines.read()
    assert run.wait(60) == 130
    assert "sparsepack: interrupted" in said
    assert "Traceback" not in said


@pytest.fixture
def notok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model named `notok`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return make_model(tmp_path / "notok")


def test_no_line_begins_twice_with_the_same_name(notok: Path) -> None:
    whole = shutil.copytree(notok, notok.parent / "whole")
    config = json.loads((notok / "config.json").read_text())

    def lost() -> None:
        for path in notok.glob("tokenizer*"):
            path.unlink()

    def larger() -> None:
        shutil.copytree(whole, notok, dirs_exist_ok=True)
        tokenizer = json.loads((notok / "tokenizer.json").read_text())
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": 5000, "content": "<more>", "special": False}
        )
        (notok / "tokenizer.json").write_text(json.dumps(tokenizer))

    def odd() -> None:
        shutil.copytree(whole, notok, dirs_exist_ok=True)
        (notok / "config.json").write_text(json.dumps(config | {"hidden_act": "tanh"}))

    def rotary() -> None:
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
        (notok / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))

    for damage in (lost, larger, odd, rotary):
        damage()
        for kind in FORMATS:
            if damage is odd and kind == "planes-q6_p":  # transformers runs it, with whatever activation
                continue
            line = fails("pack", "notok", "--format", kind, "-o", "m.gguf")
            assert "notok" in line or "give --calibration" in line
            assert not re.match(r"sparsepack: (.+?): \1: ", line), line


def test_a_library_that_finds_no_memory_to_be_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails_to_load(path: Path) -> None:
        raise OSError("libgomp.so.1: failed to map segment from shared object")

    monkeypatch.setattr("sparsepack.cli.commands.inspect.detect_kind", fails_to_load)
    (tmp_path / "m.gguf").touch()
    assert "out of memory" in fails("inspect", str(tmp_path / "m.gguf"), code=1)
