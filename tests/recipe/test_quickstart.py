"""`quickstart`: what is chosen for a model and a machine, and the whole way from a name to a packed file."""

import json
import re
from pathlib import Path

import pytest
from commands_for_tests import fails, succeeds

from sparsepack import quickstarting
from sparsepack.errors import PackingError
from sparsepack.formats.open import open_artifact
from sparsepack.quickstarting import Machine, QuickstartOptions, Size, choose

GB = 10**9
SMALL, LARGE = Size(135_000_000, 106_000_000), Size(8 * GB, 7 * GB)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstarting, "WINDOW", 64)
    monkeypatch.setattr(quickstarting, "MOST_WINDOWS", {"cpu": 8, "mps": 8, "cuda": 8})


def chosen(size: Size, cores: int, cpu: int | None, cuda: int | None = None, **options: object) -> tuple[str, str, int]:
    choice = choose(size, QuickstartOptions(**options), Machine(cores, {"cpu": cpu, "cuda": cuda}))
    return choice.rule.format, choice.device, choice.windows


@pytest.mark.parametrize(
    ("size", "cores", "cpu", "cuda", "expected"),
    [
        (SMALL, 16, 16 * GB, None, ("zigzag-q6_p", "cpu", 8)),
        (SMALL, 16, None, None, ("zigzag-q6_p", "cpu", 8)),  # nobody knows how much memory is free
        (SMALL, 16, 10**8, None, ("zigzag-q4_k", "cpu", 8)),
        (SMALL, 16, 16 * GB, 80 * GB, ("zigzag-q6_p", "cuda", 8)),
        (LARGE, 16, 16 * GB, 80 * GB, ("zigzag-q4_k", "cuda", 8)),
        (LARGE, 16, 16 * GB, 3 * GB, ("zigzag-q4_k", "cpu", 8)),
        (LARGE, 1, 16 * GB, None, ("zigzag-q4_k", "cpu", 0)),
    ],
)
def test_format_and_device_follow_size_cores_and_memory(
    size: Size, cores: int, cpu: int | None, cuda: int | None, expected: tuple[str, str, int]
) -> None:
    assert chosen(size, cores, cpu, cuda) == expected


def test_a_gpu_without_room_is_named() -> None:
    choice = choose(LARGE, QuickstartOptions(), Machine(16, {"cpu": 16 * GB, "cuda": 3 * GB}))
    assert "not on the GPU: the file does not fit its free memory" in choice.reasons


def test_the_largest_model_that_fits_is_one_that_is_not_refused() -> None:
    largest = choose(SMALL, QuickstartOptions(), Machine(16, {"cpu": 4 * GB})).largest
    assert largest is not None
    assert chosen(Size(int(largest), int(largest)), 16, 4 * GB)[0] == "zigzag-q4_k"
    with pytest.raises(PackingError, match="memory are free"):
        chosen(Size(int(1.01 * largest), int(largest)), 16, 4 * GB)


def test_a_text_that_is_given_is_calibrated_on_however_long_it_takes() -> None:
    assert chosen(LARGE, 1, 16 * GB, text=("t.txt",)) == ("zigzag-q4_k", "cpu", quickstarting.FEWEST_WINDOWS)


def test_a_model_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(PackingError, match=r"8.0 billion weights take 4.5 GB packed, and 4.0 GB of memory are free"):
        chosen(LARGE, 16, 4 * GB)


def test_a_name_becomes_a_packed_file_and_a_second_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = succeeds("quickstart", "shipped:tiny")
    (text,) = (tmp_path / "work" / "tiny").glob("text-*.jsonl")
    file = text.with_name("model.gguf")
    manifest = open_artifact(file).manifest
    assert "held out of text that the model wrote itself" in said
    assert re.search(r"tokens/s writing at 4\.\d bits read, \d+\.\d\d times as fast as reading all bits", said)
    assert "sparsepack generate work/tiny/model.gguf --prompt" in said  # this model has no chat template
    assert manifest["recipe"]["calibrate"]["text"] == ["work/tiny/" + text.name]
    assert not text.with_name("writer.gguf").exists()

    took = json.loads(text.with_name("report.json").read_text())["quickstart"]
    assert took["seconds"] > took["text"]["seconds"] > 0
    assert took["processor_seconds"] > took["text"]["processor_seconds"] > 0
    assert took["predicted_seconds"] > 0

    before = [file.stat().st_mtime_ns, text.stat().st_mtime_ns]
    report = json.loads(succeeds("quickstart", "shipped:tiny", "--json", "-"))
    assert {stage["status"] for stage in report["stages"]} == {"up to date"}
    assert report["quickstart"]["text"] is None
    assert [file.stat().st_mtime_ns, text.stat().st_mtime_ns] == before


def test_weights_are_rounded_where_calibration_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstarting, "SECONDS", 1e-6)
    said = succeeds("quickstart", "shipped:tiny", "-o", tmp_path / "w")
    assert "not measured: no text is held out" in said
    assert not [*(tmp_path / "w").glob("text-*")]


def test_mistakes_are_one_line_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such file" in fails("quickstart", "./missing.gguf")
    assert "no such file" in fails("quickstart", "shipped:tiny", "--text", "missing.txt")
    other = tmp_path / "work" / "tiny"
    other.mkdir(parents=True)
    (other / "model.gguf").write_text("somebody's")
    assert "no recipe made this file" in fails("quickstart", "shipped:tiny")
    assert [path.name for path in other.iterdir()] == ["model.gguf"]
