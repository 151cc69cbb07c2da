"""Files whose hashes are right and whose content is no accident: one line, and nothing that commands a terminal."""

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sparsepack.cli import main
from sparsepack.errors import UserError
from sparsepack.formats.open import open_artifact
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tests.artifacts_for_tests import write_plain, write_zigzag
from tests.fuzz import sealed_gguf

MANIFEST = "sparsepack.manifest"


@pytest.fixture(scope="module")
def whole(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> sealed_gguf.Gguf:
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    write_zigzag(checkpoints["llama"], {}, path)
    return sealed_gguf.read(path.read_bytes())


def sealed(whole: sealed_gguf.Gguf, key: str, text: str, path: Path) -> Path:
    """The file with another text under a key, its hashes right."""
    data = text.encode("utf-8", "surrogatepass")
    value = struct.pack("<Q", len(data)) + data
    pairs = [[k, t, value if k == key else v] for k, t, v in whole.pairs]
    sealed_gguf.Gguf(pairs, whole.tensors, whole.alignment).write(path)
    return path


def manifest_of(whole: sealed_gguf.Gguf) -> dict:
    return json.loads(next(value[8:] for key, _, value in whole.pairs if key == MANIFEST))


def inspected(whole: sealed_gguf.Gguf, text: str, path: Path) -> Result:
    """`inspect` of the file with another manifest."""
    return CliRunner().invoke(main, ["inspect", str(sealed(whole, MANIFEST, text, path))])


TABLE = {"allocation": "uniform", "criterion": "magnitude", "sparsity": 0.5, "upstream": "sparse"}
CHANGES = {
    "no name": {"model": {}},
    "a number as name": {"model": {"name": 7, "sha256": "a", "model_type": "llama"}},
    "a list as kind": {"kind": []},
    "true as schema": {"schema": True},
    "notes of numbers": {"notes": [1]},
    "tensors of numbers": {"tensors": {"token_embd.weight": 7}},
    "shapes of text": {"tensors": {"token_embd.weight": {"shape": ["x"]}}},
    "a shape of nothing": {"tensors": {"output_norm.weight": {"shape": []}}},
    "padding of text": {"tensors": {"token_embd.weight": {"shape": [1], "padding_rows": "x"}}},
    "rows of text": {"thresholds": {**TABLE, "rows": ["x"]}},
    "thresholds of text": {"thresholds": "x"},
    "sparsity that is none": {"thresholds": {**TABLE, "sparsity": "x", "rows": []}},
    "an outlook that is a number": {"thresholds": {**TABLE, "rows": [], "expected": 0.5}},
    "an outlook of lists": {"thresholds": {**TABLE, "rows": [], "expected": {"overall": 0.5, "of_sparse_sites": []}}},
    "an outlook that says more": {
        "thresholds": {**TABLE, "rows": [], "expected": {"overall": 0.5, "of_sparse_sites": 0.5, "x": 1}}
    },
    "a row that expects text": {
        "thresholds": {
            **TABLE,
            "rows": [{"layer": 0, "site": "attn_in", "sparsity": 0.5, "threshold": 1.0, "expected": "x"}],
        }
    },
    "pruning without a method": {"pruning": {"model": "m", "permute": False}},
    "half a character": {"sparsepack": "\ud800"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_manifest_is_one_line(whole: sealed_gguf.Gguf, change: str, tmp_path: Path) -> None:
    path = sealed(whole, MANIFEST, json.dumps({**manifest_of(whole), **CHANGES[change]}), tmp_path / "m.gguf")
    for verb in ("inspect", "verify"):
        result = CliRunner().invoke(main, [verb, str(path)])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in (1, 2)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"schema": ' + "9" * 5000 + "}", "\ufffe"])
def test_a_manifest_that_is_none_is_one_line(whole: sealed_gguf.Gguf, text: str, tmp_path: Path) -> None:
    result = inspected(whole, text, tmp_path / "m.gguf")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output


def test_rows_that_are_missing_are_shown_as_such(whole: sealed_gguf.Gguf, tmp_path: Path) -> None:
    rows = [{"layer": 0, "site": "attn_in", "sparsity": 0.5, "threshold": 1}]
    rows += [{**rows[0], "layer": 1, "site": "mlp_in"}]
    made = {**manifest_of(whole), "thresholds": {**TABLE, "rows": rows}}
    result = inspected(whole, json.dumps(made), tmp_path / "m.gguf")
    assert result.exit_code == 0, result.output
    assert "| - " in result.stdout or " - |" in result.stdout


def test_what_a_file_says_does_not_command_the_terminal(whole: sealed_gguf.Gguf, tmp_path: Path) -> None:
    made = {**manifest_of(whole), "notes": ["\x1b[2Jgone"]}
    result = inspected(whole, json.dumps(made), tmp_path / "m.gguf")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "?[2Jgone" in result.stdout


NUMBERS = {
    "sliding_windows": [-1, 0],
    "eos": [-1],
    "bos": 10**30,
    "activation": ["silu"],
    "tied": "yes",
    "norm_eps": 10**400,
    "model_type": [],
}


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_that_no_engine_can_run_are_refused(whole: sealed_gguf.Gguf, field: str, tmp_path: Path) -> None:
    key = "sparsepack.architecture"
    numbers = json.loads(next(value[8:] for k, _, value in whole.pairs if k == key))
    text = json.dumps({**numbers, field: NUMBERS[field] if field != "norm_eps" else 0}).replace(
        '"norm_eps": 0', f'"norm_eps": {NUMBERS["norm_eps"]}' if field == "norm_eps" else '"norm_eps": 0'
    )
    path = sealed(whole, key, text, tmp_path / "m.gguf")
    result = CliRunner().invoke(main, ["generate", str(path), "--prompt", "The", "--tokens", "2"])
    assert result.exit_code == 2, result.output
    assert "not understood" in result.stderr


@pytest.fixture(scope="module")
def plain(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> sealed_gguf.Gguf:
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    write_plain(checkpoints["llama"], path, "f16")
    return sealed_gguf.read(path.read_bytes())


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"model_type": "gpt2"}], ids=str)
@pytest.mark.parametrize("kind", ["whole", "plain"])
def test_a_configuration_of_another_model_is_refused(
    kind: str, change: dict, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    good, key = request.getfixturevalue(kind), "sparsepack.config"
    config = json.loads(next(value[8:] for k, _, value in good.pairs if k == key))
    path = sealed(good, key, json.dumps({**config, **change}), tmp_path / "m.gguf")
    with pytest.raises(UserError, match=str(*change.values())):
        open_artifact(path).stock()


def test_a_plain_file_without_its_embedding_is_refused(plain: sealed_gguf.Gguf, tmp_path: Path) -> None:
    tensors = [tensor for tensor in plain.tensors if tensor[0] != "token_embd.weight"]
    sealed_gguf.Gguf(plain.pairs, tensors, plain.alignment).write(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"token_embd\.weight is missing"):
        open_artifact(tmp_path / "m.gguf").stock()


def test_rotary_factors_that_are_no_float32_are_refused(plain: sealed_gguf.Gguf, tmp_path: Path) -> None:
    pairs = [pair for pair in plain.pairs if pair[0] != "sparsepack.config"]
    factors = ["rope_freqs.weight", [3], 1, bytes(6)]
    sealed_gguf.Gguf(pairs, [*plain.tensors, factors], plain.alignment).write(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"rope_freqs\.weight is F16, expected F32"):
        open_checkpoint(tmp_path / "m.gguf")
