"""No command replaces what it reads, by any name, with --overwrite neither."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from models_for_tests import make_model

from sparsepack.cli.app import main
from sparsepack.errors import OutputError
from sparsepack.files.atomic import check_inputs
from sparsepack.packing import PackRequest, pack


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", num_hidden_layers=1)


def refused(*arguments: object) -> str:
    found = CliRunner().invoke(main, [str(each) for each in arguments])
    assert found.exit_code == 2, found.output
    return found.stderr


@pytest.mark.parametrize("link", [False, True])
def test_a_gguf_is_not_packed_onto_itself(model: Path, tmp_path: Path, link: bool) -> None:
    source = tmp_path / "source.gguf"
    pack(PackRequest(str(model), source, format="f32"))
    before, output = source.read_bytes(), source
    if link:
        output = tmp_path / "link.gguf"
        output.symlink_to(source)
    assert "would be lost; give another name" in refused("pack", source, "-o", output, "--overwrite")
    with pytest.raises(OutputError, match="would be lost"):
        pack(PackRequest(str(source), output, overwrite=True))
    assert source.read_bytes() == before


@pytest.mark.parametrize("file", ["text.txt", "m/config.json", "m/model.safetensors"])
def test_a_result_replaces_no_input(model: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time. " * 100)
    before = (tmp_path / file).read_bytes()
    message = refused("eval", model, "--perplexity", tmp_path / "text.txt", "--json", tmp_path / file)
    assert "would be lost" in message
    assert (tmp_path / file).read_bytes() == before


def test_a_card_replaces_no_result(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "eval.json"
    result.write_text(json.dumps({}))
    shutil.copytree(model, tmp_path / "packed")
    message = refused("card", tmp_path / "packed", "--results", result, "-o", result, "--overwrite")
    assert "it is the input" in message
    assert result.read_text() == "{}"


@pytest.mark.parametrize("output", ["m", "."])
def test_a_folder_is_not_replaced_by_what_is_made_of_it(model: Path, tmp_path: Path, output: str) -> None:
    with pytest.raises(OutputError, match="would be lost"):
        check_inputs(tmp_path / output, [model])


def test_a_page_beside_the_model_may_be_replaced(model: Path) -> None:
    (model / "README.md").write_text("")
    check_inputs(model / "README.md", [model])
    check_inputs(model / "new.json", [model])
