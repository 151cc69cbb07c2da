"""The kernels of state-space models against the reference, token by token: on a GPU, and as the processor runs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from simulated_mamba import mixed
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.blocks import Mamba
from sparsepack.runtime.cuda.attention import mamba, state_chunks
from sparsepack.runtime.cuda.attention.mamba import MambaParameters, mamba_parameters, mamba_prefill, mamba_step
from sparsepack.runtime.cuda.driver.memory import SENTINEL, flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product

EPS = 1e-5
SHAPES = {
    "odd": Mamba(6, 10, 3, 14, 4, 2),
    "rows of vectors": Mamba(2, 12, 1, 128, 3, 1),
    "released": Mamba(64, 64, 8, 128, 4, 8),
    "a group of each": Mamba(3, 33, 3, 40, 2, 3),
    "wide": Mamba(4, 250, 2, 256, 5, 1),
    "one channel": Mamba(1, 1, 1, 1, 1, 1),
}


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        for module in (mamba, state_chunks):
            monkeypatch.setattr(module, "kernel", emulation.kernel)
            monkeypatch.setattr(module, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def skip_large(device: torch.device, shape: str) -> None:
    if device.type == "cpu" and shape in ("released", "wide"):
        pytest.skip("takes long on a processor")


def parameters(shape: str, texts: int, device: torch.device) -> MambaParameters:
    """Random ones, whose states and inputs are those of another text."""
    mixer = SHAPES[shape]
    random = torch.Generator().manual_seed(mixer.inner)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    of = {
        "mamba_conv": normal(mixer.channels, mixer.taps) / mixer.taps**0.5,
        "mamba_conv_bias": 0.2 * normal(mixer.channels),
        "mamba_a_log": normal(mixer.heads) - 1,
        "mamba_dt_bias": normal(mixer.heads),
        "mamba_skip": normal(mixer.heads),
        "mamba_norm": 1 + 0.2 * normal(mixer.inner),
    }
    found = mamba_parameters(mixer, of, EPS, texts, device)
    found.state.fill_(7.0)
    found.inputs.fill_(7.0)
    return found


def on_cpu(of: MambaParameters) -> MambaParameters:
    names = ("taps", "conv_bias", "rate", "dt_bias", "skip", "norm", "state", "inputs")
    return replace(of, **{name: getattr(of, name).cpu().clone() for name in names})


def inputs(of: MambaParameters, count: int, seed: int) -> Tensor:
    """What attn_in leaves for so many tokens."""
    return torch.randn(count, of.mixer.rows, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, expected: Tensor, bound: float = 2e-5) -> None:
    """Outputs are about one, as their norm leaves them."""
    error = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < bound


def assert_same_state(of: MambaParameters, expected: MambaParameters, lengths: list[int], bound: float = 2e-5) -> None:
    taps = of.mixer.taps
    for n, length in enumerate(lengths):
        found, wanted = (each.state[length % 2, n].cpu() for each in (of, expected))
        assert_near(found, wanted, bound)
        kept = [p % taps for p in range(max(0, length - taps + 1), length)]
        torch.testing.assert_close(of.inputs[n, kept].cpu(), expected.inputs[n, kept], rtol=1e-5, atol=1e-5)


def step(of: MambaParameters, rows: Tensor, lengths: list[int], flag: bool) -> Tensor:
    device, count = of.state.device, len(lengths)
    words, (there,) = flag_in_data_buffers([rows.numel()], device)
    there.copy_(rows.flatten())
    out = torch.full((count, of.mixer.inner), torch.nan, device=device)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    mamba_step(of, there.view(count, -1), positions, out, flag_in_data=flag)
    assert bool((words != SENTINEL).any())
    assert bool((of.y.view(torch.int32) == SENTINEL).all()), "the next step would read what this one left"
    return out


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_the_reference(shape: str, device: torch.device) -> None:
    skip_large(device, shape)
    of = parameters(shape, 3, device)
    oracle, lengths = on_cpu(of), [0, 0, 0]
    for number in range(7):
        rows = inputs(of, 3, number)
        found = step(of, rows, lengths, flag=False)
        for n, length in enumerate(lengths):
            assert_near(found[n], mixed(oracle, rows[n, None], length, n)[0])
        # The last one stands still every other time: what it computed is forgotten.
        lengths = [length + (n < 2 or number % 2 == 0) for n, length in enumerate(lengths)]
        assert_same_state(of, oracle, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_with_their_flag_in_the_data_are_read_the_same(shape: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    one, other = (parameters(shape, 1, device) for _ in range(2))
    for length in range(4):
        rows = inputs(one, 1, length)
        assert torch.equal(step(one, rows, [length], True), step(other, rows, [length], False))
    assert torch.equal(one.state, other.state)


@needs_compiler
@pytest.mark.parametrize("pieces", [[1], [2, 1, 5], [63, 4, 64], [70, 1, 1], [65, 200]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefill_in_pieces_is_the_reference(
    shape: str, biased: bool, pieces: list[int], device: torch.device
) -> None:
    skip_large(device, shape)
    if device.type == "cpu" and shape != "odd" and (biased or pieces != [65, 200]):
        pytest.skip("takes long on a processor")
    of = parameters(shape, 2, device)
    oracle, first = on_cpu(of), 0
    for number, count in enumerate(pieces):
        rows = inputs(of, count, 10 + number)
        factor, bias = 2.0 ** torch.arange(-1, count - 1).remainder(5), 0.1 * rows[0] if biased else None
        product = Product((rows / factor[:, None] / 0.5).to(device), factor.to(device), 0.5, None)
        product = replace(product, bias=None if bias is None else bias.to(device))
        found = mamba_prefill(of, product, first, 1)
        assert_near(found, mixed(oracle, rows if bias is None else rows + bias, first, 1), 5e-5)
        first += count
    assert_same_state(
        replace(of, state=of.state[:, 1:], inputs=of.inputs[1:]),
        replace(oracle, state=oracle.state[:, 1:], inputs=oracle.inputs[1:]),
        [first],
        bound=5e-4 if shape == "one channel" else 2e-5,  # one number alone, of sums that nearly cancel
    )
    assert bool((of.state[:, 0] == 7).all()), "another sequence's"


@needs_compiler
@pytest.mark.parametrize("counted", [1, 63, 64, 65, 127])
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_that_do_not_count_change_no_state(shape: str, counted: int, device: torch.device) -> None:
    skip_large(device, shape)
    if device.type == "cpu" and shape not in ("odd", "one channel"):
        pytest.skip("takes long on a processor")
    of, alone = (parameters(shape, 1, device) for _ in range(2))
    rows, ones = inputs(of, 128, 4).to(device), torch.ones(128, device=device)
    number = torch.tensor([counted], dtype=torch.int32, device=device)
    found = mamba_prefill(of, Product(rows, ones, 1.0, None), 0, counted=number)
    expected = mamba_prefill(alone, Product(rows[:counted], ones[:counted], 1.0, None), 0)
    assert torch.equal(found[:counted], expected)
    assert bool(found.isfinite().all())
    assert torch.equal(of.state[counted % 2], alone.state[counted % 2])
    kept = [p % of.mixer.taps for p in range(max(0, counted - of.mixer.taps + 1), counted)]
    assert torch.equal(of.inputs[0, kept], alone.inputs[0, kept])


def test_heads_that_kernels_do_not_know_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="state-space models with states of 300 by 8, normed by 300 channels") as told:
        mamba_parameters(Mamba(1, 300, 1, 8, 4, 1), {}, EPS, 1, torch.device("cpu"))
    assert "\n" not in str(told.value)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    of = parameters("odd", 2, torch.device("cpu"))
    rows, positions, out = inputs(of, 2, 0), torch.zeros(2, dtype=torch.int32), torch.empty(2, of.mixer.inner)
    with pytest.raises(ValueError, match="rows"):
        mamba_step(of, rows[:1], positions, out)
    with pytest.raises(ValueError, match="out"):
        mamba_step(of, rows, positions, out[:, 1:])
