"""Products with zigzag matrices on the GPU in every geometry, against float64."""

import pytest
import torch
from torch import Tensor

from sparsepack.formats import q4_k, zigzag
from sparsepack.formats.matrices import ZIGZAG
from sparsepack.formats.packed import PackedMatrix
from sparsepack.runtime.cuda import zigzag as cuda
from sparsepack.runtime.cuda.elementwise import count_active
from sparsepack.runtime.cuda.geometry import Geometry
from sparsepack.runtime.cuda.zigzag import Gate, Input, batch, gemv, load_zigzag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GEOMETRIES = [
    Geometry(1, 8, 24, 1),
    Geometry(1, 8, 8, 8),
    Geometry(2, 8, 16, 5),
    Geometry(2, 4, 4, 16),
    Geometry(4, 8, 8, 3),
    Geometry(4, 16, 4, 2),
    Geometry(8, 8, 4, 2),
]
SHAPES = [(256, 40), (700, 513), (4352, 1030)]
LIMIT = 1e-5
"""Of the norm of a result: inputs count as the sum of two float16, sums are float32."""


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


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(found).all()
    assert (found.double() - expected).norm() <= LIMIT * expected.norm()


@pytest.fixture(params=["as it runs", "no clusters", "no copy engine"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks may meet in clusters; the paths of older GPUs run on newer ones, too."""
    if request.param == "no copy engine":
        defines = cuda._defines
        monkeypatch.setattr(cuda, "_defines", lambda *args: (*defines(*args), "BULK=0"))
    return bool(request.param == "as it runs")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_product_in_every_geometry(geometry: Geometry, shape: tuple[int, int], way: bool) -> None:
    stored = random_matrix(*shape)
    matrix, w = load_zigzag(stored, "cuda", geometry), weights(stored)
    x, norm, offset, added = (normal(shape[1], seed=n) for n in range(4))
    constant, threshold = normal(shape[0], seed=5), torch.tensor([0.6], device="cuda")
    x[3] *= 1000
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.full((shape[0],), float("nan"), device="cuda")

    gemv(matrix, Input(x), y, clusters=way)
    assert_close(y, w @ x.double())

    normed = x * torch.rsqrt(x.square().mean() + 1e-5) * norm
    gemv(matrix, Input(x, norm=norm, eps=1e-5), y, clusters=way)
    assert_close(y, w @ normed.double())

    d = x - offset
    masked = torch.where(d.abs() > threshold, d, 0).double()
    y.copy_(normal(shape[0], seed=6))
    gemv(
        matrix,
        Input(x, threshold=threshold, offset=offset),
        y,
        constant=constant,
        added=y,
        active=active,
        clusters=way,
    )
    assert_close(y, w @ masked + constant.double() + normal(shape[0], seed=6).double())
    assert int(active) == int(masked.count_nonzero())

    counts = torch.empty(-(-shape[1] // 256), dtype=torch.int32, device="cuda")
    each = added.abs()
    count_active(x, each, None, counts)
    gemv(matrix, Input(x, threshold=each, counts=counts), y, clusters=way)
    first = y.clone()
    assert_close(y, w @ torch.where(x.abs() > each, x, 0).double())
    for _ in range(3):
        gemv(matrix, Input(x, threshold=each, counts=counts), y, clusters=way)
        assert torch.equal(y, first)


@pytest.mark.parametrize("width", [256, 1280, 768])
@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g.group > 1], ids=str)
def test_gate_and_up_become_one(geometry: Geometry, width: int, way: bool) -> None:
    stored = random_matrix(2 * width, 300)
    matrix, w = load_zigzag(stored, "cuda", geometry, gate=True), weights(stored)
    x, bias = normal(300), normal(2 * width, seed=1)
    counts = torch.full((width // 256,), -1, dtype=torch.int32, device="cuda")
    mid = torch.full((width,), float("nan"), device="cuda")
    for threshold, offset in (
        (torch.tensor([0.05], device="cuda"), None),
        (normal(width).abs(), normal(width, seed=2)),
    ):
        limit = torch.tensor([0.5], device="cuda")
        gemv(
            matrix,
            Input(x, threshold=limit),
            mid,
            constant=bias,
            gate=Gate(0, threshold, offset, counts),
            clusters=way,
        )
        gate, up = (w @ torch.where(x.abs() > limit, x, 0).double() + bias).chunk(2)
        assert_close(mid, torch.nn.functional.silu(gate) * up)
        d = mid if offset is None else mid - offset
        assert counts.tolist() == (d.abs() > threshold).view(-1, 256).sum(1).tolist()


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[2], GEOMETRIES[4]], ids=str)
def test_several_inputs_share_their_active_columns(geometry: Geometry, inputs: int, gate: bool) -> None:
    if gate and geometry.group == 1:
        pytest.skip("gate and up need an even group")
    rows, columns = (1536, 700) if gate else (1100, 700)
    stored = random_matrix(rows, columns)
    matrix, w = load_zigzag(stored, "cuda", geometry, gate=gate), weights(stored)
    x = normal(inputs, columns) * 10.0 ** torch.arange(inputs, device="cuda")[:, None]
    constant, offset = normal(rows, seed=1), normal(columns, seed=2)
    y = torch.full((inputs, rows), float("nan"), device="cuda")
    batch(matrix, x, y, constant=constant)
    for found, one in zip(y, x, strict=True):
        assert_close(found, w @ one.double() + constant)

    threshold, counts = torch.tensor([1.5], device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
    shifted = x - offset
    union = (shifted.abs() > threshold).any(0)
    padded = torch.cat([union, union.new_zeros(-columns % 256)])
    counts.copy_(padded.view(-1, 256).sum(1))
    active = torch.zeros((), dtype=torch.int64, device="cuda")
    added = y.clone()
    batch(matrix, x, y, threshold=threshold, offset=offset, counts=counts, added=y, active=active)
    for found, one, before in zip(y, shifted, added, strict=True):
        assert_close(found, w @ torch.where(union, one, 0).double() + before.double())
    assert int(active) == int(union.sum())


def test_geometries_that_would_hang_are_refused() -> None:
    for wrong in ((4, 6, 8, 1), (1, 8, 12, 1), (2, 8, 6, 1)):
        with pytest.raises(ValueError, match="multiple"):
            Geometry(*wrong)
