"""`--devices`: which workers are started, and what is said when one of them ends early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sparsepack.cli.messages.errors import Verbs
from sparsepack.errors import WorkersError
from sparsepack.workers import launch as module
from sparsepack.workers.environment import DONE
from sparsepack.workers.launch import devices_of, launch, with_device


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ("cuda:0", "cuda:1")),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda:1, cuda:1", ("cuda:1", "cuda:1")),
        ("cpu", ("cpu",)),
    ],
)
def test_devices_are_between_commas(text: str, devices: tuple[str, ...]) -> None:
    assert devices_of(text) == devices


@pytest.mark.parametrize("text", ["", "0,", ",", "cpu,,cpu"])
def test_what_lists_no_devices_is_refused(text: str) -> None:
    with pytest.raises(WorkersError, match="expected devices between commas"):
        devices_of(text)


def test_devices_of_two_kinds_are_refused() -> None:
    with pytest.raises(WorkersError, match="cpu and cuda round differently"):
        devices_of("0,cpu")


@pytest.mark.parametrize("given", [["--devices", "0,1"], ["--devices=0,1"]])
def test_each_worker_has_the_command_with_its_device(given: list[str]) -> None:
    arguments = ["calibrate", "m", *given, "-o", "c"]
    assert with_device(arguments, "cuda:1") == ["calibrate", "m", "--device", "cuda:1", "-o", "c"]


def _workers(monkeypatch: pytest.MonkeyPatch, code: str) -> list[Any]:
    """Workers that run `code` in the place of sparsepack; returns a list of those that were started."""
    popen, started = subprocess.Popen, list[Any]()

    def start(command: object, **rest: Any) -> Any:
        started.append(popen([sys.executable, "-S", "-c", code], **rest))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    return started


def test_workers_that_end_well_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _workers(monkeypatch, "import os; open(os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])")
    assert launch(["x"], ["cpu"] * 3) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_a_killed_worker_ends_all_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '2' else time.sleep(600)"
    started = _workers(monkeypatch, code)
    assert launch(["x"], ["cpu"] * 3) == 1
    ended = [signal.Signals(-worker.returncode).name for worker in started]
    assert ended == ["SIGTERM", "SIGTERM", "SIGKILL"], "the others were not waited for"
    said = capfd.readouterr().err
    assert said.startswith("sparsepack: worker 2 of 3 (cpu) was killed by SIGKILL")
    assert said.count("\n") == 1


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_killed_when_its_work_is_done_takes_nothing_away(
    killed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one writes after that, as the first worker of `eval` does."""
    monkeypatch.chdir(tmp_path)
    code = (
        f"import os, pathlib, time\nif os.environ['RANK'] == '{killed}':\n"
        f" pathlib.Path(os.environ['{DONE}']).touch()\n os.kill(os.getpid(), 9)\n"
        "time.sleep(0.5)\npathlib.Path('result').touch()"
    )
    _workers(monkeypatch, code)
    assert launch(["x"], ["cpu"] * 2) == 0
    assert Path("result").exists()
    expected = f"sparsepack: note: worker {killed} of 2 (cpu) was killed by SIGKILL when its work was done\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize("well", [True, False])
def test_a_command_says_that_it_is_done_where_it_ends_well(
    well: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work() -> None:
        if not well:
            raise WorkersError("no such card")

    monkeypatch.setenv(DONE, str(tmp_path / "done"))
    verbs = Verbs(commands={"work": click.Command("work", callback=work)})
    assert CliRunner().invoke(verbs, ["work"]).exit_code == (0 if well else 2)
    assert (tmp_path / "done").exists() == well


@pytest.mark.parametrize(("others", "told"), [("time.sleep(600)", 1), ("sys.exit(2)", 0)])
def test_the_line_of_a_worker_that_fails_is_told_unless_the_first_one_has_said_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], others: str, told: int
) -> None:
    code = (
        "import os, sys, time\nif os.environ['RANK'] == '1':\n"
        f" print('noise\\nsparsepack: no such card', file=sys.stderr)\n sys.exit(2)\n{others}"
    )
    _workers(monkeypatch, code)
    assert launch(["x"], ["cuda:0", "cuda:9"]) == 2
    said = capfd.readouterr().err
    assert said == told * "sparsepack: worker 1 of 2 (cuda:9) failed: no such card\n"


def test_none_is_left_when_the_one_that_started_them_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _workers(monkeypatch, "import os, time; open(os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(600)")

    def interrupted(seconds: float) -> None:
        time.sleep(seconds)
        if len([path for path in tmp_path.iterdir() if path.read_text()]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_END", 0.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=interrupted))
    assert launch(["x"], ["cpu"] * 2) == 128 + signal.SIGINT
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
