"""`--devices`: which workers are started, and what is said when one of them ends early."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sparsepack.cli.messages import Commands
from sparsepack.errors import WorkersError
from sparsepack.process import python_environment, python_module
from sparsepack.workers import launch as module
from sparsepack.workers.launch import DONE, INTERRUPTED, LAUNCHED, devices_of, launch, with_device


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


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(7, None, {"2"}), (2, None, {"1"}), (7, "5", {"5"})], ids=["share", "few", "given"]
)
def test_workers_share_the_cores_unless_threads_are_given(
    cores: int, given: str | None, threads: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    _workers(monkeypatch, "import os; open(os.environ['RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])")
    assert launch(["x"], ["cpu"] * 3) == 0
    assert {path.read_text() for path in tmp_path.iterdir()} == threads


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
    verbs = Commands(commands={"work": click.Command("work", callback=work)})
    assert CliRunner().invoke(verbs, ["work"]).exit_code == (0 if well else 2)
    assert (tmp_path / "done").exists() == well
    monkeypatch.setattr(verbs.commands["work"], "callback", lambda: signal.raise_signal(signal.SIGINT))
    assert CliRunner().invoke(verbs, ["work"]).exit_code == 128 + signal.SIGINT
    assert (tmp_path / f"done{INTERRUPTED}").exists()


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

    raised: list[float] = []

    def interrupted(seconds: float) -> None:
        time.sleep(seconds)
        if not raised and len([path for path in tmp_path.iterdir() if path.read_text()]) == 2:
            raised.append(seconds)
            raise KeyboardInterrupt

    for name in ("_END", "_INTERRUPTED", "_SAVED"):
        monkeypatch.setattr(module, name, 0.5)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    assert launch(["x"], ["cpu"] * 2) == 128 + signal.SIGINT
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_is_stopped_ends_all_with_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LOST", 0.3)
    monkeypatch.setattr(module, "_END", 600.0)  # a stopped worker is not waited for
    code = f"import os, signal, time\nif os.environ['RANK'] == '{number}': os.kill(os.getpid(), signal.SIGSTOP)\n"
    started = _workers(monkeypatch, f"{code}time.sleep(600)")
    assert launch(["x"], ["cpu"] * 2) == 1
    assert [worker.returncode for worker in started][number] == -signal.SIGKILL
    said = capfd.readouterr().err
    assert said.startswith(f"sparsepack: worker {number} of 2 (cpu) has been stopped for")
    assert said.count("\n") == 1


_LAUNCHES = """
import subprocess, sys
from sparsepack.workers import launch as module
popen = subprocess.Popen
subprocess.Popen = lambda command, **rest: popen([sys.executable, "-S", "-c", sys.argv[1]], **rest)
sys.exit(module.launch(["x"], ["cpu"] * 2))
"""
_WAITS = (
    "import os, signal, sys, time\n{handler}\nopen(os.environ['RANK'] + '.new', 'w').write(str(os.getpid()))\n"
    "os.rename(os.environ['RANK'] + '.new', os.environ['RANK'])\n{stop}time.sleep(600)"
)
_SAYS = (
    "def say(*_):\n print('sparsepack: interrupted', file=sys.stderr)\n"
    f" open(os.environ[{DONE!r}] + {INTERRUPTED!r}, 'w').close()\n"  # and takes long to end
    "signal.signal(signal.SIGINT, say)"
)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", ["says so", "is stopped", "is silent"])
def test_a_signal_to_the_one_that_started_them_ends_all_with_one_line(
    ending: signal.Signals, first: str, tmp_path: Path
) -> None:
    handler = _SAYS if first == "says so" else "signal.signal(signal.SIGINT, signal.SIG_DFL)"
    stop = "os.environ['RANK'] == '0' and os.kill(os.getpid(), signal.SIGSTOP)\n" if first == "is stopped" else ""
    code = _WAITS.format(handler=handler, stop=stop)
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHES, code],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # who runs the tests by nohup ignores it
    )
    _wait_for(lambda: {path.name for path in tmp_path.iterdir()} == {"0", "1"})
    launcher.send_signal(ending)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + ending
    interrupted = first == "says so" or ending == signal.SIGINT
    assert said == f"sparsepack: {'interrupted' if interrupted else f'ended by {ending.name}'}\n"
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def _wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only there")
@pytest.mark.parametrize("stopped", [True, False])
def test_a_worker_ends_with_the_one_that_started_it_even_if_that_is_killed(stopped: bool, tmp_path: Path) -> None:
    worker = (
        "import os, signal, time\nfrom sparsepack.workers.launch import end_with_launcher\nend_with_launcher()\n"
        f"open('pid', 'w').write(str(os.getpid()))\n{'os.kill(os.getpid(), signal.SIGSTOP)' if stopped else ''}\n"
        "time.sleep(600)"
    )
    starts = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], env=os.environ | {{{LAUNCHED!r}: str(os.getpid())}})\n"
        "time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path)
    _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    process = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    _wait_for(lambda: not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z")


_PLANTED = ("click", "torch", "numpy", "typing", "sitecustomize", "usercustomize", "sparsepack", "json", "pathlib")


@pytest.mark.parametrize("path", [None, "", os.pathsep, f"{os.pathsep}/nowhere"])
def test_a_worker_imports_nothing_from_the_working_folder(
    path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path)
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import click, typing, pathlib, json'])"
    for command in (python_module("sparsepack", "--help"), [sys.executable, "-P", "-c", starts]):
        done = subprocess.run(command, env=python_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_workers_are_started_with_a_search_path_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    popen = subprocess.Popen

    def start(command: Any, **rest: Any) -> Any:
        seen.append((command, rest["env"]))
        return popen([sys.executable, "-S", "-c", ""], **rest)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    assert launch(["x"], ["cpu"] * 2) == 0
    for command, environment in seen:
        assert command[: len(python_module("sparsepack"))] == python_module("sparsepack")
        assert environment["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("name", ["sparsepack", "sparsepack.cli"])
def test_python_m_sparsepack_imports_nothing_from_the_working_folder(name: str, tmp_path: Path) -> None:
    """A folder named sparsepack excepted, which Python itself takes for the package."""
    for planted in _PLANTED:
        if planted not in ("sparsepack", "sitecustomize", "usercustomize"):
            (tmp_path / f"{planted}.py").write_text(f"open('ran', 'a').write({planted!r})")
    done = subprocess.run([sys.executable, "-m", name, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
