"""What `pack` writes can be opened: a model whose numbers no reader takes is refused, and nothing is left."""

import json
from pathlib import Path

import pytest
from models_for_tests import edit_config, make_model
from safetensors.torch import load_file, save_file

import sparsepack
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import CheckpointError, PackingError, UserError
from sparsepack.formats import open as opening
from sparsepack.formats.open import read_packed
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", num_hidden_layers=1)


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [-1, [-1], [3, -1]])
def test_a_negative_end_token_is_none(model: Path, tmp_path: Path, eos: int | list[int], place: str) -> None:
    path = model / place
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, "eos_token_id": eos}))
    output = tmp_path / "m.gguf"
    pack(PackRequest(str(model), output))
    assert all(token >= 0 for token in read_packed(output).architecture.eos)


NUMBERS = {
    "eos_token_id": 2**40,
    "rms_norm_eps": float("nan"),
    "rope_theta": float("nan"),
    "head_dim": 0,
    "vocab_size": 0,
    "sliding_window": -3,
}


@pytest.mark.parametrize("format", ["zigzag-q4_k", "f16"])
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_that_no_reader_takes_are_refused(model: Path, tmp_path: Path, field: str, format: str) -> None:
    changes = {field: NUMBERS[field]}
    if field == "rope_theta":
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": NUMBERS[field]}}
    edit_config(model, **changes)
    with pytest.raises(UserError) as caught:
        pack(PackRequest(str(model), tmp_path / "m.gguf", format=format))
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("format", ["zigzag-q4_k", "f16", "slide-bf16"])
def test_what_is_written_is_opened_before_it_gets_its_name(model: Path, tmp_path: Path, monkeypatch, format) -> None:
    def refuse(path: Path) -> None:
        raise opening.ArtifactError(f"{path}: a number is none; pack the model again")

    if format == "slide-bf16":
        from sparsepack.calibrate.prune import PruneOptions

        sparsepack.prune(model, tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
        model = tmp_path / "pruned"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(opening, "open_artifact", refuse)
    with pytest.raises(PackingError, match="out: not written, since nothing could open it: a number is none; correct"):
        pack(PackRequest(str(model), tmp_path / "out", format=format))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("which", ["all", "down_proj"])
def test_a_model_whose_values_overflow_is_not_calibrated(model: Path, tmp_path: Path, which: str) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if which == "all" or which in name:
            tensor.fill_(3e38)
    save_file(tensors, path, metadata={"format": "pt"})
    options, text = CalibrateOptions(context=32, samples=1), tmp_path / "text.txt"
    text.write_text("Once upon a time. " * 50)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        sparsepack.calibrate(open_checkpoint(model), str(text), tmp_path / "c", options)
    assert not (tmp_path / "c").exists()
