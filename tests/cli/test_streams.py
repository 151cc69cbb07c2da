"""Standard output and error that are closed, full, or cannot print every character."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from started_for_tests import CLOSED, NO_READER, Ended, Starter

from sparsepack.cli import main
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from tests.artifacts_for_tests import write_zigzag

SPARSEPACK = [sys.executable, "-m", "sparsepack.cli"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams") / "m.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, path)
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("started"))
    yield starter
    starter.close()


def generate(file: Path) -> list[str]:
    return ["generate", str(file), "--prompt", "The", "--tokens", "3"]


def says_nothing(errors: str) -> bool:
    return all(line.startswith("runtime:") for line in errors.splitlines())


def test_a_closed_standard_output_ends_a_command_quietly(file: Path, started: Starter) -> None:
    done = started.run(*generate(file), stdout=CLOSED)
    assert done.status == 1
    assert says_nothing(done.errors.decode())


def test_a_reader_that_goes_away_ends_a_command_quietly(file: Path, started: Starter) -> None:
    done = started.run(*generate(file), stdout=NO_READER)
    assert done.status in (1, 141)
    assert says_nothing(done.errors.decode())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_a_standard_output_that_is_full_is_one_line(file: Path, started: Starter) -> None:
    done = started.run("inspect", file, stdout="/dev/full")
    assert done.status == 1
    assert done.errors == b"sparsepack: standard output: the disk is full; free some space and run again\n"


def test_a_new_interpreter_without_an_output_ends_quietly() -> None:
    command = subprocess.list2cmdline([*SPARSEPACK, "--help"])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_new_interpreter_without_a_reader_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*SPARSEPACK, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode in (1, 141)
    assert done.stderr == ""


def test_a_closed_standard_input_is_an_empty_one(file: Path, started: Starter, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for asked in (["--prompt-file", "-", "--tokens", "1"], ["--chat", "--chat-template", str(template)]):
        done = started.run("generate", file, *asked, stdin=CLOSED)
        assert done.status == 0, done.errors


def test_a_line_of_standard_input_that_is_no_text_is_refused_in_one_line(
    file: Path, started: Starter, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = ["generate", file, "--chat", "--chat-template", template]
    done = started.run(*command, stdin=b"caf\xe9\n", encoding="utf-8:strict")
    assert done.status == 2
    assert done.errors.splitlines()[-1].startswith(b"sparsepack: standard input: not text (byte 3")


def test_nothing_is_printed_into_a_file_that_has_the_number_of_a_closed_output(
    started: Starter, tmp_path: Path
) -> None:
    """Where output is closed, the first file that is opened would get its number."""
    output = tmp_path / "out.gguf"
    started.run("pack", "shipped:tiny", "--format", "f16", "-o", output, stdout=CLOSED, stderr=CLOSED)
    verified = CliRunner().invoke(main, ["verify", str(output)])
    assert verified.exit_code == 0, verified.output


def prints_narrowly(started: Starter, *command: object) -> Ended:
    done = started.run(*command, encoding="ascii")
    assert done.status == 0, done.errors
    return done


def test_what_the_encoding_cannot_print_is_replaced(file: Path, started: Starter) -> None:
    done = prints_narrowly(started, "generate", file, "--prompt", "caf\u00e9 \u2713", "--tokens", "3")
    assert done.output.startswith("caf\u00e9 \u2713".encode("ascii", "replace"))


def test_json_is_still_json_where_the_encoding_is_narrow(file: Path, started: Starter, tmp_path: Path) -> None:
    odd = tmp_path / "caf\u00e9.gguf"
    odd.symlink_to(file)
    assert json.loads(prints_narrowly(started, "inspect", odd, "--json", "-").output)["path"] == str(odd)


def test_texts_as_json_lose_no_character_where_the_encoding_is_narrow(file: Path, started: Starter) -> None:
    command = ["generate", file, "--prompt", "caf\u00e9 \u2713", "--tokens", "1", "--json", "-"]
    assert json.loads(prints_narrowly(started, *command).output)["prompt"] == "caf\u00e9 \u2713"


@pytest.mark.long
def test_the_encoding_is_what_a_new_interpreter_is_told(file: Path, tmp_path: Path) -> None:
    odd = tmp_path / "caf\u00e9.gguf"
    odd.symlink_to(file)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*SPARSEPACK, "inspect", str(odd)], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"caf?.gguf" in done.stdout


def test_a_name_that_is_no_text_is_printed(file: Path, started: Starter, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path / "m") + b"\xff.gguf"
    os.symlink(file, odd)
    for extra in (["--json", "-"], ["--json", str(tmp_path / "x.json")]):
        done = started.run("inspect", odd, *extra)
        assert done.status == 0, done.errors


def test_a_name_that_is_too_long_is_one_line(started: Starter) -> None:
    done = started.run("inspect", "x" * 300)
    assert done.status in (1, 2)
    assert done.errors.count(b"\n") == 1
    assert b"File name too long" in done.errors
