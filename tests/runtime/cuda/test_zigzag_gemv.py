"""Products with zigzag matrices on the GPU in every geometry, against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsepack.formats import q4_k, zigzag
from sparsepack.formats.matrices import ZIGZAG
from sparsepack.formats.packed import PackedMatrix
from sparsepack.runtime.cuda import zigzag as cuda
from sparsepack.runtime.cuda.geometry import Geometry
from sparsepack.runtime.cuda.kernel import multiprocessors
from sparsepack.runtime.cuda.words import EMPTY, empty_words, slots
from sparsepack.runtime.cuda.zigzag import Input, ZigzagMatrix, batch, blocks, gemv, load_zigzag, most_inputs
from sparsepack.runtime.reference import ACTIVATION_FUNCTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GEOMETRIES = [
    Geometry(1, 8, 24, 1),
    Geometry(1, 8, 8, 8),
    Geometry(1, 8, 24, 32),
    Geometry(2, 8, 16, 5),
    Geometry(2, 4, 4, 16),
    Geometry(4, 8, 8, 3),
    Geometry(4, 16, 4, 2),
    Geometry(8, 8, 4, 2),
    Geometry(8, 8, 8, 9),
]
SHAPES = [(256, 40), (700, 513), (3328, 1030), (300, 9001)]
several_inputs = pytest.mark.parametrize("inputs", [1, 2, 3, 5, 8])
several_geometries = pytest.mark.parametrize(
    ("geometry", "columns"),
    [
        (Geometry(1, 8, 24, 1), 40),
        (Geometry(1, 8, 8, 8), 700),
        (Geometry(1, 8, 24, 32), 3001),
        (Geometry(2, 8, 16, 5), 3001),
        (Geometry(2, 4, 4, 16), 513),
        (Geometry(4, 8, 8, 3), 700),
        (Geometry(4, 16, 4, 2), 700),
    ],
    ids=str,
)
LIMIT = 1e-5
"""Of the norm of a result. Tensor cores cut their sums off instead of rounding them, so that errors grow with what a
warp adds up: 1e-6 for 32 columns, 1.6e-5 for 4096 on an H100."""


def random_matrix(rows: int, columns: int, seed: int = 0) -> PackedMatrix:
    """Any nibbles and scales; d and dmin spread over a decade."""
    bits = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (zigzag.bands(rows), columns, q4_k.BLOCK_BYTES), dtype=torch.uint8, generator=bits)
    ends = 10 ** -torch.rand(*blocks.shape[:2], 2, generator=bits) * 0.01
    blocks[..., :4] = ends.half().view(torch.uint8)
    return PackedMatrix(blocks, ZIGZAG, rows, columns)


def weights(matrix: PackedMatrix) -> Tensor:
    return zigzag.unpack(matrix.blocks, matrix.rows).double().cuda()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def assert_close(found: Tensor, expected: Tensor, limit: float = LIMIT) -> None:
    assert torch.isfinite(found).all()
    assert (found.double() - expected).norm() <= limit * expected.norm()


@pytest.fixture
def no_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of older GPUs runs on newer ones, too."""
    macros = cuda._macros
    monkeypatch.setattr(cuda, "_macros", lambda *args: {**macros(*args), "BULK": 0})


@pytest.fixture(autouse=True)
def slots_become_empty() -> Iterator[None]:
    yield
    assert bool((slots(torch.device("cuda", 0)) == EMPTY).all())


def loaded(stored: PackedMatrix, geometry: Geometry, gate: bool = False) -> ZigzagMatrix:
    matrix = load_zigzag(stored, "cuda", geometry, gate=gate)
    if blocks(matrix) > multiprocessors(matrix.blocks.device):
        pytest.skip("more blocks than this GPU runs at once")
    if geometry.splits > -(-stored.columns // 32):
        pytest.skip("blocks without columns")
    return matrix


def test_a_column_a_thousand_times_the_others_hides_no_row() -> None:
    """Tensor cores cut off what is small beside their largest product: on an H100 4e-6 of a row's size in the mean,
    6e-4 at worst. Inputs as one float16 instead of two would cost 2e-4 in the mean."""
    stored = random_matrix(2048, 40)
    matrix, w = load_zigzag(stored, "cuda", Geometry(8, 8, 8, 1)), weights(stored)
    x = normal(40)
    x[3] *= 1000
    y = torch.empty(2048, device="cuda")
    gemv(matrix, Input(x), y)
    stored.blocks[..., 3] ^= 0x80  # minima are added instead of taken off: nothing cancels
    size = weights(stored) @ x.double().abs()
    error = (y.double() - w @ x.double()).abs() / size
    assert float(error.mean()) < 1e-5
    assert float(error.max()) < 2e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_product_in_every_geometry(geometry: Geometry, shape: tuple[int, int]) -> None:
    stored = random_matrix(*shape)
    matrix, w = loaded(stored, geometry), weights(stored)
    x, norm, offset = (normal(shape[1], seed=n) for n in range(3))
    constant, added, threshold = normal(shape[0], seed=5), normal(shape[0], seed=6), torch.tensor([0.6], device="cuda")
    x[3] *= 1000
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    squares = torch.full((blocks(matrix),), float("nan"), device="cuda")
    y = torch.full((shape[0],), float("nan"), device="cuda")
    each = shape[1] * geometry.group / (geometry.splits * geometry.warps)  # columns that a warp adds up
    limit = max(LIMIT, 1e-8 * each)

    gemv(matrix, Input(x), y, active=active)
    assert_close(y, w @ x.double(), limit)
    assert int(active) == shape[1]

    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm
    gemv(matrix, Input(x, norm=norm, eps=1e-5), y, squares=squares)
    assert_close(y, w @ normed.double(), limit)
    assert float(squares.sum()) == pytest.approx(float(y.square().sum()), rel=1e-5)

    d = x - offset
    masked = torch.where(d.abs() > threshold, d, 0).double()
    y.copy_(added)
    active.zero_()
    gemv(matrix, Input(x, threshold=threshold, offset=offset), y, constant=constant, added=y, active=active)
    assert_close(y, w @ masked + constant.double() + added.double(), limit)
    assert int(active) == int(masked.count_nonzero())

    least = norm.abs()
    gemv(matrix, Input(x, threshold=least), y)
    first = y.clone()
    assert_close(y, w @ torch.where(x.abs() > least, x, 0).double(), limit)
    for _ in range(3):
        gemv(matrix, Input(x, threshold=least), y)
        assert torch.equal(y, first)

    gemv(matrix, Input(x, threshold=torch.tensor([float("inf")], device="cuda")), y, added=added)
    assert torch.equal(y, added), "nothing is active"


@pytest.mark.usefixtures("no_copy_engine")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_product_without_the_copy_engine(geometry: Geometry) -> None:
    test_a_product_in_every_geometry(geometry, (700, 513))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_chain_of_products_hands_its_results_on(geometry: Geometry) -> None:
    """The second need not wait for the end of the first. Inputs within rounding of the threshold may flip."""
    stored = random_matrix(1100, 1100)
    matrix, w = loaded(stored, geometry), weights(stored) / 1000
    x, norm, limit = normal(1100), normal(1100, seed=1), torch.tensor([0.3], device="cuda")
    words, (between, squares) = empty_words([1100, blocks(matrix)], x.device)
    y = torch.empty(1100, device="cuda")
    for _ in range(20):
        gemv(matrix, Input(x), between, squares=squares)
        second = Input(between, norm=norm, eps=1e-5, squares=squares, threshold=limit, handed=True)
        gemv(matrix, second, y)
        gemv(matrix, Input(x), y.clone(), emptied=words)
        z = w @ x.double()
        normed = z * torch.rsqrt(z.square().mean() + 1e-5 / 1e6) * norm
        assert (y.double() / 1000 - w @ torch.where(normed.abs() > limit, normed, 0)).norm() <= 1e-3 * y.norm() / 1000
        assert bool((words == EMPTY).all())


def test_a_sum_that_is_no_number_is_handed_on() -> None:
    stored = random_matrix(512, 512)
    matrix = load_zigzag(stored, "cuda", Geometry(2, 8, 16, 4))
    x = normal(512)
    x[7] = torch.tensor(EMPTY, dtype=torch.int32, device="cuda").view(torch.float32)  # a NaN with these bits
    y = torch.zeros(512, device="cuda")
    gemv(matrix, Input(x), y)
    assert y.isnan().all()
    assert not (y.view(torch.int32) == EMPTY).any()


@pytest.mark.parametrize(
    ("geometry", "width", "activation"),
    [
        *((g, width, 0) for g in GEOMETRIES if g.group > 1 for width in (256, 1280, 768)),
        *((Geometry(2, 8, 16, 5), 768, activation) for activation in (1, 2, 3)),
    ],
    ids=str,
)
def test_gate_and_up_become_one(geometry: Geometry, width: int, activation: int) -> None:
    stored = random_matrix(2 * width, 300)
    matrix, w = loaded(stored, geometry, gate=True), weights(stored)
    x, bias, limit = normal(300), normal(2 * width, seed=1), torch.tensor([0.5], device="cuda")
    mid = torch.full((width,), float("nan"), device="cuda")
    gemv(matrix, Input(x, threshold=limit), mid, constant=bias, activation=activation)
    gate, up = (w @ torch.where(x.abs() > limit, x, 0).double() + bias).chunk(2)
    assert_close(mid, list(ACTIVATION_FUNCTIONS.values())[activation](gate) * up)


def test_what_a_product_cannot_do_is_refused() -> None:
    few, x, y = load_zigzag(random_matrix(512, 64), "cuda", Geometry(2, 8, 16, 3)), normal(64), normal(512)
    with pytest.raises(ValueError, match="more splits than 64 columns have chunks of 32"):
        gemv(few, Input(x), y)
    with pytest.raises(ValueError, match="more splits than 64 columns have chunks of 32"):
        batch(few, Input(x[None]), y[None])
    one = load_zigzag(random_matrix(512, 64), "cuda", Geometry(2, 8, 16, 1))
    with pytest.raises(ValueError, match="the input is taken as it is"):
        gemv(one, Input(x, norm=x, indices=x.int(), count=x[0].int()), y)
    with pytest.raises(ValueError, match="something added"):
        gemv(one, Input(x), y, added=y, activation=0)
    with pytest.raises(ValueError, match="without squares"):
        gemv(one, Input(x, norm=x, handed=True), y)
    for wrong in (Input(x[None], handed=True), Input(x[None], indices=x.int(), count=x[0].int())):
        with pytest.raises(ValueError, match="several inputs, handed on or with a list"):
            batch(one, wrong, y[None])
    with pytest.raises(ValueError, match="something added"):
        batch(one, Input(x[None]), y[None], added=y[None], activation=0)
    gated = load_zigzag(random_matrix(512, 64), "cuda", Geometry(2, 8, 16, 1), gate=True)
    for matrix, activation in ((one, 0), (gated, None)):
        with pytest.raises(ValueError, match="bands of gate: one needs the other"):
            gemv(matrix, Input(x), y, activation=activation)
        with pytest.raises(ValueError, match="bands of gate: one needs the other"):
            batch(matrix, Input(x[None]), y[None], activation=activation)


def test_more_blocks_than_run_at_once_are_refused() -> None:
    matrix = load_zigzag(random_matrix(256 * 100, 512), "cuda", Geometry(1, 8, 8, 16))
    with pytest.raises(ValueError, match="1600 blocks that wait for each other"):
        gemv(matrix, Input(normal(512)), torch.empty(256 * 100, device="cuda"))
    with pytest.raises(ValueError, match="1600 blocks that wait for each other"):
        batch(matrix, Input(normal(2, 512)), torch.empty(2, 256 * 100, device="cuda"))


def loaded_for(stored: PackedMatrix, geometry: Geometry, inputs: int, gate: bool = False) -> ZigzagMatrix:
    matrix = loaded(stored, geometry, gate)
    if inputs > most_inputs(matrix):
        pytest.skip("more inputs than this GPU's shared memory takes")
    return matrix


def powers_of_ten(inputs: int) -> Tensor:
    """float32 [inputs, 1]: each input has a scale of its own."""
    return 10.0 ** torch.arange(inputs, device="cuda")[:, None]


def between(x: Tensor) -> Tensor:
    """A threshold that about half the magnitudes exceed, and none is within rounding of: float32 [1]."""
    magnitudes = x.abs().flatten().sort().values
    middle = magnitudes[len(magnitudes) * 2 // 5 : len(magnitudes) * 3 // 5]
    widest = int(middle.diff().argmax())
    return middle[widest : widest + 2].mean()[None].float()


@several_inputs
@several_geometries
def test_several_inputs_share_their_active_columns(geometry: Geometry, columns: int, inputs: int) -> None:
    stored = random_matrix(1100, columns)
    matrix, w = loaded_for(stored, geometry, inputs), weights(stored)
    x = normal(inputs, columns) * powers_of_ten(inputs)
    constant, offset, added = normal(1100, seed=1), normal(columns, seed=2), normal(inputs, 1100, seed=3)
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.full((inputs, 1100), float("nan"), device="cuda")

    batch(matrix, Input(x), y, constant=constant, active=active)
    for found, one in zip(y, x, strict=True):
        assert_close(found, w @ one.double() + constant)
    assert int(active) == columns

    shifted = x - offset
    one_limit, limits = torch.tensor([1.5], device="cuda"), 4 * normal(columns, seed=4).abs()
    everything, nothing = one_limit - 9, one_limit + torch.inf
    for threshold in (one_limit, everything, nothing, limits):
        input = Input(x, threshold=threshold, offset=offset)
        union = (shifted.abs() > threshold).any(0)
        y.copy_(added)
        active.zero_()
        batch(matrix, input, y, constant=constant, added=y, active=active)
        for found, one, before in zip(y, shifted, added, strict=True):
            assert_close(found, w @ torch.where(union, one, 0).double() + constant.double() + before.double())
        assert int(active) == int(union.sum())

    first = y.clone()
    for _ in range(3):
        batch(matrix, input, y, constant=constant, added=added)
        assert torch.equal(y, first)


@several_inputs
@several_geometries
@pytest.mark.parametrize("parts", [0, 1, 100, 700])
def test_a_norm_of_several_inputs_comes_first(geometry: Geometry, columns: int, inputs: int, parts: int) -> None:
    """parts -- of the sums of squares, which others have added up; 0: the product does"""
    stored = random_matrix(700, columns)
    matrix, w = loaded_for(stored, geometry, inputs), weights(stored)
    x = normal(inputs, columns) * powers_of_ten(inputs)
    norm, offset = normal(columns, seed=1), normal(columns, seed=2) / 4
    squares = None
    if parts:
        shares = torch.rand(inputs, parts, generator=torch.Generator().manual_seed(3)).cuda()
        squares = x.square().sum(1, keepdim=True) * shares / shares.sum(1, keepdim=True)
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * norm
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.full((inputs, 700), float("nan"), device="cuda")

    batch(matrix, Input(x, norm=norm, eps=1e-5, squares=squares), y)
    for found, one in zip(y, normed, strict=True):
        assert_close(found, w @ one)

    d = normed - offset
    limit = between(d)
    limits = limit * (1 + norm.abs())
    limits = torch.where(((d.abs() - limits).abs() < 1e-4).any(0), limit + 1e3, limits)
    for threshold in (limit, limits):
        union = (d.abs() > threshold).any(0)
        active.zero_()
        batch(matrix, Input(x, norm, 1e-5, squares, threshold=threshold, offset=offset), y, active=active)
        for found, one in zip(y, d, strict=True):
            assert_close(found, w @ torch.where(union, one, 0))
        assert int(active) == int(union.sum())


@several_inputs
@several_geometries
@pytest.mark.parametrize("rows", [700, 3328])
def test_the_squares_of_several_outputs_are_added_up(geometry: Geometry, columns: int, inputs: int, rows: int) -> None:
    matrix = loaded_for(random_matrix(rows, columns), geometry, inputs)
    x, added = normal(inputs, columns) * powers_of_ten(inputs), normal(inputs, rows, seed=1)
    y = added.clone()
    squares = torch.full((inputs, blocks(matrix)), float("nan"), device="cuda")
    batch(matrix, Input(x), y, added=y, squares=squares)
    torch.testing.assert_close(squares.double().sum(1), y.double().square().sum(1), rtol=1e-5, atol=0)
    # Those of a group are in its blocks' parts.
    of_groups = torch.nn.functional.pad(y, (0, -rows % (256 * geometry.group))).view(inputs, matrix.blocks.shape[0], -1)
    found = squares.view(*of_groups.shape[:2], -1).double().sum(2)
    torch.testing.assert_close(found, of_groups.double().square().sum(2), rtol=1e-5, atol=0)

    first = squares.clone()
    for _ in range(3):
        batch(matrix, Input(x), y, added=added, squares=squares.fill_(float("nan")))
        assert torch.equal(squares, first)


@several_inputs
@pytest.mark.parametrize(
    ("geometry", "width", "activation"),
    [
        *((g, width, 0) for g in GEOMETRIES if g.group > 1 for width in (256, 768)),
        *((Geometry(2, 8, 16, 5), 1280, activation) for activation in (1, 2, 3)),
    ],
    ids=str,
)
def test_gate_and_up_of_several_inputs_become_one(geometry: Geometry, width: int, activation: int, inputs: int) -> None:
    stored = random_matrix(2 * width, 300)
    matrix, w = loaded_for(stored, geometry, inputs, gate=True), weights(stored)
    x, bias, limit = normal(inputs, 300), normal(2 * width, seed=1), torch.tensor([1.5], device="cuda")
    mid = torch.full((inputs, width), float("nan"), device="cuda")
    squares = torch.full((inputs, blocks(matrix)), float("nan"), device="cuda")
    for constant in (bias, None):
        batch(matrix, Input(x, threshold=limit), mid, constant=constant, activation=activation, squares=squares)
        union = (x.abs() > limit).any(0)
        for found, one in zip(mid, x, strict=True):
            product = w @ torch.where(union, one, 0).double()
            gate, up = (product if constant is None else product + constant).chunk(2)
            assert_close(found, list(ACTIVATION_FUNCTIONS.values())[activation](gate) * up)
        torch.testing.assert_close(squares.double().sum(1), mid.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_chain_of_products_of_several_inputs_passes_squares_on(geometry: Geometry) -> None:
    """Each begins while the one before still runs, and writes its buffers again."""
    stored = random_matrix(1100, 1100)
    matrix, w = loaded_for(stored, geometry, 5), weights(stored)
    start, norm = normal(5, 1100) * powers_of_ten(5), normal(1100, seed=1)
    hidden, normed = torch.empty_like(start), torch.empty_like(start)
    squares = torch.empty(5, blocks(matrix), device="cuda")
    for _ in range(20):
        hidden.copy_(start)
        batch(matrix, Input(start), hidden, added=hidden, squares=squares)
        batch(matrix, Input(hidden, norm=norm, eps=1e-5, squares=squares), normed)
        batch(matrix, Input(normed), hidden, added=hidden, squares=squares)
        batch(matrix, Input(hidden, norm=norm, eps=1e-5, squares=squares), normed)
    expected = start.double() + start.double() @ w.t()
    for _ in range(2):
        one = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * norm
        last = one @ w.t()
        expected = expected + last @ w.t()
    for found, one in zip(normed, last, strict=True):
        assert_close(found, one, 1e-3)


@pytest.mark.usefixtures("no_copy_engine")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_several_inputs_without_the_copy_engine(geometry: Geometry) -> None:
    test_several_inputs_share_their_active_columns(geometry, 700, 3)


def test_products_of_one_and_of_several_inputs_share_their_slots() -> None:
    stored = random_matrix(1100, 1100)
    one, several = loaded(stored, Geometry(1, 8, 8, 8)), loaded(stored, Geometry(2, 8, 16, 5))
    x, w = normal(8, 1100), weights(stored)
    y, alone = torch.empty(8, 1100, device="cuda"), torch.empty(1100, device="cuda")
    for _ in range(20):
        batch(several, Input(x), y)
        gemv(one, Input(x[0]), alone)
        batch(one, Input(x[:3]), y[:3])
    assert_close(alone, w @ x[0].double())
    for found, input in zip(y, x, strict=True):
        assert_close(found, w @ input.double())
