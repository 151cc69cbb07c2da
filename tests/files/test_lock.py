"""One process at a time works on an output."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepack.errors import OutputError
from sparsepack.files import lock
from sparsepack.files.lock import locked, remove_lock
from sparsepack.workers.state import state_beside

_HOLDS = """
import sys, time
from pathlib import Path
from sparsepack.files.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(output: Path) -> "subprocess.Popen[str]":
    """Another process that works on the output until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDS, str(output)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_says_in_one_line_who_works_on_the_output_and_since_when(tmp_path: Path) -> None:
    other = _holder(tmp_path / "cal")
    try:
        with pytest.raises(OutputError) as refused, state_beside(tmp_path / "cal"):
            pass
    finally:
        other.kill()
        other.communicate()
    who = rf"/cal: process {other.pid}, begun \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d, is working on it; wait .* another name"
    assert re.search(who, str(refused.value))
    assert "\n" not in str(refused.value)


def test_the_lock_of_a_killed_process_blocks_nobody_and_is_removed(tmp_path: Path) -> None:
    other = _holder(tmp_path / "cal")
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert [entry.name for entry in tmp_path.iterdir()] == [".cal.lock"]
    with state_beside(tmp_path / "cal"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_left_lock_is_removed_but_not_a_held_one(tmp_path: Path) -> None:
    (tmp_path / ".a.lock").write_text("[" * 10)
    remove_lock(tmp_path / "a")
    remove_lock(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a"):
        remove_lock(tmp_path / "a")
        assert [entry.name for entry in tmp_path.iterdir()] == [".a.lock"]
        with locked(tmp_path / "b"):
            pass
        (tmp_path / ".a.lock").write_text("{}")
        with pytest.raises(OutputError, match="another process is working on it"), locked(tmp_path / "a"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_its_holder_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, take = tmp_path / ".a.lock", lock._lock

    def after_removal(file: int, wait: bool) -> None:
        monkeypatch.setattr(lock, "_lock", take)
        made.unlink()  # between opening it and locking it
        take(file, wait)

    monkeypatch.setattr(lock, "_lock", after_removal)
    with locked(tmp_path / "a"):
        assert made.exists()


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    said = r"out: cannot be written \(No such file or directory"
    with pytest.raises(OutputError, match=said), locked(tmp_path / "none" / "out"):
        pass
