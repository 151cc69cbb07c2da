"""Products with slid weights on the GPU are those of the reference, by our kernel and by the library."""

from collections.abc import Callable

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.errors import PackingError, UserError
from sparsepack.formats.orders.slide import Slide, encode
from sparsepack.integration.transformers.linears import Sparse24Linear
from sparsepack.models.pattern import Pattern, kept
from sparsepack.runtime.cuda.slide import hopper, product
from sparsepack.runtime.cuda.slide.product import quantise_slide
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import prepare, sparse24_linear

pytestmark = pytest.mark.gpu

PATTERNS = [Pattern(2, 4), Pattern(4, 6), Pattern(6, 8), Pattern(8, 10), Pattern(14, 16)]
FP8 = torch.float8_e4m3fn
TYPES = [torch.int8, FP8, torch.bfloat16]
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = 2**-7
"""Of the largest output: sums in bfloat16 where the library makes them, FP8 summed in 14 bits by the tensor cores. That
integers are exact has a test of its own."""


@pytest.fixture(params=["ours", "the library"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What makes the products, whatever the GPU is."""
    arch = torch.cuda.get_device_capability()
    if request.param == "ours" and arch != (9, 0):
        pytest.skip("our kernel is for Hopper")
    if request.param == "the library":
        monkeypatch.setattr(product, "architecture", lambda device: 89)  # Ada, which has FP8
    return str(request.param)


def matrix(rows: int, columns: int, pattern: Pattern, dtype: torch.dtype) -> Sparse24Matrix:
    weight = normal(rows, columns, seed=rows)
    how = Slide(pattern)
    return Sparse24Matrix(*encode(weight * kept(weight.abs(), pattern), how, dtype), how, columns)


def on_gpu(m: Sparse24Matrix) -> Sparse24Matrix:
    return Sparse24Matrix(
        m.values.cuda(), m.positions.cuda(), None if m.scale is None else m.scale.cuda(), m.how, m.columns
    )


def operator(m: Sparse24Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Products with a matrix on the GPU, once it is prepared for inputs of a type."""
    prepared = prepare(m, dtype)
    return lambda x: sparse24_linear(x, m, bias, prepared)


def expected(m: Sparse24Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    y = reference.slide_matmul(m, *reference.quantise_slide(x, m.how, m.values.dtype))
    return y if bias is None else y + bias.float()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    difference = (found.float().cpu() - wanted).abs().max()
    assert difference <= TOLERANCE * wanted.abs().max(), float(difference / wanted.abs().max())


@pytest.mark.parametrize("out", OUTPUTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(256, 512, 64), (200, 1000, 1), (77, 333, 17), (1000, 2048, 300)]
)
def test_products_are_those_of_the_reference(
    rows: int, columns: int, tokens: int, dtype: torch.dtype, out: torch.dtype, backend: str
) -> None:
    m, x = matrix(rows, columns, Pattern(6, 8), dtype), normal(tokens, columns, seed=2).to(out)
    bias = normal(rows, seed=3).to(out)
    found = operator(on_gpu(m), out, bias.cuda())(x.cuda())
    assert found.dtype == out
    assert found.shape == (tokens, rows)
    assert_near(found, expected(m, x, bias))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_pattern(pattern: Pattern, dtype: torch.dtype, backend: str) -> None:
    m, x = matrix(128, 700, pattern, dtype), normal(33, 700, seed=4).bfloat16()
    run = operator(on_gpu(m), torch.bfloat16)
    assert_near(run(x.cuda()), expected(m, x, None))
    assert run(x[:0].cuda()).shape == (0, 128)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(64, 4096, 1), (1000, 4096, 300), (8192, 64, 8192)])
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper")
def test_every_tile_has_the_same_bits(rows: int, columns: int, tokens: int, dtype: torch.dtype) -> None:
    m = on_gpu(matrix(rows, columns, Pattern(6, 8), dtype))
    assert m.scale is not None
    prepared = hopper.HopperMatrix(m.values, hopper.arranged_positions(m.positions, m.values.shape[1]), m.scale, None)
    q, scale = quantise_slide(normal(tokens, columns, seed=5).bfloat16().cuda(), m.how, dtype)
    first, *others = [hopper.slide_matmul(prepared, q, scale, torch.float16, tile) for tile in hopper.TILES]
    wanted = reference.slide_matmul(m, q[:, : m.how.expanded(columns)], scale)
    assert_near(first, wanted.cpu())
    for tile, found in zip(hopper.TILES[1:], others, strict=True):
        assert torch.equal(found, first), tile
    for _ in range(20):  # a race would not show every time
        assert torch.equal(hopper.slide_matmul(prepared, q, scale, torch.float16), first)
    with pytest.raises(ValueError, match="inputs expanded to"):
        hopper.slide_matmul(prepared, torch.cat([q, q, q], dim=1), scale, torch.float16)


def test_integers_are_exact(backend: str) -> None:
    m = on_gpu(matrix(64, 512, Pattern(6, 8), torch.int8))
    ones = Sparse24Matrix(m.values, m.positions, torch.ones(64, device="cuda"), m.how, m.columns)
    x = torch.zeros(16, 512)
    x[:, 0] = 127  # the largest: scales are 1
    x[:, 1:] = torch.randint(-1, 2, (16, 511), generator=torch.Generator().manual_seed(6))
    q = x.to(torch.int8).cuda()
    wanted = reference.slide_matmul(ones, reference.expand(q, m.how), torch.ones(16, device="cuda"))
    for out in OUTPUTS:
        assert torch.equal(operator(ones, out)(x.to(out).cuda()), wanted.to(out))


def test_many_tokens_are_no_limit(backend: str) -> None:
    m, tokens = matrix(32, 64, Pattern(6, 8), torch.int8), 70_001
    x = normal(tokens, 64, seed=10).bfloat16()
    found = operator(on_gpu(m), torch.bfloat16)(x.cuda())
    assert_near(found, expected(m, x, None))


def test_weights_may_begin_anywhere(backend: str) -> None:
    m, x = matrix(64, 512, Pattern(6, 8), torch.int8), normal(5, 512, seed=11).bfloat16()
    moved = torch.zeros(m.values.numel() + 1, dtype=torch.int8, device="cuda")[1:].view(m.values.shape)
    moved.copy_(m.values)
    there = on_gpu(m)
    elsewhere = Sparse24Matrix(moved, there.positions, there.scale, m.how, m.columns)
    assert_near(operator(elsewhere, torch.bfloat16)(x.cuda()), expected(m, x, None))


def test_a_token_that_is_not_finite_spoils_its_own_outputs_alone(backend: str) -> None:
    m, x = matrix(64, 256, Pattern(6, 8), torch.int8), normal(5, 256, seed=7)
    x[3, 100] = float("nan")
    found = operator(on_gpu(m), torch.bfloat16)(x.bfloat16().cuda())
    assert found.isfinite().all(dim=1).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_can_be_captured_once_they_ran(dtype: torch.dtype, backend: str) -> None:
    m = matrix(256, 512, Pattern(6, 8), dtype)
    run = operator(on_gpu(m), torch.bfloat16)
    x = normal(40, 512, seed=8).bfloat16().cuda()
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    x.copy_(normal(40, 512, seed=9).bfloat16())
    graph.replay()
    assert torch.equal(y, run(x))


def test_a_product_that_was_never_made_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "architecture", lambda device: 89)  # Ada, which has FP8
    monkeypatch.setattr(product, "_plans", {})
    run = operator(on_gpu(matrix(64, 256, Pattern(6, 8), torch.int8)), torch.bfloat16)
    x = torch.zeros(16, 256, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="run it once before"):
        run(x)


def test_the_linear_moves_between_devices() -> None:
    m = matrix(96, 256, Pattern(6, 8), torch.int8)
    linear = Sparse24Linear(256, 96, m.how, torch.int8, True, torch.bfloat16, torch.device("cpu"))
    values = {"weight": m.values, "weight_positions": m.positions, "weight_scale": m.scale}
    linear.load_state_dict({**values, "bias": normal(96, seed=1).bfloat16()})
    x = normal(2, 9, 256, seed=2).bfloat16()
    wanted = linear(x)
    for _ in range(2):
        found = linear.cuda()(x.cuda())
        assert_near(found, wanted.float())
        assert torch.equal(linear.cpu()(x), wanted)


def test_types_are_those_of_the_format_whatever_a_model_is_cast_to() -> None:
    m = matrix(96, 256, Pattern(6, 8), torch.int8)
    linear = Sparse24Linear(256, 96, m.how, torch.int8, False, torch.float32, torch.device("cpu"))
    linear.load_state_dict({"weight": m.values, "weight_positions": m.positions, "weight_scale": m.scale})
    x = normal(9, 256, seed=2)
    found = linear.to("cuda", torch.bfloat16)(x.bfloat16().cuda())
    assert_near(found, expected(m, x.bfloat16(), None))


def test_positions_that_were_changed_are_refused(backend: str) -> None:
    m = on_gpu(matrix(96, 256, Pattern(6, 8), torch.int8))
    m.positions[7, 3] = 0
    with pytest.raises(PackingError, match="row 7"):
        operator(m, torch.bfloat16)
