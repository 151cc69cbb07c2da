"""The type of the arithmetic: the one asked for, or by default float32 on CPUs and the model's own on GPUs."""

import pytest
import torch
from models_for_tests import make_model
from safetensors.torch import load_file, save_file

from sparsepack.files.tensors import arithmetic, type_name
from sparsepack.models.checkpoint.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("asked", "own", "device", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", torch.float32),
        ("auto", torch.float16, "cpu", torch.float32),
        ("auto", torch.bfloat16, "cuda", torch.bfloat16),
        ("auto", torch.float16, "cuda:1", torch.float16),
        ("auto", torch.float32, "cuda", torch.float32),
        ("auto", torch.float64, "cuda", torch.float32),
        ("float32", torch.bfloat16, "cuda", torch.float32),
        ("bfloat16", torch.float32, "cpu", torch.bfloat16),
    ],
)
def test_the_type_of_the_arithmetic(asked, own, device, expected):
    assert arithmetic(asked, own, device) is expected


def test_types_have_the_names_of_the_flag():
    assert [type_name(dtype) for dtype in (torch.bfloat16, torch.float32)] == ["bfloat16", "float32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_checkpoints_own_type_is_that_of_most_of_its_weights(tmp_path, dtype):
    """Norms are often kept in 32 bits."""
    folder = make_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights = {n: (w.float() if "norm" in n else w.to(dtype)).contiguous() for n, w in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(folder).dtype is dtype
