"""Python that comes with a model is not run, whoever answers for the user, and one line says so."""

import ast
import json
import os
import pty
from pathlib import Path

import pytest
from forks_for_tests import Fork
from models_for_tests import edit_config, make_model

import sparsepack
from sparsepack.errors import CheckpointError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

OWN = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('its own Python ran')\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama whose tokenizer is Python that lies beside its weights."""
    folder = make_model(tmp_path / "m", num_hidden_layers=1)
    (folder / "own.py").write_text(OWN)
    edit(folder, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    return folder


def edit(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nothing_is_asked_and_nothing_runs_where_a_terminal_would_answer_yes(model: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 20)
    command = ["pack", str(model), "-o", str(model.parent / "m.gguf")]
    with os.fdopen(theirs) as terminal, (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        status = Fork(command, {**os.environ}, out, err, stdin=terminal).wait(120)
    os.close(ours)
    output, errors = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert status == 2, errors
    assert not list(model.parent.rglob("ran"))
    assert "[y/N]" not in output + errors
    (line,) = errors.splitlines()
    assert line.startswith(f"sparsepack: {model}/tokenizer_config.json: needs Python that comes with the model, which")


def test_transformers_own_classes_stand_in_and_that_is_said_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(model, tokenizer_class="PreTrainedTokenizerFast")
    edit_config(model, auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    for _ in range(2):
        assert open_checkpoint(model).tokenizer("a b")["input_ids"]
    lines = capsys.readouterr().err.splitlines()
    named = [file for line in lines for file in ("/config.json", "/tokenizer_config.json") if f"{file}: names" in line]
    assert named == ["/config.json", "/tokenizer_config.json"]
    assert not list(model.parent.rglob("ran"))


@pytest.mark.parametrize("auto_map", [7, [], {}, {"AutoTokenizer": 7}, None, "own.Own"])
def test_an_entry_of_another_type_is_one_line_or_nothing(model: Path, auto_map: object) -> None:
    edit(model, auto_map=auto_map)
    said = ""
    try:
        assert open_checkpoint(model).tokenizer
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    assert not list(model.parent.rglob("ran"))


def test_no_call_of_transformers_leaves_it_to_ask() -> None:
    """Without the argument, `from_pretrained` and `from_config` ask on standard input."""
    root, left = Path(sparsepack.__file__).parent, []
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                starred = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                if node.func.attr in ("from_pretrained", "from_config") and "STOCK_ALONE" not in starred:
                    left.append(f"{file.relative_to(root)}:{node.lineno}")
    assert not left
