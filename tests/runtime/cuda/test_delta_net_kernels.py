"""The kernels of gated delta nets against the reference, token by token: on a GPU, and as the processor runs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from simulated_delta_net import mixed
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.blocks import DeltaNet
from sparsepack.runtime.cuda.attention import delta_net, state_chunks
from sparsepack.runtime.cuda.attention.delta_net import (
    DeltaNetParameters,
    delta_net_parameters,
    delta_prefill,
    delta_step,
)
from sparsepack.runtime.cuda.attention.states import States
from sparsepack.runtime.cuda.driver.memory import SENTINEL, flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input

EPS = 1e-5
SHAPES = {
    "odd": (DeltaNet(2, 6, 8, 12, 3), 40),
    "rows of vectors": (DeltaNet(1, 2, 128, 12, 4), 64),
    "released": (DeltaNet(16, 32, 128, 128, 4), 2048),
    "a head of each": (DeltaNet(3, 3, 33, 40, 2), 515),
    "wide": (DeltaNet(1, 4, 256, 250, 5), 9001),
    "one channel": (DeltaNet(1, 1, 1, 1, 1), 1),
}


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        for module in (delta_net, state_chunks):
            monkeypatch.setattr(module, "kernel", emulation.kernel)
            monkeypatch.setattr(module, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def skip_large(device: torch.device, shape: str) -> None:
    if device.type == "cpu" and shape not in ("odd", "rows of vectors", "one channel"):
        pytest.skip("takes long on a processor")


def parameters(shape: str, texts: int, device: torch.device) -> DeltaNetParameters:
    """Random ones, whose states and inputs are those of another text."""
    mixer, hidden = SHAPES[shape]
    random = torch.Generator().manual_seed(hidden)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    of = {
        "delta_beta": normal(mixer.value_heads, hidden) / hidden**0.5,
        "delta_alpha": normal(mixer.value_heads, hidden) / hidden**0.5,
        "delta_conv": normal(mixer.channels, mixer.taps) / mixer.taps**0.5,
        "delta_a_log": normal(mixer.value_heads) - 1,
        "delta_dt_bias": normal(mixer.value_heads),
        "delta_norm": 1 + 0.2 * normal(mixer.value_dim),
    }
    found = delta_net_parameters(mixer, of, EPS, texts, device)
    found.state.fill_(7.0)
    found.inputs.fill_(7.0)
    return found


def on_cpu(of: DeltaNetParameters) -> DeltaNetParameters:
    names = ("gates", "taps", "rate", "dt_bias", "norm", "state", "inputs")
    return replace(of, **{name: getattr(of, name).cpu().clone() for name in names})


def inputs(of: DeltaNetParameters, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """What attn_in leaves and takes for so many tokens, the latter before its norm."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, width, generator=random) for width in (of.width, of.gates.shape[1]))  # type: ignore[return-value]


def assert_near(found: Tensor, expected: Tensor, bound: float = 2e-5) -> None:
    """Outputs are about one, as their norm leaves them; that of a head which reads nearly nothing divides by little."""
    error = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < bound


def assert_same_state(of: DeltaNetParameters, expected: DeltaNetParameters, lengths: list[int]) -> None:
    for n, length in enumerate(lengths):
        found, wanted = (each.state[length % 2, n].cpu() for each in (of, expected))
        assert_near(found, wanted)
        taps = of.mixer.taps
        kept = [p % taps for p in range(max(0, length - taps + 1), length)]
        torch.testing.assert_close(of.inputs[n, kept].cpu(), expected.inputs[n, kept], rtol=1e-5, atol=1e-5)


def step(of: DeltaNetParameters, rows: Tensor, x: Tensor, norm: Tensor, lengths: list[int], flag: bool) -> Tensor:
    device, count = of.state.device, len(lengths)
    words, (there, of_x) = flag_in_data_buffers([rows.numel(), x.numel()], device)
    there.copy_(rows.flatten()), of_x.copy_(x.flatten())
    out = torch.full((count, of.mixer.values), torch.nan, device=device)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device)
    input = Input(of_x.view(count, -1), norm.to(device), EPS, flag_in_data=flag)
    delta_step(of, there.view(count, -1), input, positions, out, flag_in_data=flag)
    assert bool((words != SENTINEL).any())
    return out


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_the_reference(shape: str, device: torch.device) -> None:
    skip_large(device, shape)
    of = parameters(shape, 3, device)
    oracle, norm = on_cpu(of), 1 + 0.2 * torch.randn(of.gates.shape[1], generator=torch.Generator().manual_seed(1))
    lengths = [0, 0, 0]
    for number in range(7):
        rows, x = inputs(of, 3, number)
        found = step(of, rows, x, norm, lengths, flag=False)
        normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm
        for n, length in enumerate(lengths):
            assert_near(found[n], mixed(oracle, rows[n, None], normed[n, None], length, n)[0])
        # The last one stands still every other time: what it computed is forgotten.
        lengths = [length + (n < 2 or number % 2 == 0) for n, length in enumerate(lengths)]
        assert_same_state(of, oracle, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_with_their_flag_in_the_data_are_read_the_same(shape: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    one, other = (parameters(shape, 1, device) for _ in range(2))
    norm = torch.ones(one.gates.shape[1])
    for length in range(4):
        rows, x = inputs(one, 1, length)
        assert torch.equal(step(one, rows, x, norm, [length], True), step(other, rows, x, norm, [length], False))
    assert torch.equal(one.state, other.state)


@needs_compiler
@pytest.mark.parametrize("pieces", [[1], [2, 1, 5], [63, 4, 64], [70, 1, 1], [65, 200]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefill_in_pieces_is_the_reference(
    shape: str, biased: bool, pieces: list[int], device: torch.device
) -> None:
    skip_large(device, shape)
    if device.type == "cpu" and shape != "one channel" and (pieces, biased) != ([2, 1, 5], shape == "odd"):
        pytest.skip("takes long on a processor")
    of = parameters(shape, 2, device)
    oracle, first = on_cpu(of), 0
    for number, count in enumerate(pieces):
        rows, x = inputs(of, count, 10 + number)
        factor, bias = 2.0 ** torch.arange(-1, count - 1).remainder(5), 0.1 * rows[0] if biased else None
        values, scale = (x / 4).half(), torch.full((count,), 4.0)
        product = Product((rows / factor[:, None] / 0.5).to(device), factor.to(device), 0.5, None)
        product = replace(product, bias=None if bias is None else bias.to(device))
        scaled = ScaledFp16(values.to(device), scale.to(device))
        found = delta_prefill(of, product, scaled, first, 1)
        whole = rows if bias is None else rows + bias
        # The norm of a head with one channel divides what is nearly nothing by itself.
        bound = 5e-4 if shape == "one channel" else 5e-5
        assert_near(found, mixed(oracle, whole, values.float() * scale[:, None], first, 1), bound)
        first += count
    assert_same_state(
        replace(of, state=of.state[:, 1:], inputs=of.inputs[1:]),
        replace(oracle, state=oracle.state[:, 1:], inputs=oracle.inputs[1:]),
        [first],
    )
    assert bool((of.state[:, 0] == 7).all()), "another sequence's"


@needs_compiler
@pytest.mark.parametrize("counted", [1, 63, 64, 65, 127])
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_that_do_not_count_change_no_state(shape: str, counted: int, device: torch.device) -> None:
    skip_large(device, shape)
    if device.type == "cpu" and shape != "one channel":
        pytest.skip("takes long on a processor")
    of, alone = (parameters(shape, 1, device) for _ in range(2))
    rows, x = (each.to(device) for each in inputs(of, 128, 4))
    ones = torch.ones(128, device=device)
    product, scaled = Product(rows, ones, 1.0, None), ScaledFp16(x.half(), ones)
    found = delta_prefill(of, product, scaled, 0, counted=torch.tensor([counted], dtype=torch.int32, device=device))
    some = slice(counted)
    product = replace(product, sums=rows[some], factor=ones[some])
    expected = delta_prefill(alone, product, ScaledFp16(scaled.values[some], ones[some]), 0)
    # Not to the bit: cuBLAS may sum the gates of other numbers of rows in another order.
    assert_near(found[some], expected.cpu())
    assert bool(found.isfinite().all())
    assert_near(of.state[counted % 2], alone.state[counted % 2].cpu())
    kept = [p % of.mixer.taps for p in range(max(0, counted - of.mixer.taps + 1), counted)]
    assert torch.equal(of.inputs[0, kept], alone.inputs[0, kept])


def test_heads_that_kernels_do_not_know_are_refused_in_one_line() -> None:
    mixer = DeltaNet(1, 1, 300, 8, 4)
    of = dict.fromkeys(("delta_beta", "delta_alpha"), torch.zeros(1, 64))
    with pytest.raises(UserError, match="gated delta nets with heads of 300 and 8 channels, 64 wide") as told:
        delta_net_parameters(mixer, of, EPS, 1, torch.device("cpu"))
    assert "\n" not in str(told.value)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    of = parameters("odd", 2, torch.device("cpu"))
    rows, x = inputs(of, 2, 0)
    positions, out = torch.zeros(2, dtype=torch.int32), torch.empty(2, of.mixer.values)
    with pytest.raises(ValueError, match="rows"):
        delta_step(of, rows[:1], Input(x, x[0]), positions, out)
    with pytest.raises(ValueError, match="without a norm"):
        delta_step(of, rows, Input(x), positions, out)


class TestStates:
    def states(self) -> States:
        return States({0: parameters("odd", 2, torch.device("cpu"))}, 2)

    def test_what_is_kept_is_that_after_the_last_token_alone(self) -> None:
        states = self.states()
        states.prefilled(0, 5)
        states.check([5, 0], [0, 1])
        for length in (3, 4, 6):
            with pytest.raises(UserError, match=r"sequence 0 is that after 5 tokens.*begin the sequence anew"):
                states.check([length, 0], [0])
        states.check([0, 0], [0])
        states.check([0, 0], [0])

    def test_an_interrupted_prefill_leaves_nothing(self) -> None:
        states = self.states()
        states.prefilled(0, 5)
        states.begin_prefill(0)
        with pytest.raises(UserError, match="of an interrupted text, 5 are in the context"):
            states.check([5, 0], [0])

    def test_a_full_text_that_stands_still_loses_its_last_token(self) -> None:
        states = self.states()
        states.stepped(0, 8)
        states.stood_still(0, 7)
        states.check([7, 0], [0])
        states.prefilled(1, 8)
        states.stood_still(1, 7)
        with pytest.raises(UserError, match="interrupted"):
            states.check([7, 7], [1])

    def test_a_recorded_step_leaves_the_last_state_alone(self) -> None:
        states = self.states()
        states.stepped(0, 8)
        states.recorded()
        states.check([8, 0], [0])
        states.stood_still(0, 7)
        with pytest.raises(UserError, match="begin the sequence anew"):
            states.check([7, 0], [0])

    def test_copies_have_both_halves(self) -> None:
        of = parameters("odd", 2, torch.device("cpu"))
        states = States({0: of}, 2)
        of.state[:, 0], of.inputs[0] = 3.0, 4.0
        states.stepped(0, 8)
        states.copy(0, 1)
        states.check([8, 8], [1])
        assert bool((of.state[:, 1] == 3).all())
        assert bool((of.inputs[1] == 4).all())
