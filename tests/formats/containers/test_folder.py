"""A format that is a folder, added as one row and one file: every verb knows it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT

from sparsepack.cli import main
from sparsepack.errors import ArtifactError, CheckpointError, OutputError, PackingError, UserError
from sparsepack.eval.run import EvalRequest, evaluate
from sparsepack.files.hashing import sha256_bytes
from sparsepack.files.tensors import WEIGHTS
from sparsepack.formats.containers.safetensors import MANIFEST, sealed, unsealed
from sparsepack.formats.inspect import describe
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.open import is_artifact, open_artifact, read_packed
from sparsepack.formats.table import FORMATS, Format
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.packing import CARD, PackRequest, pack

NAME = "bf16-folder"


@pytest.fixture(scope="module", autouse=True)
def row() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        bf16 = MatrixFormat("BF16")
        patch.setitem(FORMATS, NAME, Format(NAME, "bfloat16 in a folder", "bf16_folder", bf16, folder=True))
        yield


@pytest.fixture(scope="module")
def made(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "m"
    pack(PackRequest(checkpoints["llama"].name, path, NAME))
    return path


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    for file in made.iterdir():
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "m"


def test_it_is_the_model(checkpoints: dict[str, Checkpoint], made: Path) -> None:
    report = verify(made, checkpoints["llama"])
    assert report.passed, report.problems
    assert {t.name for t in report.tensors} == set(checkpoints["llama"].source.shapes)
    assert max(t.error for t in report.tensors) == 0
    assert not verify(made, checkpoints["mistral"]).passed
    found = describe(made)
    assert (found["kind"], found["bits_per_weight"]["blocks"]) == (NAME, 16)
    sealed = [file for file in made.iterdir() if file.name != CARD]  # which people may change
    assert found["file_bytes"] == sum(file.stat().st_size for file in sealed)


def test_its_size_is_planned_to_the_byte(checkpoints: dict[str, Checkpoint], made: Path) -> None:
    from sparsepack.packing import plan_of

    planned = plan_of(checkpoints["llama"], PackRequest(checkpoints["llama"].name, made, NAME))
    assert planned.total_bytes == describe(made)["file_bytes"]
    assert planned.bits_per_weight == describe(made)["bits_per_weight"]["file"]


def test_it_is_evaluated_as_its_source_is(checkpoints: dict[str, Checkpoint], made: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT[:3000])
    name = checkpoints["llama"].name
    asked = EvalRequest(str(made), perplexity=(str(tmp_path / "t.txt"),), context=64, windows=2, against=name)
    ours, source = evaluate(asked), evaluate(replace(asked, subject=name))
    assert ours["perplexity"][0]["perplexity"] == source["perplexity"][0]["perplexity"]
    assert ours["subject"]["kind"] == NAME
    with pytest.raises(UserError, match=r"--backend cpu runs zigzag-q4_k or .* or neuron-q4_k artifacts"):
        evaluate(replace(asked, runtime="cpu"))
    with pytest.raises(ArtifactError, match="bf16-folder, which no engine of sparsepack runs"):
        read_packed(made)


def test_other_programs_read_it(made: Path, checkpoints: dict[str, Checkpoint]) -> None:
    from safetensors.torch import load_file

    stored = load_file(made / WEIGHTS)
    assert all(
        torch.equal(stored[name], checkpoints["llama"].tensor(name)) for name in checkpoints["llama"].source.shapes
    )
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "sparsepack", "format": NAME}


def test_the_command_line_tells_it_from_a_calibration(made: Path, tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        result = CliRunner().invoke(main, [verb, str(made)])
        assert result.exit_code == 0, result.output
    assert NAME in CliRunner().invoke(main, ["inspect", str(made)]).output
    empty = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert "expected a folder made by `sparsepack calibrate`" in empty.output


RECIPE = f"""
import sys
from pathlib import Path
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.table import FORMATS, Format
matrices = MatrixFormat("BF16")
FORMATS[{NAME!r}] = Format({NAME!r}, "bfloat16 in a folder", "bf16_folder", matrices, folder=True)
from sparsepack.errors import RecipeError
from sparsepack.recipe.load import load_recipe
assert load_recipe(Path(sys.argv[1])).pack.format == {NAME!r}
for overrides in (["pack.format=x"], ["activation_sparsity={{sparsity: 0.5}}", "calibrate={{text: t}}"]):
    try:
        load_recipe(Path(sys.argv[1]), overrides)
    except RecipeError as error:
        print(error)
"""


def test_a_recipe_takes_it_from_the_table(tmp_path: Path) -> None:
    """In a process of its own: a recipe knows the rows that the table has when it is imported."""
    path = tmp_path / "r.yaml"
    path.write_text(f"schema: 1\nname: r\nmodel: m\npack: {{format: {NAME}}}\n")
    done = subprocess.run([sys.executable, "-c", RECIPE, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unknown, misplaced = done.stdout.splitlines()
    assert re.search(r'pack\.format: "x"; expected .zigzag-q4_k., .*bf16-folder', unknown)
    assert "format bf16-folder: it has no place for thresholds; leave sparsity out or use zigzag-q4_k" in misplaced


def test_it_is_no_checkpoint_but_says_what_it_is(made: Path) -> None:
    assert is_artifact(made)
    with pytest.raises(CheckpointError, match="a packed sparsepack artifact; expected its source model here"):
        open_checkpoint(made)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", MANIFEST, WEIGHTS])
def test_a_flipped_bit_in_any_file_is_refused(copied: Path, name: str) -> None:
    whole = (copied / name).read_bytes()
    for at in (0, 7, 20, 200, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        (copied / name).write_bytes(changed)
        assert not verify(copied).passed, at
    (copied / name).write_bytes(whole[:-1])
    assert not verify(copied).passed
    (copied / name).unlink()
    problem = verify(copied).problems[0]
    assert name in problem
    assert "\n" not in problem


def test_what_was_sealed_wrongly_is_one_line(copied: Path) -> None:
    inside = unsealed(copied / MANIFEST)
    del inside["sha256"]
    weights = inside["files"][WEIGHTS]
    for value in (None, 3, [], {}, "x"):
        changes = [{key: value} for key in ("files", "tensors", "manifest")]
        changes += [{"files": inside["files"] | {WEIGHTS: of_file}} for of_file in (value, weights | {"bytes": value})]
        changes += [{"files": inside["files"] | {WEIGHTS: weights | {"header_sha256": value}}}]
        for change in changes:
            (copied / MANIFEST).write_bytes(sealed(inside | change))
            with pytest.raises(ArtifactError) as caught:
                open_artifact(copied)
            assert "\n" not in str(caught.value)


def test_tensors_with_gaps_between_them_are_refused(copied: Path) -> None:
    raw = (copied / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    for entry in (entry for name, entry in entries.items() if name != "__metadata__"):
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    text = json.dumps(entries).encode()
    header = len(text).to_bytes(8, "little") + text
    (copied / WEIGHTS).write_bytes(header + raw[start:])
    inside = unsealed(copied / MANIFEST)
    del inside["sha256"]
    changed = {"bytes": len(header) + len(raw) - start, "header_sha256": sha256_bytes(header)}
    inside["files"] = inside["files"] | {WEIGHTS: inside["files"][WEIGHTS] | changed}
    (copied / MANIFEST).write_bytes(sealed(inside))
    with pytest.raises(ArtifactError, match="not its place"):
        open_artifact(copied)


def test_only_an_artifact_is_overwritten_and_only_as_a_whole(
    checkpoints: dict[str, Checkpoint], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = PackRequest(checkpoints["qwen2"].name, copied, NAME)
    with pytest.raises(OutputError, match="exists already"):
        pack(request)
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    read = Checkpoint.tensor

    def interrupted(self: Checkpoint, name: str) -> torch.Tensor:
        if "layers.1" in name:
            raise KeyboardInterrupt
        return read(self, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "tensor", interrupted)
        pack(replace(request, overwrite=True))
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before
    assert [entry.name for entry in copied.parent.iterdir()] == ["m"]
    pack(replace(request, overwrite=True))
    assert verify(copied, checkpoints["qwen2"]).passed
    other = copied.parent / "thesis"
    other.mkdir()
    (other / "a.txt").write_text("years")
    for output, said in ((other, "without sparsepack.json; it is not replaced"), (other / "a.txt", "a file; expected")):
        with pytest.raises(OutputError, match=said):
            pack(replace(request, output=output, overwrite=True))


def test_thresholds_have_no_place_in_it(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    with pytest.raises(PackingError, match=r"bf16-folder: it has no place for thresholds; .* use zigzag-q4_k"):
        pack(PackRequest(checkpoints["llama"].name, tmp_path / "m", NAME, thresholds=tmp_path / "t.json"))


def test_a_container_of_the_wrong_kind_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, replace(FORMATS[NAME], folder=False))
    with pytest.raises(ArtifactError, match="its manifest says bf16-folder, which is a GGUF"):
        open_artifact(copied)


@pytest.mark.parametrize("module", ["sparsepack.formats.table", "sparsepack.recipe.schema", "sparsepack.cli"])
def test_the_table_is_read_without_torch(module: str) -> None:
    code = f"import {module}, sys; assert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
