"""The kernels of short convolutions against the reference: on a GPU, and as the processor runs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from simulated_short_conv import mixed
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention import short_conv
from sparsepack.runtime.cuda.attention.short_conv import (
    ShortConvParameters,
    short_conv_parameters,
    short_conv_prefill,
    short_conv_step,
)
from sparsepack.runtime.cuda.driver.memory import SENTINEL, flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product

SHAPES = {"released": (2048, 3), "odd": (301, 4), "one tap": (7, 1), "many taps": (260, 16)}
"""Channels and taps."""


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        monkeypatch.setattr(short_conv, "kernel", emulation.kernel)
        monkeypatch.setattr(short_conv, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def parameters(shape: str, texts: int, device: torch.device) -> ShortConvParameters:
    """Random ones, whose inputs are those of another text."""
    random = torch.Generator().manual_seed(SHAPES[shape][0])
    of = short_conv_parameters({"short_conv": torch.randn(*SHAPES[shape], generator=random)}, texts, device)
    of.inputs.fill_(7.0)
    return of


def on_cpu(of: ShortConvParameters) -> ShortConvParameters:
    return replace(of, taps=of.taps.cpu(), inputs=of.inputs.cpu().clone())


def rows_of(of: ShortConvParameters, count: int, seed: int) -> Tensor:
    return torch.randn(count, 3 * of.channels, generator=torch.Generator().manual_seed(seed))


def step(of: ShortConvParameters, rows: Tensor, lengths: list[int], flag: bool) -> Tensor:
    device, count = of.inputs.device, len(lengths)
    words, (there,) = flag_in_data_buffers([rows.numel()], device)
    there.copy_(rows.flatten())
    out = torch.full((count, of.channels), torch.nan, device=device)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    short_conv_step(of, there.view(count, -1), positions, out, flag_in_data=flag)
    assert bool((words != SENTINEL).any())
    return out


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_the_reference(shape: str, device: torch.device) -> None:
    of = parameters(shape, 3, device)
    oracle, lengths = on_cpu(of), [0, 0, 0]
    for number in range(7):
        rows = rows_of(of, 3, number)
        found = step(of, rows, lengths, flag=False).cpu()
        expected = torch.cat([mixed(oracle, rows[n, None], length, n) for n, length in enumerate(lengths)])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # The last one stands still every other time: what it computed is forgotten.
        lengths = [length + (n < 2 or number % 2 == 0) for n, length in enumerate(lengths)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_their_flag_in_the_data_are_read_the_same(shape: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    one, other = (parameters(shape, 1, device) for _ in range(2))
    for length in range(4):
        rows = rows_of(one, 1, length)
        assert torch.equal(step(one, rows, [length], True), step(other, rows, [length], False))
    assert torch.equal(one.inputs, other.inputs)


@needs_compiler
@pytest.mark.parametrize("pieces", [[1], [2, 1, 5], [33, 1, 4], [150, 16, 70]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefill_in_pieces_is_the_reference(
    shape: str, biased: bool, pieces: list[int], device: torch.device
) -> None:
    if device.type == "cpu" and (sum(pieces) > 100 or shape == "released"):
        pytest.skip("takes long on a processor")
    of = parameters(shape, 2, device)
    oracle, first = on_cpu(of), 0
    for number, count in enumerate(pieces):
        rows = rows_of(of, count, 10 + number)
        factor, bias = 2.0 ** torch.arange(-1, count - 1).remainder(5), 0.1 * rows[0] if biased else None
        product = Product((rows / factor[:, None] / 0.5).to(device), factor.to(device), 0.5, None)
        product = replace(product, bias=None if bias is None else bias.to(device))
        found = short_conv_prefill(of, product, first, 1)
        expected = mixed(oracle, rows if bias is None else rows + bias, first, 1)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
        first += count
    kept = [p % of.taps.shape[1] for p in range(max(0, first - of.taps.shape[1] + 1), first)]
    torch.testing.assert_close(of.inputs[1, kept].cpu(), oracle.inputs[1, kept], rtol=1e-6, atol=1e-6)
    assert bool((of.inputs[0] == 7).all()), "another sequence's"


@needs_compiler
@pytest.mark.parametrize("counted", [1, 3, 16, 29])
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_that_do_not_count_are_not_kept(shape: str, counted: int, device: torch.device) -> None:
    if device.type == "cpu" and shape == "released":
        pytest.skip("takes long on a processor")
    of, alone = (parameters(shape, 1, device) for _ in range(2))
    rows, ones = rows_of(of, 40, 3).to(device), torch.ones(40, device=device)
    number = torch.tensor([counted], dtype=torch.int32, device=device)
    found = short_conv_prefill(of, Product(rows, ones, 1.0, None), 0, counted=number)
    expected = short_conv_prefill(alone, Product(rows[:counted], ones[:counted], 1.0, None), 0)
    assert torch.equal(found[:counted], expected)
    assert torch.equal(of.inputs, alone.inputs)


def test_what_kernels_do_not_know_is_an_error() -> None:
    with pytest.raises(UserError, match="short convolutions over 17 positions"):
        short_conv_parameters({"short_conv": torch.zeros(8, 17)}, 1, torch.device("cpu"))
    of = parameters("odd", 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="rows"):
        short_conv_step(of, rows_of(of, 1, 0), torch.zeros(2, dtype=torch.int32), torch.empty(2, of.channels))
