"""Nothing that a model or a file says commands a terminal; where output is no terminal, it stays as it is."""

import asyncio
import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from artifacts_for_tests import write_zigzag
from forks_for_tests import Fork

from sparsepack import terminal
from sparsepack.cli import messages
from sparsepack.cli.command import json_text
from sparsepack.cli.talk import Answers
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.progress import progress, say
from sparsepack.tables import Table, show
from sparsepack.terminal import printable, tell

HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\u2066c\x7f\rd"
HARMLESS = "a?]0;owned??31m?b?c??d"


class Screen(io.StringIO):
    """What looks like a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_control_and_bidirectional_characters_are_replaced_and_letters_of_all_languages_stay() -> None:
    assert printable(HOSTILE) == HARMLESS
    for text in ("one\ttwo\r\nthree\n", "caf\u00e9 \u2713 \u05e9\u05dc\u05d5\u05dd \u200f\U0001d11e"):
        assert printable(text) == text


def test_what_a_model_writes_is_replaced_on_a_terminal_and_raw_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Screen(), HARMLESS), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        tell(HOSTILE, end="")
        assert stream.getvalue() == expected


def test_a_generated_text_commands_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsepack.cli.talk.describe_runtime", str)
    for stream, expected in ((Screen(), HARMLESS), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        Answers(object(), None).tell(HOSTILE)
        assert stream.getvalue() == expected


def test_notes_progress_tables_and_messages_of_libraries_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    messages.prepare()
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    say(HOSTILE)
    with progress(f"[red]{HOSTILE}", 2) as advance:
        advance()
    show([HOSTILE, Table(["name"], [[HOSTILE]], HOSTILE, [HOSTILE])])
    logging.lastResort.emit(logging.getLogger("x").makeRecord("x", 40, "f", 1, "said %s", (HOSTILE,), None))
    said = screen.getvalue()
    assert "\x1b]0;" not in said
    assert not set("\x07\x9b\u202e\u2066\x7f") & set(said)
    assert said.count("?]0;owned") >= 6
    assert "[red]" in said


@pytest.fixture(autouse=True)
def _hooks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `prepare` sets is taken back after each test."""
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))


class Broken:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __del__(self) -> None:
        raise ValueError(self.text)


def in_a_thread(text: str) -> None:
    def fails() -> None:
        raise ValueError(text)

    thread = threading.Thread(target=fails, name=text)
    thread.start()
    thread.join()


def in_an_event_loop(text: str) -> None:
    async def fails() -> None:
        asyncio.get_running_loop().set_exception_handler(terminal.event_loop_exception_handler)
        asyncio.get_running_loop().call_soon(lambda: Broken(text) and int(text))
        await asyncio.sleep(0.01)

    asyncio.run(fails())


ELSEWHERE = {"thread": in_a_thread, "destructor": Broken, "event loop": in_an_event_loop}


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("text", [HOSTILE, "two\nlines"])
def test_what_nobody_caught_elsewhere_is_one_line_that_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    messages.prepare()
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    ELSEWHERE[place](text)
    gc.collect()
    for line in screen.getvalue().splitlines():
        assert line.startswith("sparsepack: ")
        assert "ValueError: " in line
        assert printable(line) == line
        assert re.search(r"\(test_terminal\.py, line \d+\)$", line)
    assert screen.getvalue().count("\n") == (2 if place == "event loop" else 1)


def test_developers_see_where_it_came_from() -> None:
    code = "import threading\nfrom sparsepack.cli import messages\nmessages.prepare()\n"
    code += "threading.Thread(target=lambda: 1 / 0).start()"
    for switch, traces in (((), 0), (("-X", "dev"), 1)):
        done = subprocess.run([sys.executable, *switch, "-c", code], capture_output=True, text=True)
        assert done.stderr.count("Traceback (most recent call last)") == traces
        assert "ZeroDivisionError: division by zero (<string>, line 4)\n" in done.stderr


def test_tracebacks_in_the_log_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    messages.prepare()
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    logger = logging.Logger("x")
    logger.addHandler(logging.lastResort)
    logger.error("a text failed", exc_info=ValueError(HOSTILE))
    assert f"ValueError: {HARMLESS}" in screen.getvalue()
    assert HOSTILE not in screen.getvalue()


def test_warnings_and_what_nobody_caught_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown, hidden in ((Screen(), HARMLESS, HOSTILE), (io.StringIO(), HOSTILE, HARMLESS)):
        monkeypatch.setattr(sys, "stderr", stream)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            messages.prepare()
            warnings.warn(HOSTILE, stacklevel=1)
        assert f"UserWarning: {shown}" in stream.getvalue()
        sys.excepthook(ValueError, ValueError(HOSTILE), None)
        assert f"ValueError: {shown}" in stream.getvalue()
        assert hidden not in stream.getvalue()


def test_json_on_a_terminal_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    text = json_text({"name": HOSTILE, "é": 1})
    assert printable(text) == text
    assert json.loads(text)["name"] == HOSTILE


def test_generate_and_errors_on_a_real_terminal_command_nothing(tmp_path: Path) -> None:
    """Standard output and error are the two ends of a pseudo terminal."""
    import pty

    write_zigzag(open_checkpoint("shipped:tiny"), {}, tmp_path / "m.gguf")
    for asked in (["m.gguf", "--prompt", HOSTILE, "-n", "1"], [f"none{HOSTILE}.gguf", "--prompt", "x"]):
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as terminal:
            done = Fork(["generate", *asked], {**os.environ}, terminal, terminal, tmp_path)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        done.wait()
        os.close(ours)
        assert b"?]0;owned" in shown
        assert b"\x1b]0;" not in shown
        assert "\u202e".encode() not in shown
