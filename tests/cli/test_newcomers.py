"""What people type who know other programs: verbs of theirs, prompts left out, words in a conversation."""

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands_for_tests import fails, sparsepack, succeeds
from models_for_tests import make_model

from sparsepack.cli import main
from sparsepack.errors import UserError
from sparsepack.formats.open import read_packed
from sparsepack.loading import load
from sparsepack.models.checkpoint.config_files import GENERATION, suggested
from sparsepack.runtime.options import GenerateOptions

SUGGESTED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model packed twice: m.gguf, and suggests.gguf, whose makers suggest how tokens are chosen."""
    folder = tmp_path_factory.mktemp("newcomers")
    make_model(folder / "model")
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    succeeds("pack", folder / "model", "-o", folder / "m.gguf")
    (folder / "model" / "generation_config.json").write_text(json.dumps(SUGGESTED))
    succeeds("pack", folder / "model", "-o", folder / "suggests.gguf")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("quantize", "sparsepack pack MODEL"),
        ("convert", "sparsepack pack MODEL"),
        ("chat", "sparsepack generate FILE --chat"),
        ("perplexity", "sparsepack eval FILE --perplexity"),
        ("run-server", "sparsepack serve FILE"),
        ("help", "sparsepack --help"),
        ("calibrat", "sparsepack calibrate"),
        ("CALIBRAT", "sparsepack calibrate"),
        ("quantiz", "sparsepack pack MODEL"),
        ("xyzzy", "expected one of quickstart, calibrate"),
    ],
)
def test_a_verb_of_another_program_is_told_the_right_one(typed: str, hint: str) -> None:
    line = fails(typed, "model.gguf")
    assert f"{typed}: no such verb; " in line
    assert hint in line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "calibrate nowhere/nothing/m --text shipped:train -o cal",
            "nowhere/nothing/m: no such file or folder; expect",
        ),
        ("calibrate shipped:tiny --text nothing.txt -o cal", "nothing.txt: no such file or folder; expected a .txt,"),
        ("eval nothing.gguf --perplexity shipped:heldout", "nothing.gguf: no such file or folder; expected a model's"),
        ("pack shipped:tiny -o there.gguf", "there.gguf: exists already; give another name or --overwrite"),
        ("pack shipped:tiny -o nowhere/m.gguf", "nowhere does not exist; create it first"),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_imported(command: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").touch()
    code = "import sys; from sparsepack.cli import main\n"
    code += f"try: main({command.split()})\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_gguf_of_another_program_is_a_checkpoint_to_inspect_and_to_be_packed_for_others(folder: Path) -> None:
    succeeds("pack", folder / "model", "--format", "q4_k", "-o", folder / "plain.gguf")
    data = (folder / "plain.gguf").read_bytes()
    (folder / "other.gguf").write_bytes(data.replace(b"sparsepack.", b"otherprog_."))
    assert "formats that can hold" in succeeds("inspect", folder / "other.gguf")
    line = fails("generate", folder / "other.gguf", "--prompt", "x")
    assert "another program's GGUF" in line
    assert f"sparsepack pack {folder / 'other.gguf'} -o OUTPUT" in line


def test_verify_tells_in_one_line_what_is_no_artifact(folder: Path) -> None:
    made = sparsepack("verify", folder / "model")
    assert made.exit_code == 1
    assert made.stdout.count("FAILED") == 1
    assert len(made.stdout.splitlines()) == 1


def test_every_hint_names_a_verb_and_hides_none() -> None:
    from sparsepack.cli.messages import _HINTS

    assert {command.split()[0] for command in _HINTS.values()} <= {*main.commands, "--help", "--version"}
    assert not _HINTS.keys() & main.commands.keys()


def test_the_help_lists_verbs_in_groups_each_with_a_whole_line_that_fits_80_columns() -> None:
    lines = succeeds("--help").splitlines()
    for heading in ("Make:", "Check:", "Run:", "Study:", "Publish:"):
        assert heading in lines
    for name in main.commands:
        (line,) = [line for line in lines if line.split()[:1] == [name] and line.startswith("  ")]
        assert len(line) <= 80
        assert line.endswith(".")
        assert "..." not in line


@pytest.mark.parametrize(
    ("verb", "headings"),
    [
        (
            "pack",
            [
                *("What is skipped:", "Fitted weights:", "Attention:", "Types:", "Pruned models:", "Output:"),
                *("How it runs:", "Others:"),
            ],
        ),
        ("generate", ["Text:", "How tokens are chosen:", "How it runs:", "Output:", "Others:"]),
    ],
)
def test_options_of_verbs_with_many_stand_in_groups_of_at_most_fourteen(verb: str, headings: list[str]) -> None:
    lines = succeeds(verb, "--help").splitlines()
    found = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert [line for line in found if line != "Options:"] == headings
    sizes, size = [], 0
    for line in lines:
        size = size + line.startswith("  -") if line.startswith(" ") else 0
        sizes.append(size)
    assert max(sizes) <= 14


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pack"], "pack: Missing argument 'MODEL'"),
        (["pack", "m", "--nonsense"], "No such option '--nonsense'"),
        (["bench", "m", "--batch", "x"], "Invalid value for '--batch'"),
        (["--nonsense"], "No such option '--nonsense'"),
        (["thresholds", "m", "--calibration", ".", "-o", "t"], "give --sparsity"),
    ],
)
def test_what_click_finds_wrong_is_one_line(arguments: list[str], said: str) -> None:
    result = sparsepack(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("sparsepack: ")
    assert said in line


def test_the_prompt_need_not_be_printed(folder: Path) -> None:
    asked = ("generate", folder / "m.gguf", "--prompt", "The sun", "-n", 6)
    with_prompt = succeeds(*asked)
    assert with_prompt == f"The sun{succeeds(*asked, '--no-display-prompt')}"
    assert "--no-display-prompt: it does nothing with --chat" in fails(*asked, "--no-display-prompt", "--chat")


def test_a_prompt_left_out_is_asked_for_on_a_terminal_and_refused_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("generate", folder / "m.gguf", "-n", 6)
    assert "nothing to continue" in fails(*asked)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
    told = sparsepack(*asked, given="The sun\n")
    assert told.exit_code == 0, told.output
    assert told.stdout == succeeds("generate", folder / "m.gguf", "--prompt", "The sun", "-n", 6)
    assert "Text to continue" in told.stderr
    assert "nothing to continue" in sparsepack(*asked, given="").stderr


@pytest.mark.parametrize("end", ["/exit", "/quit", "/bye"])
def test_a_conversation_has_words_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    typed = iter(["/help", "/nonsense", "Hello", "/clear", end, "never read"])
    monkeypatch.setattr("sparsepack.cli.talk.on_a_terminal", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda _: next(typed))
    result = sparsepack("generate", folder / "m.gguf", "--chat", "--chat-template", folder / "chat.jinja", "-n", 3)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("Type a message.") == 3  # at first, for /help and for what is no command
    assert "/nonsense: no such command" in result.stderr
    assert result.stderr.count("as many as asked for") == 1
    assert next(typed) == "never read"


def test_tokens_are_chosen_as_the_makers_suggest_unless_the_user_says_otherwise(folder: Path) -> None:
    prompt = ("--prompt", "The sun", "-n", 12)
    suggests = ("generate", folder / "suggests.gguf", *prompt)
    told = sparsepack(*suggests)
    said = "makers suggest --temperature 0.7, --top-k 20, --top-p 0.9, --repeat-penalty 1.1; --temperature 0 takes"
    assert said in told.stderr
    by_hand = ("--temperature", 0.7, "--top-k", 20, "--top-p", 0.9, "--repeat-penalty", 1.1)
    assert told.stdout == succeeds("generate", folder / "m.gguf", *prompt, *by_hand)
    likeliest = sparsepack(*suggests, "--temperature", 0, "--repeat-penalty", 1)
    assert "suggest" not in likeliest.stderr
    assert likeliest.stdout == succeeds("generate", folder / "m.gguf", *prompt)
    succeeds(*suggests, "--top-k", 5)
    assert "--top-k 5: it does nothing with --temperature 0" in fails(
        "generate", folder / "m.gguf", *prompt, "--top-k", 5
    )


def test_functions_and_recipes_choose_tokens_as_the_command_does(folder: Path, tmp_path: Path) -> None:
    prompt = ("--prompt", "The sun", "-n", 12, "--no-display-prompt")
    told = succeeds("generate", folder / "suggests.gguf", *prompt).removesuffix("\n")
    model = load(folder / "suggests.gguf")
    assert model.generate("The sun", tokens=12).result().text == told
    (together,) = model.generate_together(["The sun"], GenerateOptions(12))
    assert together.text == told
    assert model.generate("The sun", tokens=12, temperature=0, repeat_penalty=1).result().text != told
    with pytest.raises(UserError, match="top_k 5: it does nothing with temperature 0"):
        model.generate("The sun", temperature=0, top_k=5)
    recipe = "schema: 1\nname: r\nmodel: {}\npack: {{}}\ngenerate: {{prompt: The sun, tokens: 12{}}}\n"
    (tmp_path / "r.yaml").write_text(recipe.format(folder / "model", ""))
    work = ("--work", tmp_path / "work")
    assert "makers suggest generate.temperature 0.7" in sparsepack("run", tmp_path / "r.yaml", *work).stderr
    assert json.loads((tmp_path / "work" / "generate.json").read_text())["text"] == told
    (tmp_path / "r.yaml").write_text(recipe.format("shipped:tiny", ", top_k: 5"))
    assert "generate.top_k 5: it does nothing with" in fails("run", tmp_path / "r.yaml", "--dry-run", *work)


def test_only_a_model_whose_makers_suggest_something_carries_it(folder: Path) -> None:
    assert read_packed(folder / "suggests.gguf").generation == suggested(SUGGESTED)
    assert read_packed(folder / "m.gguf").generation == {}
    assert GENERATION.encode() not in (folder / "m.gguf").read_bytes()
    assert suggested({"temperature": 0.3, "top_p": 0.5}) == {}  # without do_sample, they are not drawn
    assert suggested({"do_sample": True, "top_p": 1.0, "top_k": 0}) == {"temperature": 1.0}
    with pytest.raises(ValueError, match="top_k"):
        suggested({"do_sample": True, "top_k": "many"})
