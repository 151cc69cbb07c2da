"""A source that is not what it was when it was opened is never packed, in no container: its hash would be another's."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import WEIGHTS
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.safetensors_source import SafetensorsSource
from sparsepack.packing import PackRequest, plan_of

FORMATS = ["slide-int8", "zigzag-q4_k", "f16"]


@pytest.fixture
def model(pruned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pruned, tmp_path / "model"))


def rewritten(weights: Path) -> None:
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def reshaped(weights: Path) -> None:
    save_file({name: torch.zeros(3) for name in load_file(weights)}, weights)


def half_written(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


CHANGES = [rewritten, reshaped, half_written, Path.unlink]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused_after_the_plan(model: Path, format: str, change: Callable[[Path], None], known: bool) -> None:
    checkpoint = open_checkpoint(model)
    if known:  # as by whatever compares it with a calibration
        assert checkpoint.sha256
    output = model.with_name("packed")
    plan = plan_of(checkpoint, PackRequest(str(model), output, format=format))
    change(model / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed since it was opened"):
        plan.write(output)
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_refused_while_it_is_packed(model: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SafetensorsSource.tensor

    def changing(*given: Any) -> torch.Tensor:
        (model / WEIGHTS).touch()
        return read(*given)

    plan = plan_of(open_checkpoint(model), PackRequest(str(model), model.with_name("packed"), format=format))
    monkeypatch.setattr(SafetensorsSource, "tensor", changing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed since it was opened"):
        plan.write(model.with_name("packed"))
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize(
    ("change", "remedy"), [(half_written, "is it whole?"), (Path.unlink, "look whether it is there, or copy it again")]
)
def test_a_tensor_whose_file_cannot_be_read_is_one_line(
    model: Path, change: Callable[[Path], None], remedy: str
) -> None:
    checkpoint = open_checkpoint(model)
    change(model / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(.*\); ") as caught:
        checkpoint.tensor("model.norm.weight")
    assert str(caught.value).endswith(remedy)
    assert "\n" not in str(caught.value)
