"""`generate`: prompts from anywhere, conversations, stop strings, JSON."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from artifacts_for_tests import write_zigzag
from click.testing import Result
from commands_for_tests import sparsepack

from sparsepack.models.checkpoint.checkpoint import open_checkpoint

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = "{{ bos_token }}" + MESSAGES + "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tiny model as m.gguf, which has no chat template, and a template."""
    folder = tmp_path_factory.mktemp("talk")
    write_zigzag(open_checkpoint("shipped:tiny"), {}, folder / "m.gguf")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def generate(folder: Path, *arguments: object, given: str | bytes | None = None) -> Result:
    return sparsepack("generate", folder / "m.gguf", *arguments, given=given)


def records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr.splitlines()[-1]


def test_json_has_the_text_its_tokens_why_it_ended_and_how_fast_it_was(folder: Path, tmp_path: Path) -> None:
    (made,) = records(generate(folder, "--prompt", "The for statement", "-n", 6, "--json", "-"))
    assert (made["prompt"], made["tokens"], made["stop_reason"]) == ("The for statement", 6, "tokens")
    assert len(made["token_ids"]) == 6
    assert made["tokens_per_second"] > 0
    assert made["skipped"] == 0
    told = generate(folder, "--prompt", "The for statement", "-n", 6, "--json", tmp_path / "made.json")
    assert told.stdout == f"The for statement{made['text']}\n"
    assert json.loads((tmp_path / "made.json").read_text())["text"] == made["text"]
    assert "as many as asked for" in told.stderr


def test_a_stop_string_is_not_printed(folder: Path) -> None:
    whole = generate(folder, "--prompt", "The for statement", "-n", 24).stdout.removesuffix("\n")
    made = whole.removeprefix("The for statement")
    stop = made[9:12]
    expected = "The for statement" + made[: made.index(stop)]
    result = generate(folder, "--prompt", "The for statement", "-n", 24, "--stop", "\x00", "--stop", stop)
    assert result.stdout == f"{expected}\n"
    assert f"stopped at {stop!r}" in result.stderr


def test_a_penalty_changes_what_repeats(folder: Path) -> None:
    plain, other = (
        records(generate(folder, "--prompt", "aa", "-n", 40, "--json", "-", *more))[0]["token_ids"]
        for more in ((), ("--repeat-penalty", 1.8, "--repeat-last-n", -1))
    )
    assert len(set(other)) > len(set(plain))


def test_a_prompt_may_come_from_a_file_or_standard_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfThe for\nstatement\n")
    for arguments in (("--prompt-file", tmp_path / "prompt.txt"), ("--prompt-file", "-")):
        result = generate(folder, *arguments, "-n", 2, "--json", "-", given="The for\nstatement\n")
        assert records(result)[0]["prompt"] == "The for\nstatement"
    (tmp_path / "bytes").write_bytes(b"a\xff")
    assert "byte 1 is not UTF-8" in refused(generate(folder, "--prompt-file", tmp_path / "bytes"))
    assert "No such file" in refused(generate(folder, "--prompt-file", tmp_path / "none"))


def test_each_line_is_a_turn_and_only_what_is_new_is_prefilled(folder: Path) -> None:
    arguments = ("--chat", "--chat-template", folder / "chat.jinja", "--system", "Be brief.", "-n", 5, "--json", "-")
    first, second = records(generate(folder, *arguments, given="Hello\n\nWhat is a for statement?\n"))
    assert (first["prompt"], second["prompt"]) == ("Hello", "What is a for statement?")
    assert first["prefilled"] == first["prompt_tokens"]
    assert second["prompt_tokens"] - second["prefilled"] >= first["prompt_tokens"], "the conversation was read again"
    alone = records(generate(folder, *arguments, "--prompt", "What is a for statement?", given="unread\n"))
    assert len(alone) == 1
    assert alone[0]["prompt_tokens"] < second["prompt_tokens"]


def test_answers_are_the_same_as_without_a_cache(folder: Path) -> None:
    common = ("-n", 12, "--dense", "--backend", "reference", "--json", "-")
    chat = ("--chat", "--chat-template", folder / "chat.jinja", *common)
    first, second = records(generate(folder, *chat, given="Hello\nAnd a while statement?\n"))
    text = f"user: Hello\nassistant: {first['text']}\nuser: And a while statement?\nassistant: "
    (fresh,) = records(generate(folder, "--prompt", text, *common))
    assert fresh["token_ids"] == second["token_ids"]


def type_on_a_terminal(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Let somebody type these lines, and then end the input."""
    left = iter(lines)

    def typed(prompt: str) -> str:
        if (line := next(left, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr("sparsepack.cli.talk.on_a_terminal", lambda: True)


def test_a_conversation_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    type_on_a_terminal(monkeypatch, ["Hello", "  ", "x" * 600, "/clear", "Hello"])
    arguments = ("--chat", "--chat-template", folder / "chat.jinja", "-n", 5, "--context", 128)
    result = generate(folder, *arguments)
    assert result.exit_code == 0, result.output
    one, other = result.stdout.split("\n", 1)[0], result.stdout.rstrip("\n").rsplit("\n", 1)[-1]
    assert one.strip() == other.strip() != ""
    assert "Ctrl-D ends" in result.stderr
    assert "the context holds 128" in result.stderr


def test_an_answer_can_be_interrupted_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsepack.runtime.generation.generate import Generation

    step = Generation._step
    calls: list[Any] = []

    def interrupted(self: Generation, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(Generation, "_step", interrupted)
    type_on_a_terminal(monkeypatch, ["Hello", "Go on"])
    result = generate(folder, "--chat", "--chat-template", folder / "chat.jinja", "-n", 5)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("interrupted") == 1
    assert result.stderr.count("as many as asked for") == 1


def test_what_does_not_go_together_is_refused(folder: Path) -> None:
    assert "nothing to continue" in refused(generate(folder))
    assert "--policy lru: it does nothing without --cached" in refused(
        generate(folder, "--prompt", "x", "--policy", "lru")
    )
    assert "cached: the cpu backend gives neurons no slots; use backend cuda" in refused(
        generate(folder, "--prompt", "x", "--cached", 0.3)
    )
    assert "--system y: it does nothing without --chat" in refused(generate(folder, "--prompt", "x", "--system", "y"))
    assert "named twice" in refused(generate(folder, "--prompt-file", "-", "--prompt-file", "-"))
    assert "no chat template" in refused(generate(folder, "--chat", given="Hello\n"))
    assert "expected at least one character" in refused(generate(folder, "--prompt", "x", "--stop", ""))
