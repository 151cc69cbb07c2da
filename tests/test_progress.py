"""What is said on stderr while something goes on: signs of life where it is no terminal, nothing where it is quiet."""

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest

from sparsepack import progress as module
from sparsepack.progress import Shorter, activity, be_quiet, duration, progress, say


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "FIRST", 0.05)
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


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time in seconds, which a test sets."""
    time_now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time_now[0]))
    return time_now


def _worked(work: module._Work, now: list[float], seconds: list[float], steps: int = 1) -> list[str]:
    """The line after each of some steps, which take these seconds."""
    lines = []
    for each in seconds:
        now[0] += each
        work.advance(steps)
        lines.append(work.line())
    return lines


def test_a_pipe_gets_a_line_now_and_then_with_what_is_done(capsys):
    with progress("working", 1200, 200) as advance:
        advance(500)
        first, second = first_line(capsys, "working: 700", "working: 200/1,200"), next_line(capsys)
    assert re.fullmatch(r"working: 700/1,200 \(58 %\) after \d s", first)
    assert second.startswith("working: 700/1,200")


def test_the_time_left_is_reckoned_from_what_this_run_has_done(now):
    work = module._Work("working", 100, 40)
    lines = _worked(work, now, [60, 20, 20, 20], steps=10)
    assert lines[-1] == "working: 80/100 (80 %) after 2 min 0 s, about 40 s left"
    now[0] += 10
    assert work.line() == "working: 80/100 (80 %) after 2 min 10 s, about 30 s left"
    work.advance(30)
    assert "100/100 (100 %)" in work.line()


def test_no_time_is_said_to_be_left_before_the_pace_is_steady(now, capsys):
    """A first unit in which libraries get ready would make minutes of seconds."""
    lines = _worked(module._Work("calibrating", 80), now, [10.5] + 79 * [0.35])
    told = [re.search(r"about (.*) left", line) for line in lines]
    first = next(number for number, found in enumerate(told) if found)
    assert first * 0.35 >= 10
    for number, found in list(enumerate(told))[first:]:
        assert found
        assert abs(int(found[1].removesuffix(" s")) - (79 - number) * 0.35) <= 1
    lines = _worked(module._Work("growing slower", 1000), now, [1.1**number for number in range(60)])
    assert not any("left" in line for line in lines)
    assert capsys.readouterr().err == ""


def test_no_time_is_said_to_be_left_where_a_unit_takes_longer_than_those_before(now):
    """Gradients take longer than the forward passes that are counted with them."""
    work = module._Work("fisher information", 60)
    assert "about" in _worked(work, now, 30 * [0.5])[-1]
    now[0] += 15
    assert work.line() == "fisher information: 30/60 (50 %) after 30 s"


def test_long_work_says_so_when_its_pace_is_known_and_what_would_be_shorter(capsys, now):
    with progress("calibrating", 1024, 0, 1, Shorter("--samples", 128)) as advance:
        for seconds in (3.0, 9.0):
            now[0] = seconds
            advance()
            assert capsys.readouterr().err == "", "what gets ready in the first part is not in the others"
        now[0] = 15.0
        advance()
        said = capsys.readouterr().err
        advance(100)
    whole = "calibrating: takes about 1 h 42 min in all, by its first 15 s"
    assert said == f"{whole}; --samples 6, now 128, would take about 5 min 0 s\n"
    assert capsys.readouterr().err == ""


def test_work_whose_steps_differ_is_judged_by_blocks_and_short_work_says_nothing(capsys, now):
    with progress("thresholds", 80, 0, 8) as advance:
        for block in range(3):
            now[0] += 60.0
            advance()
            now[0] += 2.0
            assert capsys.readouterr().err == "", block
            advance(7)
        assert capsys.readouterr().err == "thresholds: takes about 10 min 20 s in all, by its first 3 min 6 s\n"
    with progress("tracing", 10) as advance:
        for _ in range(10):
            now[0] += 20.0
            advance()
    assert capsys.readouterr().err == ""


def test_of_works_within_each_other_the_innermost_is_told_about(capsys):
    with activity("outer"):
        with progress("inner", 2):
            first_line(capsys, "inner: 0/2", "outer: for")
            assert next_line(capsys).startswith("inner: 0/2")
        assert re.fullmatch(r"outer: for \d+ s now", first_line(capsys, "outer", "inner: 0/2"))
        assert next_line(capsys).startswith("outer: for")


def test_what_is_soon_over_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(module, "FIRST", 5.0)
    with progress("short", 1) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_nothing_is_said_after_the_end_even_that_of_a_failure(capsys):
    with pytest.raises(KeyError), activity("failing"):
        raise KeyError
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""
    assert not module._going_on


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_then_no_lines(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("working", 4) as advance:
        advance(2)
        time.sleep(0.3)
    assert "2/4" in stream.getvalue()
    assert "after" not in stream.getvalue()


def test_a_terminal_gets_a_line_where_there_is_no_bar_yet(monkeypatch):
    """Loading a model takes long, and nobody knows how long."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with activity("loading"):
        until = time.monotonic() + 30
        while "loading: for" not in stream.getvalue():
            assert time.monotonic() < until
            time.sleep(0.01)


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
