"""Weights that are no numbers: refused by every verb that reads them, with the tensor's name."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import write_plain
from commands_for_tests import fails
from models_for_tests import TEXT, make_model
from safetensors.torch import load_file, save_file

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

IN_A_BLOCK, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("values") / "m", hidden_act="relu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT[:20000])
    return tmp_path / "text.txt"


def spoiled(model: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of a model one of whose weights has that value."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-7] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


CALIBRATE = ("--context", 64, "--samples", 2)
VERBS = {
    "calibrate": ("calibrate", "BAD", "--text", "TEXT", "-o", "OUT", *CALIBRATE),
    "prune": ("prune", "BAD", "--keep", 6, "--of", 8, "--method", "magnitude", "-o", "OUT"),
    "thresholds": ("thresholds", "BAD", "--calibration", "CAL", "--sparsity", 0.5, "--allocation", "teal", "-o", "OUT"),
    "pack": ("pack", "BAD", "--format", "zigzag-q4_k", "-o", "OUT.gguf"),
    "eval": ("eval", "BAD", "--perplexity", "TEXT", "--context", 64, "--windows", 1),
    "trace": ("trace", "BAD", "--text", "TEXT", "--sessions", 1, "--tokens", 32, "--prompt", 4, "-o", "OUT"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_weight_that_is_not_finite_is_refused_with_its_tensor(
    verb: str, model: Path, text: Path, tmp_path: Path
) -> None:
    bad = spoiled(model, tmp_path / "bad", IN_A_BLOCK, math.nan)
    places = {"BAD": bad, "TEXT": text, "OUT": tmp_path / "out", "OUT.gguf": tmp_path / "out.gguf"}
    if verb == "thresholds":
        places["CAL"] = _calibrated_before_it_was_spoiled(model, bad, text, tmp_path)
    said = fails(*(places.get(str(argument), argument) for argument in VERBS[verb]))
    assert f"the tensor {IN_A_BLOCK} has values that are NaN or infinite" in said
    assert not list(tmp_path.glob("out*"))


def _calibrated_before_it_was_spoiled(model: Path, bad: Path, text: Path, folder: Path) -> Path:
    """A calibration that says it is of the spoiled model."""
    from sparsepack.calibrate.collect import CalibrateOptions
    from sparsepack.calibrate.collection import calibrate
    from sparsepack.files.text import Text

    made = calibrate(str(model), Text("t", (text.read_text(),), ""), folder / "cal", CalibrateOptions(64, samples=2))
    place = made if isinstance(made, Path) else folder / "cal"
    hashes = [open_checkpoint(path).sha256 for path in (model, bad)]
    manifest = place / "calibration.json"
    manifest.write_text(manifest.read_text().replace(*hashes))
    return place


@pytest.mark.parametrize("name", [EMBEDDING, "model.norm.weight", "lm_head.weight"])
def test_outside_of_the_blocks_too(name: str, model: Path, tmp_path: Path) -> None:
    bad = spoiled(model, tmp_path / "bad", name, -math.inf)
    said = fails("prune", bad, "--keep", 6, "--of", 8, "--method", "magnitude", "-o", tmp_path / "out")
    assert f"the tensor {name} has values that are NaN" in said
    assert not (tmp_path / "out").exists()


def test_of_a_gguf_too(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_plain(open_checkpoint(make_model(tmp_path / "m", num_hidden_layers=1)), path, type="f32")
    good = open_checkpoint(path)
    data = bytearray(path.read_bytes())
    assert good.gguf is not None
    start = good.gguf.tensors["output_norm.weight"].start
    data[start : start + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the tensor output_norm\.weight has values that are NaN"):
        open_checkpoint(path).tensor("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_value_counts_in_every_type(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for count in (1, 7, 64, 1000):
        values = torch.full((count,), largest, dtype=dtype)
        values[0] = -largest
        assert all_finite(values)
        for at in {0, count // 2, count - 1}:
            for wrong in (math.nan, math.inf, -math.inf):
                spoilt = values.clone()
                spoilt[at] = wrong
                assert not all_finite(spoilt)
    assert all_finite(torch.zeros(0, dtype=dtype))
