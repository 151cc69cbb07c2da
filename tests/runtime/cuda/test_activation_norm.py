"""What enters the second product of attention or an MLP where a kernel stands before it, against the reference in
float64: on a GPU, and as the processor runs it."""

from collections.abc import Iterator

import pytest
import torch
from emulated import Emulation, needs_compiler
from operations_for_tests import normal

from sparsepack.models.activations import xielu
from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products import gemm_fp16
from sparsepack.runtime.cuda.products.gemm_fp16 import activation_norm
from sparsepack.runtime.reference import products as reference

EPS = 1e-5
WIDTHS = [1, 7, 64, 1024, 1025, 6912]
COEFFICIENTS = torch.tensor([0.7, 1.3, 0.5, -1e-3])
COMPUTED = {
    "normed": lambda x, norm: reference.rms_norm(x, norm, EPS),
    "gated, normed": lambda x, norm: reference.rms_norm(reference.gated("relu2", *x.chunk(2, 1)), norm, EPS),
    "gated": lambda x, _: reference.gated("silu", *x.chunk(2, 1)),
    "xielu": lambda x, _: xielu(x, COEFFICIENTS.to(x.dtype)),
}


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        monkeypatch.setattr(gemm_fp16, "kernel", emulation.kernel)
        monkeypatch.setattr(gemm_fp16, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


@needs_compiler
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("what", COMPUTED)
def test_what_stands_between_products_is_made_and_normed(
    what: str, width: int, rows: int, flag_in_data: bool, device: torch.device
) -> None:
    if device.type == "cpu" and (width, rows) not in {(7, 3), (1025, 1)}:
        pytest.skip("takes long on a processor")
    wide = width * (1 + what.startswith("gated"))
    x, norm = normal(rows, wide), normal(width, seed=2)
    expected = COMPUTED[what](x.double(), norm.double())
    _, (there, y) = flag_in_data_buffers([rows * wide, rows * width], device)
    there, y = there.view(rows, wide), y.view(rows, width)
    there.copy_(x)
    how = {"activation": 4 if "normed" in what else 0} if what.startswith("gated") else {}
    how |= {"norm": norm.to(device), "eps": EPS} if "normed" in what else {}
    how |= {"xielu": COEFFICIENTS.to(device)} if what == "xielu" else {}
    activation_norm(there, y, **how, flag_in_data=flag_in_data)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit_are_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"x \[2, 8\], norm None: expected \[2, 16\]"):
        activation_norm(x, x, activation=0)
    with pytest.raises(ValueError, match=r"norm \[7\]: expected \[2, 8\] and \[8\]"):
        activation_norm(x, x, norm=torch.zeros(7))
