"""What is said on stderr while something goes on: signs of life where it is no terminal, nothing where it is quiet."""

import io
import re
import sys
import time

import pytest

from sparsepack import progress as module
from sparsepack.progress import Shorter, be_quiet, duration, going_on, progress, say


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.05)
    yield
    be_quiet(False)


def next_line(capsys) -> str:
    """The next line on stderr, which is waited for: other processes may hold the machine."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if lines := capsys.readouterr().err.splitlines():
            return lines[0]
        time.sleep(0.01)
    raise AssertionError("nothing was said")


def first_line(capsys, begins: str, before: str) -> str:
    """The first line that begins so; those before it begin otherwise: something may be told before it is known."""
    for _ in range(100):
        if (line := next_line(capsys)).startswith(begins):
            return line
        assert line.startswith(before)
    raise AssertionError(f"{begins} was not said")


def test_a_pipe_gets_a_line_now_and_then_with_what_is_done_and_the_time_left(capsys):
    with progress("working", 1200, 200) as advance:
        advance(500)
        first, second = first_line(capsys, "working: 700", "working: 200/1,200"), next_line(capsys)
    assert re.fullmatch(r"working: 700/1,200 \(58 %\) after \d s, about \d s left", first)
    assert second.startswith("working: 700/1,200")


def test_the_time_left_is_reckoned_from_what_this_run_has_done():
    work = module._Work("working", 100, 40)
    assert work.line().endswith("time left unknown as yet")
    work.advance(20)
    work.began -= 60
    assert work.line() == "working: 60/100 (60 %) after 1 min 0 s, about 2 min 0 s left"
    work.advance(50)
    assert "100/100 (100 %)" in work.line()


def test_long_work_says_so_as_soon_as_its_first_part_is_done_and_what_would_be_shorter(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("calibrating", 1024, 0, 1, Shorter("--samples", 128)) as advance:
        now[0] = 3.0
        advance()
        assert capsys.readouterr().err == "", "what gets ready in the first part is not in the others"
        now[0] = 9.0
        advance()
        said = capsys.readouterr().err
        advance(100)
    whole = "calibrating: takes about 1 h 42 min in all, by its first 9 s"
    assert said == f"{whole}; --samples 6, now 128, would take about 5 min 0 s\n"
    assert capsys.readouterr().err == ""


def test_work_whose_steps_differ_is_judged_by_its_first_block_and_short_work_says_nothing(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("thresholds", 80, 0, 8) as advance:
        now[0] = 60.0
        advance()
        now[0] = 62.0
        advance(7)
        assert capsys.readouterr().err == "thresholds: takes about 10 min 20 s in all, by its first 1 min 2 s\n"
    with progress("tracing", 10) as advance:
        now[0] = 82.0
        advance()
    assert capsys.readouterr().err == ""


def test_of_works_within_each_other_the_innermost_is_told_about(capsys):
    with going_on("outer"):
        with progress("inner", 2):
            first_line(capsys, "inner: 0/2", "outer: for")
            assert next_line(capsys).startswith("inner: 0/2")
        assert re.fullmatch(r"outer: for \d+ s now", first_line(capsys, "outer", "inner: 0/2"))
        assert next_line(capsys).startswith("outer: for")


def test_what_is_soon_over_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(module, "EVERY", 30.0)
    with progress("short", 1) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_nothing_is_said_after_the_end_even_that_of_a_failure(capsys):
    with pytest.raises(KeyError), going_on("failing"):
        raise KeyError
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""
    assert not module._going_on


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with going_on("outer"), progress("working", 4) as advance:
        advance(2)
        time.sleep(0.3)
    assert "2/4" in stream.getvalue()
    assert "after" not in stream.getvalue()
    assert "outer" not in stream.getvalue()


def test_quiet_silences_progress_and_notes(capsys):
    be_quiet(True)
    with progress("working", 4):
        time.sleep(0.1)
        say("a note")
    assert capsys.readouterr().err == ""
    be_quiet(False)
    say("a note")
    assert capsys.readouterr().err == "a note\n"


def test_durations_are_words():
    assert [duration(s) for s in (0.4, 59.4, 59.6, 3599, 7500)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "2 h 5 min",
    ]
