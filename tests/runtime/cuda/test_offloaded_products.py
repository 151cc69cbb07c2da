"""The kernels by which a GPU shares a product with the processor: what they ask, and what they make of an answer.

Where there is no GPU, the processor runs the same source (`emulated.py`), and torch makes the product between them.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Emulation, needs_compiler
from operations_for_tests import normal, packed
from pairwise import each_value
from torch import Tensor
from zigzag_cases import random_matrix

from sparsepack.formats.matrix import decode_matrix
from sparsepack.runtime.cuda.driver.memory import DividedPlace, in_host_memory, on_card, shared_memory
from sparsepack.runtime.cuda.products import offloaded, zigzag, zigzag_products
from sparsepack.runtime.cuda.products.offloaded import OffloadedProduct
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, offloaded_tile_config
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.hybrid.mailbox import LAST_NUMBER, Abort, Mailbox, ProductRequest
from sparsepack.runtime.reference import products as reference

EPS = 1e-5


@pytest.fixture(
    params=[
        pytest.param("cpu", id="emulated", marks=needs_compiler),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Kernels of `offloaded` run here."""
    if request.param == "cpu":
        for name in ("kernel", "launch"):
            monkeypatch.setattr(offloaded, name, getattr(emulation, name))
    return torch.device(request.param)


class Shared:
    """A product of which the GPU has `near` bands, and the memory as the processor sees it."""

    def __init__(
        self,
        device: torch.device,
        rows: int,
        columns: int,
        near: int,
        texts: int,
        step: int = 7,
        before_list: bool = False,
    ) -> None:
        matrix = packed(rows, columns)
        self.weight = decode_matrix(matrix).double()
        asked = ProductRequest(0, columns, rows - 256 * near)
        self.layout = Mailbox(1, 32, 256, texts, (asked,))
        self.device, on_gpu = device, device.type == "cuda"
        if on_gpu:
            self.memory, there = shared_memory(self.layout.size, device, "a test")
        else:
            self.memory = np.zeros(self.layout.size, np.uint8)
            there = torch.from_numpy(self.memory)
        (at,) = self.layout.places

        def part(begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return there[begin : begin + 4 * torch.Size(shape).numel()].view(dtype).view(shape)

        loaded: Any = SimpleNamespace(rows=min(rows, 256 * near))
        if on_gpu:
            config = offloaded_tile_config(len(matrix.blocks), columns, device, tile_bands=2 - near % 2)
            loaded = offloaded.first_bands(zigzag.load_zigzag(matrix, device, config, place=in_host_memory), near)
        self.step, self.at = step, at
        number = [step - 1 if step > 1 else LAST_NUMBER, 0] if before_list else [step, 0]
        self.of = OffloadedProduct(
            gpu_part=loaded,
            rows=rows,
            sums=torch.zeros(texts, loaded.rows, device=device),
            number=torch.tensor(number, dtype=torch.int32, device=device),
            before_list=before_list,
            abort=part(self.layout.abort, torch.int32, 1),
            request_number=part(at.request, torch.int32, 1),
            request_x=part(at.x, torch.float32, texts, columns),
            answer_number=part(at.answer, torch.int32, 1),
            answer=part(at.y, torch.float32, texts, asked.rows),
            waited=torch.zeros(1, dtype=torch.int64, device=device),
            limit=50,
        )

    def words(self, begin: int, kind: type, *shape: int) -> np.ndarray:
        return self.memory[begin : begin + 4 * int(np.prod(shape))].view(kind).reshape(shape)

    def answer(self, x: Tensor) -> None:
        """What the processor would have answered already."""
        rest = (x.double() @ self.weight[self.of.gpu_part.rows :].t()).float()
        self.words(self.at.y, np.float32, *rest.shape)[:] = rest.numpy()
        self.words(self.at.answer, np.int32, 1)[:] = self.step

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def multiply(self, input: Input, output: Output, multiplied: Tensor) -> None:
        """The whole product. multiplied -- what a product makes of the input, for the processor's stand-in"""
        self.answer(multiplied)
        if self.device.type == "cuda":
            multiply = zigzag_products.gemv if len(multiplied) == 1 else zigzag_products.batch
            offloaded.multiply(self.of, multiply, input, output)
            return self.wait()
        offloaded.ask(self.of, input)
        self.of.sums.copy_(multiplied.double() @ self.weight[: self.of.gpu_part.rows].t())
        if output.active is not None:
            output.active.add_((multiplied != 0).any(0).sum())
        offloaded.take(self.of, output)


@each_value({"before_list": [False, True], "normed": [False, True], "texts, columns": [(1, 256), (1, 5120), (3, 1301)]})
def test_the_processor_is_asked_with_the_normed_input(
    texts: int, columns: int, normed: bool, before_list: bool, device: torch.device
) -> None:
    if device.type == "cpu" and columns > 2000:
        pytest.skip("a GPU tests it; the processor takes long")
    shared = Shared(device, 600, columns, 1, texts, step=1 if before_list else 9, before_list=before_list)
    x, weight = normal(texts, columns, seed=1) * 3, 1 + 0.1 * normal(columns, seed=2)
    offloaded.ask(shared.of, Input(x.to(device), weight.to(device) if normed else None, EPS))
    shared.wait()
    found = torch.from_numpy(shared.words(shared.at.x, np.float32, texts, columns).copy())
    torch.testing.assert_close(found, reference.rms_norm(x, weight, EPS) if normed else x)
    assert shared.words(shared.at.request, np.int32, 1)[0] == shared.step


def limits_amid_gaps(magnitudes: Tensor, per_channel: bool) -> Tensor:
    """Thresholds near the 0.6 quantile of float32 [texts, columns] that no magnitude lies near, so that the last bit of
    an input never decides."""
    values = magnitudes.flatten().sort().values
    if not per_channel:
        window = values[int(0.55 * len(values)) : int(0.65 * len(values))]
        at = int(window.diff().argmax())
        return window[at : at + 2].mean().reshape(1)
    spread = torch.rand(magnitudes.shape[1], generator=torch.Generator().manual_seed(8))
    limits = values[int(0.6 * len(values))] * (0.5 + spread)
    for _ in range(20):
        limits = torch.where(((magnitudes / limits - 1).abs() < 1e-3).any(0), 1.01 * limits, limits)
    return limits


def skipping(texts: int, columns: int, kind: str, gated: bool, device: torch.device) -> tuple[Input, Tensor, Tensor]:
    """An input that skips columns, with what a product then multiplies, and how many columns each text skips."""
    given = normal(texts, columns * (2 if gated else 1), seed=6)
    x = reference.ACTIVATION_FUNCTIONS["silu"](given[:, :columns]) * given[:, columns:] if gated else given
    offset = 0.1 * normal(columns, seed=7) if "offset" in kind else None
    x = x if offset is None else x - offset
    scales = 0.5 + torch.arange(texts) / 2 if "held" in kind else torch.ones(texts)
    threshold = limits_amid_gaps(x.abs() / scales[:, None], "channel" in kind)
    active = x.abs() > scales[:, None] * threshold
    held = "held" in kind
    input = Input(
        given[0].to(device) if texts == 1 else given.to(device),
        threshold=threshold.to(device),
        offset=None if offset is None else offset.to(device),
        scales=scales.to(device) if held else None,
        skipped=torch.zeros(texts, dtype=torch.int64, device=device) if held else None,
        gated=0 if gated else None,
    )
    return input, torch.where(active.any(0), x, 0), (~active).sum(1)


@each_value(
    {
        "gated": [False, True],
        "kind": ["one", "channel", "offset", "channel, offset", "held", "channel, held"],
        "texts, columns": [(1, 256), (1, 14_336), (3, 1301), (8, 5120)],
    }
)
def test_both_sides_leave_out_what_no_text_needs(
    texts: int, columns: int, kind: str, gated: bool, device: torch.device
) -> None:
    if device.type == "cpu" and (columns > 2000 or kind in ("channel", "offset", "held")):
        pytest.skip("a GPU tests it; the processor takes long")
    shared = Shared(device, 1301, columns, 2, texts)
    input, x, inactive = skipping(texts, columns, kind, gated, device)
    y, before = torch.zeros(texts, 1301, device=device), normal(texts, 1301, seed=9)
    active = torch.zeros((), dtype=torch.int64, device=device)
    shared.multiply(input, Output(y, residual=before.to(device), active=active), x)
    asked = torch.from_numpy(shared.words(shared.at.x, np.float32, texts, columns).copy())
    assert torch.equal(asked != 0, x != 0)
    torch.testing.assert_close(asked, x)
    expected = x.double() @ shared.weight.t() + before
    typical = (x.double().square() @ shared.weight.square().t()).sqrt().mean()
    assert float((y.cpu() - expected).abs().max()) < 1e-3 * typical
    assert int(active) == int((x != 0).any(0).sum())
    if input.skipped is not None:
        assert (input.skipped.cpu() == 1301 * inactive).all()


@each_value(
    {
        "squares": [0, 1, 37, 132],
        "rows, columns, near": [(300, 256, 1), (1301, 768, 3), (13_824, 512, 19)],
        "texts": [1, 3],
    }
)
def test_rows_of_both_sides_make_the_product(
    rows: int, columns: int, near: int, texts: int, squares: int, device: torch.device
) -> None:
    if device.type == "cpu" and (rows > 2000 or squares not in (0, 37)):
        pytest.skip("a GPU tests it; the processor takes long")
    shared = Shared(device, rows, columns, near, texts)
    x, bias, before = normal(texts, columns, seed=3), normal(rows, seed=4), normal(texts, rows, seed=5)
    y = before.clone().to(device)
    parts = torch.full((texts, squares), -1.0, device=device) if squares else None
    active = torch.zeros((), dtype=torch.int64, device=device)
    input = Input((x[0] if texts == 1 else x).to(device))
    shared.multiply(input, Output(y, bias=bias.to(device), residual=y, squares=parts, active=active), x)
    expected = x.double() @ shared.weight.t() + bias + before
    typical = (x.double().square() @ shared.weight.square().t()).sqrt().mean()
    assert float((y.cpu() - expected).abs().max()) < 1e-3 * typical
    assert int(active) == columns
    if parts is not None:
        torch.testing.assert_close(parts.sum(1).cpu(), y.cpu().square().sum(1))
    assert int(shared.of.abort) == Abort.GOES_ON


@each_value({"kind": ["levels", "levels, held", "column", "one", "none"], "texts, columns": [(1, 256), (3, 501)]})
def test_of_planes_levels_are_asked_for_and_both_sums_added(
    texts: int, columns: int, kind: str, device: torch.device
) -> None:
    rows, near = 700, 1
    stored = random_matrix(rows, columns, block="Q6_P")
    asked = ProductRequest(0, columns, rows - 256 * near, levels=True)
    layout = Mailbox(1, 0, 256, texts, (asked,))
    (at,) = layout.places
    if device.type == "cuda":
        memory, there = shared_memory(layout.size, device, "a test")
        place = DividedPlace(2, on_card, in_host_memory)
        loaded = zigzag.load_zigzag(stored, device, CudaTileConfig(1, 8, 16, 2), place=place)
        gpu_part: Any = offloaded.rest_of_first_bands(loaded, near)
    else:
        memory = np.zeros(layout.size, np.uint8)
        there, gpu_part = torch.from_numpy(memory), SimpleNamespace(rows=rows, block="Q6_P")

    def part(begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return there[begin : begin + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)

    of = OffloadedProduct(
        gpu_part=gpu_part,
        rows=rows,
        sums=torch.zeros(texts, rows, device=device),
        number=torch.tensor([7, 0], dtype=torch.int32, device=device),
        before_list=False,
        abort=part(layout.abort, torch.int32, 1),
        request_number=part(at.request, torch.int32, 1),
        request_x=part(at.x, torch.float32, texts, columns),
        answer_number=part(at.answer, torch.int32, 1),
        answer=part(at.y, torch.float32, texts, asked.rows),
        waited=torch.zeros(1, dtype=torch.int64, device=device),
        limit=50,
        levels=part(at.levels, torch.uint8, columns),
        x=torch.zeros(texts, columns, device=device),
    )
    x, norm = normal(texts, columns, seed=3), 1 + 0.1 * normal(columns, seed=2)
    normed = reference.rms_norm(x, norm, EPS)
    scales = 0.5 + torch.arange(texts) / 2 if "held" in kind else torch.ones(texts)
    limits = torch.tensor([0.2, 0.5, 0.8, 1.2, 1.9])[:, None] * (0.7 + normal(columns, seed=4).abs())
    limits[3:, ::7] = torch.inf
    threshold = {"one": limits[1, :1], "column": limits[1], "none": None}.get(kind, limits)
    levels = torch.full((columns,), 5)
    if threshold is not None:
        of_planes = threshold if threshold.dim() == 2 else threshold.expand(1, columns)
        exceeded = (normed.abs()[:, None] > scales[:, None, None] * of_planes).sum(1).amax(0)
        levels = exceeded if threshold.dim() == 2 else 5 * exceeded
    input = Input(
        (x[0] if texts == 1 else x).to(device),
        norm.to(device),
        EPS,
        threshold=None if threshold is None else threshold.to(device),
        scales=scales.to(device) if "held" in kind else None,
    )
    answered = normal(texts, asked.rows, seed=8)
    memory[at.y : at.y + 4 * answered.numel()].view(np.float32)[:] = answered.flatten().numpy()
    memory[at.answer : at.answer + 4].view(np.int32)[:] = 7
    y, bias = torch.zeros(texts, rows, device=device), normal(rows, seed=9)
    output = Output(y, bias=bias.to(device))
    without = stored.blocks.clone()
    without[near:, :, stored.levels[1] :] = 0  # what the processor multiplies
    by_gpu = replace(stored, blocks=without)
    sums = sum(
        torch.where(levels == level, normed.double(), 0) @ decode_matrix(by_gpu, level).double().t()
        for level in range(1, 6)
    )
    if device.type == "cuda":
        multiply = zigzag_products.gemv if texts == 1 else zigzag_products.batch
        offloaded.multiply(of, multiply, input, output)
        torch.cuda.synchronize()
    else:
        offloaded.ask(of, input)
        of.sums.copy_(torch.as_tensor(sums))
        offloaded.take(of, output)
    near_limit = 0
    if threshold is not None:  # the last bit of a norm may decide
        near_limit = int(((normed.abs()[:, None] / (scales[:, None, None] * of_planes) - 1).abs() < 1e-5).sum())
    told = torch.from_numpy(memory[at.levels : at.levels + columns].copy()).long()
    assert int((told != levels).sum()) <= near_limit
    assert int(of.request_number) == 7
    asked_x = torch.from_numpy(memory[at.x : at.x + 4 * normed.numel()].view(np.float32).copy()).view_as(normed)
    torch.testing.assert_close(asked_x, torch.where(told > 0, normed, 0))
    torch.testing.assert_close(of.x.cpu(), normed)
    expected = torch.as_tensor(sums) + torch.nn.functional.pad(answered, (256 * near, 0)) + bias
    assert float((y.cpu() - expected).abs().max()) < (2e-3 if not near_limit else 0.1) * float(expected.abs().max())


def test_an_answer_that_never_comes_is_given_up(device: torch.device) -> None:
    shared = Shared(device, 600, 256, 1, 1)
    offloaded.take(shared.of, Output(torch.zeros(1, 600, device=device)))
    shared.wait()
    assert int(shared.of.abort) == Abort.DEVICE_WAITED
    assert int(shared.of.waited) >= 50e6


@pytest.mark.parametrize(("number", "following"), [(0, 1), (7, 8), (LAST_NUMBER, 1)])
def test_the_next_step_has_the_next_number(number: int, following: int, device: torch.device) -> None:
    there = torch.tensor([number, 3], dtype=torch.int32, device=device)
    offloaded.count_step(there)
    assert there.tolist() == [following, 3]
