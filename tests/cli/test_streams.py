"""Standard output and error that are closed, full, or cannot print every character."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsepack.cli import main
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from tests.artifacts_for_tests import write_zigzag

SPARSEPACK = [sys.executable, "-m", "sparsepack.cli"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams") / "m.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, path)
    return path


def verbs(file: Path) -> list[list[str]]:
    generate = ["generate", str(file), "--prompt", "The", "--tokens", "3"]
    return [["--help"], generate]


@pytest.mark.parametrize("verb", range(2))
def test_a_closed_standard_output_ends_a_command_quietly(file: Path, verb: int) -> None:
    command = subprocess.list2cmdline([*SPARSEPACK, *verbs(file)[verb]])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if not line.startswith("runtime:")] == []


@pytest.mark.parametrize("verb", range(2))
def test_a_reader_that_goes_away_ends_a_command_quietly(file: Path, verb: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*SPARSEPACK, *verbs(file)[verb]], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode in (1, 141)
    assert [line for line in done.stderr.splitlines() if not line.startswith("runtime:")] == []


def test_a_closed_standard_input_is_an_empty_one(file: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for asked in (["--prompt-file", "-", "--tokens", "1"], ["--chat", "--chat-template", str(template)]):
        command = subprocess.list2cmdline([*SPARSEPACK, "generate", str(file), *asked])
        done = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_line_of_standard_input_that_is_no_text_is_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [*SPARSEPACK, "generate", str(file), "--chat", "--chat-template", str(template)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"sparsepack: standard input: not text (byte 3")


def test_nothing_is_printed_into_a_file_that_has_the_number_of_a_closed_output(tmp_path: Path) -> None:
    """Where output is closed, the first file that is opened would get its number."""
    output = tmp_path / "out.gguf"
    command = subprocess.list2cmdline([*SPARSEPACK, "pack", "shipped:tiny", "--format", "f16", "-o", str(output)])
    subprocess.run(["sh", "-c", f"{command} >&- 2>&-"])
    verified = CliRunner().invoke(main, ["verify", str(output)])
    assert verified.exit_code == 0, verified.output


def test_what_the_encoding_cannot_print_is_replaced(file: Path) -> None:
    command = [*SPARSEPACK, "generate", str(file), "--prompt", "caf\u00e9 \u2713", "--tokens", "3"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caf\u00e9 \u2713".encode("ascii", "replace"))


def test_json_is_still_json_where_the_encoding_is_narrow(file: Path, tmp_path: Path) -> None:
    odd = tmp_path / "caf\u00e9.gguf"
    odd.symlink_to(file)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*SPARSEPACK, "inspect", str(odd), "--json", "-"], capture_output=True, env=environment)
    assert json.loads(done.stdout)["path"] == str(odd)


def test_texts_as_json_lose_no_character_where_the_encoding_is_narrow(file: Path) -> None:
    command = [*SPARSEPACK, "generate", str(file), "--prompt", "caf\u00e9 \u2713", "--tokens", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["prompt"] == "caf\u00e9 \u2713"


def test_a_name_that_is_no_text_is_printed(file: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path / "m") + b"\xff.gguf"
    os.symlink(file, odd)
    for extra in (["--json", "-"], ["--json", str(tmp_path / "x.json")]):
        done = subprocess.run([*SPARSEPACK, "inspect", odd, *extra], capture_output=True)
        assert done.returncode == 0, done.stderr


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([*SPARSEPACK, "inspect", "x" * 300], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert "File name too long" in done.stderr
