"""A start of vLLM that hangs is told apart from a slow one."""

import sys

import pytest
import vllm_for_tests
from vllm_for_tests import Hangs, started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="by /proc")]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_for_tests, "STILL", 2.0)


def test_a_slow_start_is_waited_for() -> None:
    """It works for longer than a start may stand still, by itself and in a child."""
    works = "import time\nend = time.process_time() + 3\nwhile time.process_time() < end: pass\n"
    code = f"import subprocess, sys\n{works}subprocess.run([sys.executable, '-c', {works!r}])\nprint('done')"
    run = started(["-c", code], {})
    assert (run.returncode, run.stdout) == (0, "done\n")


def test_a_start_that_hangs_says_so_and_where() -> None:
    code = (
        "import threading\nprint('loading', flush=True)\ndef wait_for_ever(): threading.Event().wait()\nwait_for_ever()"
    )
    with pytest.raises(Hangs, match=r"used no processor for 2 s: loading\n(.|\n)*in wait_for_ever"):
        started(["-c", code], {})


def test_a_start_that_spins_without_a_word_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_for_tests, "SILENT", 2.0)
    with pytest.raises(Hangs, match="written nothing for 2 s"):
        started(["-c", "while True: pass"], {})


def test_an_end_is_no_hang() -> None:
    run = started(["-c", "import os, sys; print(os.environ['A'], file=sys.stderr); sys.exit(3)"], {"A": "b"})
    assert (run.returncode, run.stdout, run.stderr) == (3, "", "b\n")
