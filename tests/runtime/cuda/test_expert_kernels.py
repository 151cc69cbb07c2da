"""The router and the products of a token's experts on the GPU, against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from zigzag_cases import LIMIT, PLANES_LIMIT, assert_close, normal, random_matrix, weights

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, PackedMatrix, decode_matrix
from sparsepack.models.blocks import CLAMPED_SWIGLU, Router
from sparsepack.models.sites import levels_read
from sparsepack.runtime.cuda.decoder.model import ACTIVATIONS
from sparsepack.runtime.cuda.driver.memory import SENTINEL, flag_in_data_buffers
from sparsepack.runtime.cuda.products.experts import (
    CudaExperts,
    blocks,
    decode_experts,
    decoded_weights,
    load_experts,
    multiply_experts,
    route,
)
from sparsepack.runtime.cuda.products.gemm_fp16 import new_products
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.reference.products import gated, with_shared
from sparsepack.runtime.reference.products import route as reference_route

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("workspace_is_reset")]
EXPERTS = [
    *((8, 2, True, 0), (5, 1, False, 0), (3, 3, False, 0), (128, 8, True, 0), (70, 6, True, 0)),
    *((6, 2, True, 1), (60, 4, False, 4), (1, 1, False, 3)),
]
"""How many are chosen from, how many a token is given, whether weights are normalised, and how many it has besides."""
CONFIGS = [None, CudaTileConfig(1, 8, 24, 2), CudaTileConfig(2, 8, 16, 1), CudaTileConfig(4, 8, 8, 3)]


def random_experts(count: int, rows: int, columns: int, block: str = "Q4_K") -> PackedExperts:
    """Random matrices, few of which are alike."""
    few = torch.stack([random_matrix(rows, columns, seed=seed, block=block).blocks for seed in range(4)])
    return PackedExperts(few[torch.arange(count) * 5 % 7 % 4], MatrixFormat(block, "zigzag"), rows, columns)


def matrix_of(stored: PackedExperts, number: Tensor) -> Tensor:
    return weights(stored.expert(int(number)))


def loaded(
    stored: PackedExperts, used: int, normalised: bool, config: CudaTileConfig | None, **how: Any
) -> CudaExperts:
    if how.get("gate") and config and config.tile_bands == 1:
        pytest.skip("a band of gate beside one of up")
    experts = load_experts(stored, used, normalised, "cuda", config, **how)
    if blocks(experts) > torch.cuda.get_device_properties(0).multi_processor_count:
        pytest.skip("more blocks than this GPU runs at once")
    return experts


def chosen_of(logits: Tensor, used: int, normalised: bool, shared: int) -> tuple[Tensor, Tensor]:
    """The experts of a token and their weights, by its logits [count], or [count + 1] with shared ones: float64."""
    count = len(logits) - bool(shared)
    of_router, of_shared = logits[None, :count].double(), logits[None, count:].double()
    one = torch.eye(count, device=logits.device).double()
    chosen, weights = reference_route(of_router, one, used, normalised)
    if shared:
        chosen, weights = with_shared(of_shared, one[:1, :1], range(count, count + shared), chosen, weights)
    return chosen[0], weights[0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize(("count", "hidden"), [(8, 64), (128, 2048), (3, 9001), (70, 300)])
def test_logits_of_a_router(count: int, hidden: int, texts: int, biased: bool) -> None:
    router, norm, x = normal(count, hidden), normal(hidden, seed=1), normal(texts, hidden, seed=2)
    squares = torch.stack([part.square().sum(1) for part in x.tensor_split(7, 1)], 1).contiguous()
    logits = torch.full((texts, count), float("nan"), device="cuda")
    bias = normal(count, seed=3) if biased else None
    route(router, Input(x, norm=norm, eps=1e-5, squares=squares), logits, bias)
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * norm.double()
    assert_close(logits, normed @ router.double().t() + (0 if bias is None else bias.double()), 3e-6)
    first = logits.clone()
    route(router, Input(x, norm=norm, eps=1e-5, squares=squares), logits, bias)
    assert torch.equal(first, logits)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("count", "used", "normalised", "shared"), EXPERTS)
@pytest.mark.parametrize("block", ["Q4_K", "Q6_P"])
def test_the_chosen_ones_share_an_input_and_their_products_are_added(
    count: int, used: int, normalised: bool, shared: int, config: CudaTileConfig | None, block: str
) -> None:
    hidden, width, of_token = 300, 150, used + shared
    into = random_experts(count + shared, 2 * width, hidden, block)
    mid = random_experts(count + shared, hidden, width, block)
    first = loaded(into, used, normalised, config, shared=shared)
    second = loaded(mid, used, normalised, config, added=True, shared=shared)
    x, residual, limit = normal(hidden), normal(hidden, seed=1), torch.tensor([0.6], device="cuda")
    units, error = (BLOCKS[block].bytes, PLANES_LIMIT) if BLOCKS[block].levels else (1, LIMIT)
    logits = normal(count + bool(shared), seed=2)
    chosen, weight = chosen_of(logits, used, normalised, shared)
    of_in, of_mid = normal(count + shared, 2 * width, seed=5), normal(count + shared, hidden, seed=6)
    for threshold, biased in ((None, False), (None, True), (limit, False), (limit, True)):
        bias, bias_mid = (of_in, of_mid) if biased else (None, None)
        active = torch.zeros((), dtype=torch.int64, device="cuda")
        y = torch.full((of_token, 2 * width), float("nan"), device="cuda")
        multiply_experts(first, Input(x, threshold=threshold), Output(y, bias, active=active), logits=logits)
        kept = x if threshold is None else torch.where(x.abs() > threshold, x, 0)
        expected = torch.stack([matrix_of(into, number) @ kept.double() for number in chosen])
        expected = expected if bias is None else expected + bias[chosen].double()
        assert_close(y, expected, error)
        assert int(active) == of_token * units * int(kept.count_nonzero())

        inner, out = normal(of_token, width, seed=3), torch.full((hidden,), float("nan"), device="cuda")
        squares = torch.full((blocks(second),), float("nan"), device="cuda")
        active.zero_()
        for _ in range(2):
            multiply_experts(
                second,
                Input(inner, threshold=threshold),
                Output(out, bias_mid, residual, squares=squares, active=active),
                logits=logits,
            )
        kept = inner if threshold is None else torch.where(inner.abs() > threshold, inner, 0)
        each = [w * (matrix_of(mid, n) @ v.double()) for n, w, v in zip(chosen, weight, kept, strict=True)]
        each += [] if bias_mid is None else [w * bias_mid[n].double() for n, w in zip(chosen, weight, strict=True)]
        assert_close(out, torch.stack(each).sum(0) + residual.double(), error)
        assert float(squares.sum()) == pytest.approx(float(out.square().sum()), rel=3e-5)
        assert int(active) == 2 * units * int(kept.count_nonzero())


@pytest.mark.parametrize("texts", [1, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("count", "used", "normalised", "shared"), EXPERTS)
def test_experts_read_columns_at_levels_by_thresholds_of_their_own(
    count: int, used: int, normalised: bool, shared: int, config: CudaTileConfig | None, texts: int
) -> None:
    hidden, width, of_token, stored = 300, 150, used + shared, count + shared
    into, mid = random_experts(stored, 2 * width, hidden, "Q6_P"), random_experts(stored, hidden, width, "Q6_P")
    first = loaded(into, used, normalised, config, shared=shared)
    second = loaded(mid, used, normalised, config, added=True, shared=shared)
    x, residual = normal(texts, hidden), normal(texts, hidden, seed=1)
    inner, logits = normal(texts, of_token, width, seed=3), normal(texts, count + bool(shared), seed=2)
    of_in, of_mid = (
        2 * torch.rand(*shape, device="cuda").sort(-2).values for shape in ((5, hidden), (stored, 5, width))
    )
    scales, bytes = torch.linspace(0.8, 1.2, texts, device="cuda"), torch.tensor([0, *BLOCKS["Q6_P"].level_bytes])
    y, out = torch.empty(texts, of_token, 2 * width, device="cuda"), torch.empty(texts, hidden, device="cuda")
    active, skipped = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (2, texts))
    held = {"scales": scales, "skipped": skipped}
    multiply_experts(first, Input(x, threshold=of_in, **held), Output(y, active=active[0]), logits=logits)
    to = Output(out, residual=residual, active=active[1])
    multiply_experts(second, Input(inner, threshold=of_mid, **held), to, logits=logits)
    read = [0, 0]
    for text in range(texts):
        chosen, weight = chosen_of(logits[text], used, normalised, shared)
        levels = levels_read(x[text], scales[text] * of_in)
        expected = torch.stack([product_at(into.expert(int(n)), x[text], levels) for n in chosen])
        assert_close(y[text], expected, PLANES_LIMIT)
        read[0] += of_token * int(bytes[levels.cpu().long()].sum())
        unread = of_token * 2 * width * (hidden * 200 - int(bytes[levels.cpu().long()].sum()))
        added = residual[text].double()
        for n, w, v in zip(chosen, weight, inner[text], strict=True):
            levels = levels_read(v, scales[text] * of_mid[n])
            added = added + w * product_at(mid.expert(int(n)), v, levels)
            read[1] += int(bytes[levels.cpu().long()].sum())
            unread += hidden * (width * 200 - int(bytes[levels.cpu().long()].sum()))
        assert_close(out[text], added, PLANES_LIMIT)
        assert int(skipped[text]) == unread
    assert active.tolist() == read


def product_at(stored: PackedMatrix, x: Tensor, levels: Tensor) -> Tensor:
    """The product of x [columns], columns at levels: float64 [rows]."""
    y = torch.zeros(stored.rows, dtype=torch.float64, device=x.device)
    for level in range(1, 6):
        y += decode_matrix(stored, level).double().to(x.device) @ torch.where(levels == level, x.double(), 0)
    return y


def test_thresholds_of_levels_are_one_expert_s_where_products_are_added() -> None:
    stored = random_experts(5, 300, 64, "Q6_P")
    limits, logits, y = torch.ones(5, 5, 64, device="cuda"), normal(5), torch.zeros(300, device="cuda")
    added = load_experts(stored, 2, True, "cuda", added=True)
    with pytest.raises(ValueError, match=r"thresholds of levels \[5, 64\]: expected \[5, 'levels', 'columns'\]"):
        multiply_experts(added, Input(normal(2, 64), threshold=limits[0]), Output(y), logits=logits)
    alone = load_experts(stored, 2, True, "cuda")
    with pytest.raises(ValueError, match=r"\[5, 5, 64\]: expected \['levels', 'columns'\]"):
        multiply_experts(alone, Input(normal(64), threshold=limits), Output(y.new_zeros(2, 300)), logits=logits)


@pytest.mark.parametrize("config", [None, CudaTileConfig(2, 8, 16, 3), CudaTileConfig(4, 8, 8, 1)], ids=str)
@pytest.mark.parametrize(("count", "used", "normalised", "shared"), EXPERTS)
@pytest.mark.parametrize("held", [False, True])
def test_a_chain_from_the_router_to_the_sum_hands_its_results_on(
    count: int, used: int, normalised: bool, shared: int, held: bool, config: CudaTileConfig | None
) -> None:
    """Kernels that do not wait for each other's ends leave what kernels in turn leave, and count as much."""
    hidden, width, of_token, of_router = 300, 256, used + shared, count + bool(shared)
    into, mid = random_experts(count + shared, 2 * width, hidden), random_experts(count + shared, hidden, width)
    first = loaded(into, used, normalised, config, gate=True, shared=shared)
    second = loaded(mid, used, normalised, config, added=True, shared=shared)
    router, norm, x, limit = (
        normal(of_router, hidden),
        normal(hidden, seed=1),
        normal(hidden, seed=2),
        torch.full((1,), 0.4),
    )
    scales = torch.full((1,), 0.5, device="cuda")
    biases = [normal(count + shared, rows, seed=7) if held else None for rows in (2 * width, hidden)]
    activation = ACTIVATIONS[CLAMPED_SWIGLU if held else "silu"]

    def run(flag: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        words, (start, squares, logits, inner) = flag_in_data_buffers(
            [hidden, 1, of_router, of_token * width], x.device
        )
        y, last = torch.empty(hidden, device="cuda"), torch.empty(blocks(second), device="cuda")
        counts = torch.zeros(2, dtype=torch.int64, device="cuda")
        skipped = torch.zeros(1, dtype=torch.int64, device="cuda")
        for _ in range(5):
            start.copy_(x), squares.copy_(x.square().sum()[None])
            input = Input(start, norm=norm, eps=1e-5, squares=squares, flag_in_data=flag)
            route(router, input, logits)
            more = {"threshold": limit.cuda()} | ({"scales": scales, "skipped": skipped} if held else {})
            multiply_experts(
                first,
                replace(input, **more),
                Output(inner.view(of_token, -1), biases[0], activation=activation, active=counts[0]),
                logits=logits,
            )
            middle = Input(inner.view(of_token, -1), flag_in_data=flag, **more)
            to = Output(y, biases[1], start, squares=last, active=counts[1])
            multiply_experts(second, middle, to, logits=logits)
            torch.cuda.synchronize()
            words.fill_(SENTINEL)
        return y, last, counts, skipped

    for found, expected in zip(run(True), run(False), strict=True):
        assert_close(found, expected.double())
    y, _, counts, skipped = run(True)
    scale = 0.5 if held else 1.0
    normed = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * norm.double()
    chosen, weight = chosen_of(router.double() @ normed, used, normalised, shared)
    kept = torch.where(normed.abs() > 0.4 * scale, normed, 0)
    expected, active = x.double(), [of_token * int(kept.count_nonzero()), 0]
    for number, of_sum in zip(chosen, weight, strict=True):
        both = matrix_of(into, number) @ kept
        both = both if biases[0] is None else both + biases[0][number].double()
        gate, up = both.chunk(2)
        inner = gated(CLAMPED_SWIGLU if held else "silu", gate, up)
        inner = torch.where(inner.abs() > 0.4 * scale, inner, 0)
        active[1] += int(inner.count_nonzero())
        made = matrix_of(mid, number) @ inner
        expected = expected + of_sum * (made if biases[1] is None else made + biases[1][number].double())
    assert_close(y, expected, 1e-3)  # an input within rounding of the threshold may flip
    assert counts.tolist() == pytest.approx([5 * n for n in active], rel=0.02)
    if held:
        inactive = [of_token * hidden - active[0], of_token * width - active[1]]
        assert int(skipped) == pytest.approx(5 * (inactive[0] * 2 * width + inactive[1] * hidden), rel=0.02)


@pytest.mark.parametrize("texts", [2, 5, 8])
@pytest.mark.parametrize(("count", "used", "shared"), [(8, 2, 0), (40, 8, 0), (3, 3, 0), (60, 4, 4)])
def test_several_texts_have_their_own_experts(texts: int, count: int, used: int, shared: int) -> None:
    hidden, width, of_token = 900, 256, used + shared
    into, mid = random_experts(count + shared, 2 * width, hidden), random_experts(count + shared, hidden, width)
    first = loaded(into, used, True, None, gate=True, shared=shared)
    second = loaded(mid, used, True, None, added=True, shared=shared)
    x, limit = normal(texts, hidden), torch.tensor([0.4], device="cuda")
    logits = normal(texts, count + bool(shared), seed=1)
    inner = torch.empty(texts, of_token, width, device="cuda")
    y, squares = torch.empty(texts, hidden, device="cuda"), torch.empty(texts, blocks(second, texts), device="cuda")
    active, counted = (torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2))
    scales, skipped = 0.5 + torch.rand(texts, device="cuda"), torch.zeros(texts, dtype=torch.int64, device="cuda")
    of_one = torch.zeros(texts, dtype=torch.int64, device="cuda")
    held = {"threshold": limit, "scales": scales, "skipped": skipped}
    bias = normal(count + shared, hidden, seed=7)
    multiply_experts(first, Input(x, **held), Output(inner, activation=0, active=active[0]), logits=logits)
    multiply_experts(second, Input(inner, **held), Output(y, bias, x, squares=squares, active=active[1]), logits=logits)
    for text in range(texts):
        alone, out = torch.empty(of_token, width, device="cuda"), torch.empty(hidden, device="cuda")
        one = {"threshold": limit, "scales": scales[text : text + 1], "skipped": of_one[text : text + 1]}
        given = {"logits": logits[text]}
        multiply_experts(first, Input(x[text], **one), Output(alone, activation=0, active=counted[0]), **given)
        # Launches of one text and of several divide columns otherwise; tensor cores cut sums off: 1.0e-5 was measured.
        assert_close(inner[text], alone.double(), 3e-5)
        multiply_experts(second, Input(inner[text], **one), Output(out, bias, x[text], active=counted[1]), **given)
        assert_close(y[text], out.double(), 3e-5)
        assert float(squares[text].sum()) == pytest.approx(float(out.square().sum()), rel=3e-5)
    assert active.tolist() == counted.tolist()
    assert skipped.tolist() == of_one.tolist()


@pytest.mark.parametrize("config", [CudaTileConfig(2, 8, 16, 1), CudaTileConfig(4, 8, 8, 1)], ids=str)
@pytest.mark.parametrize(("rows", "gate"), [(300, False), (1536, True), (1536, False)])
def test_several_experts_are_decoded_together(rows: int, gate: bool, config: CudaTileConfig) -> None:
    stored = random_experts(5, rows, 70)
    experts = load_experts(stored, 2, True, "cuda", config, gate=gate)
    scratch = torch.full((decoded_weights(experts),), float("nan"), dtype=torch.float16, device="cuda")
    parts = decode_experts(experts, 1, 3, 2, scratch)
    for number in range(3):
        expected = matrix_of(stored, torch.tensor(1 + number)).chunk(2)
        for part, weight in zip(parts, expected, strict=True):
            assert_close(part[number].float().t() / experts.all.fp16_scale, weight, 1e-3)
    x = normal(3, 4, 70).half()
    for part in parts:
        assert_close(new_products(x, part), x.double() @ part.double(), 1e-4)


ROUTERS = [
    (16, 4, True, 2, Router(sigmoid=True, groups=4, groups_used=2, scale=2.5)),
    (256, 8, True, 1, Router(sigmoid=True, groups=8, groups_used=4, scale=2.5)),
    (66, 6, False, 0, Router(sigmoid=True)),
    (64, 4, True, 1, Router(sigmoid=True, scale=1.8)),
    (160, 6, False, 2, Router(groups=8, groups_used=3, scale=16.0)),
    (9, 3, True, 0, Router(groups=3, groups_used=1)),
    (64, 6, False, 2, Router(scale=1.0)),
]
"""As EXPERTS, and how they are chosen."""


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("count", "used", "normalised", "shared", "router"), ROUTERS, ids=str)
def test_routers_choose_as_the_reference(
    count: int, used: int, normalised: bool, shared: int, router: Router, corrected: bool, texts: int
) -> None:
    """Shared experts have no gate here; corrections are of sigmoids."""
    stored = random_experts(count + shared, 300, 64)
    correction = normal(count, seed=4) if corrected and router.sigmoid else None
    logits, x, residual = normal(texts, count, seed=2), normal(texts, used + shared, 64), normal(texts, 300, seed=1)
    one = torch.eye(count, device="cuda").double()
    of_correction = None if correction is None else correction.double()
    chosen, weights = reference_route(logits.double(), one, used, normalised, None, router, of_correction)
    if shared:
        chosen, weights = with_shared(logits.double(), None, range(count, count + shared), chosen, weights)
    for added in (False, True):
        experts = loaded(stored, used, normalised, None, added=added, shared=shared)
        together = replace(experts.together, routing=router, shared_gate=False)
        experts = replace(experts, together=together, correction=correction)
        y = torch.full((texts, 300) if added else (texts, used + shared, 300), float("nan"), device="cuda")
        output, of_all = Output(y, residual=residual if added else None), x if added else x[:, 0].contiguous()
        multiply_experts(experts, Input(of_all), output, logits=logits)
        for text in range(texts):
            matrices = torch.stack([matrix_of(stored, number) for number in chosen[text]])
            rows = x[text] if added else x[text, :1].expand(used + shared, -1)
            made = torch.einsum("erc,ec->er", matrices.double(), rows.double())
            expected = residual[text].double() + weights[text] @ made if added else made
            assert_close(y[text], expected, LIMIT)


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize(("count", "used", "shared"), [(8, 2, 1), (128, 8, 3), (5, 5, 2)])
def test_chosen_and_shared_experts_are_added_apart(count: int, used: int, shared: int, texts: int) -> None:
    stored, scale = random_experts(count + shared, 300, 704), 0.5 + normal(count + shared, seed=9).abs()
    whole = loaded(stored, used, True, None, added=True, shared=shared)
    whole = replace(whole, together=replace(whole.together, shared_gate=False), scale=scale)
    logits, x, residual = normal(texts, count, seed=2), normal(texts, used + shared, 704), normal(texts, 300, seed=1)
    chosen, weights = reference_route(logits.double(), torch.eye(count, device="cuda").double(), used, True)
    weights = torch.cat([weights * scale[chosen], scale[count:].double().expand(texts, -1)], 1)
    numbers = [*range(count, count + shared)]
    for part, slots in (("chosen", range(used)), ("shared", range(used, used + shared))):
        y = torch.full((texts, 300), float("nan"), device="cuda")
        active = torch.zeros((), dtype=torch.int64, device="cuda")
        multiply_experts(whole.part(part), Input(x), Output(y, residual=residual, active=active), logits=logits)
        for text in range(texts):
            of_text = [*chosen[text].tolist(), *numbers]
            made = [weights[text, slot] * (matrix_of(stored, of_text[slot]) @ x[text, slot].double()) for slot in slots]
            assert_close(y[text], residual[text].double() + sum(made), LIMIT)
        assert int(active) == texts * len(slots) * 704


def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    experts = load_experts(random_experts(5, 300, 64), 2, True, "cuda", added=True)
    y = torch.zeros(300, device="cuda")
    multiply_experts(experts, Input(normal(2, 64)), Output(y), logits=torch.full((5,), float("nan"), device="cuda"))
    assert y.isnan().all()
