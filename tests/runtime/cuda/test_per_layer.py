"""What a block makes of an input of its own, by its kernel: on the GPU, and emulated on the processor."""

import pytest
import torch
from emulated import Emulation, needs_compiler
from operations_for_tests import normal

from sparsepack.runtime.cuda.products import gemm_fp16 as module
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS

SIZES = [(1, 1), (1, 256), (3, 257), (8, 31)]
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_pytorch_tanh")


def check(rows: int, width: int, activation: int, device: str) -> None:
    gates, inputs = normal(rows, width).to(device), normal(rows, 3, width, seed=1).to(device)
    y = torch.full_like(gates, torch.nan)
    module.gate_inputs(gates, inputs[:, 1], activation, y)
    expected = ACTIVATION_FUNCTIONS[ACTIVATIONS[activation]](gates.double()) * inputs[:, 1].double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_gates_are_activated_and_multiplied(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = Emulation()
    monkeypatch.setattr(module, "kernel", emulation.kernel)
    monkeypatch.setattr(module, "launch", emulation.launch)
    check(rows, width, 3, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_every_activation(rows: int, width: int, activation: int) -> None:
    check(rows, width, activation, "cuda")


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"gates, inputs, y \[\[2, 8\], \[2, 7\], \[2, 8\]\]"):
        module.gate_inputs(torch.zeros(2, 8), torch.zeros(2, 7), 3, torch.zeros(2, 8))
