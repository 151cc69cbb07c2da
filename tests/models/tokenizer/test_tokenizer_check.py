"""Tokenizers that would end the process are refused in one line, others are not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparsepack.data import TINY_MODEL
from sparsepack.errors import ArtifactError, CheckpointError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer.tokenizer import check_tokenizer
from sparsepack.runtime.generation.generate import open_tokenizer

MERGES = [[["a", "##b"], ["ab", "##Ġ"]], ["a ##b", "ab ##Ġ"]]


def tokenizer(prefix: str | None, merges: list[Any]) -> str:
    tokens = ("a", "##b", "ab", "##Ġ", "abĠ")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = {"type": "BPE", "continuing_subword_prefix": prefix, "vocab": vocabulary, "merges": merges}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


@pytest.mark.parametrize("merges", MERGES, ids=["pairs", "words"])
def test_merges_that_go_on_with_the_prefix_are_fine(merges: list[Any]) -> None:
    check_tokenizer(tokenizer("##", merges))
    assert open_tokenizer(tokenizer("##", merges)).get_vocab_size() == 5
    check_tokenizer(tokenizer(None, [["a", "b"]]))
    check_tokenizer((TINY_MODEL / "tokenizer.json").read_text())


@pytest.mark.parametrize("merges", [[["a", "Ġ"]], ["a Ġ"], [["a", "##b"], ["a", ""]]])
def test_others_are_refused(merges: list[Any]) -> None:
    with pytest.raises(ArtifactError, match="does not begin with its continuing_subword_prefix"):
        open_tokenizer(tokenizer("##", merges))


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"model": 3}', '{"model": {"continuing_subword_prefix": "#", "merges": [[]]}}']
)
def test_what_is_no_tokenizer_is_said(text: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        open_tokenizer(text)


def test_a_checkpoint_with_one_is_one_line(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_MODEL, tmp_path / "model")
    path = model / "tokenizer.json"
    value = json.loads(path.read_text())
    value["model"]["continuing_subword_prefix"] = "x"
    path.chmod(0o644)
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="continuing_subword_prefix"):
        _ = open_checkpoint(str(model)).tokenizer


@pytest.mark.parametrize("within", [False, True])
def test_a_post_processor_that_adds_thousands_of_tokens_is_refused(within: bool) -> None:
    special = {"id": "x", "ids": [0] * 20, "tokens": ["a"] * 20}
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}] * 51 + [{"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"x": special}}
    read = json.loads(tokenizer("##", MERGES[0]))
    read["post_processor"] = {"type": "Sequence", "processors": [template]} if within else template
    with pytest.raises(ArtifactError, match="its post_processor adds 2,040 tokens to a text; expected at most 1,000"):
        open_tokenizer(json.dumps(read))


def test_split_special_tokens_are_refused_rather_than_taken_for_tokens(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_MODEL, tmp_path / "model")
    path = model / "tokenizer_config.json"
    value = json.loads(path.read_text()) | {"split_special_tokens": True}
    path.chmod(0o644)
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"split_special_tokens is set, .* set it to false"):
        _ = open_checkpoint(str(model)).tokenizer
