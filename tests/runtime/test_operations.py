"""The products of every backend with zigzag matrices, against float64 products of the dequantised weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations_for_tests import Backend, assert_close_to_product, every_backend, normal, packed
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks.table import BLOCKS, ZIGZAG_BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.models.sites import SiteRule, active_channels
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.chained.decoder import torch_threads

pytestmark = every_backend

ODD_SHAPES = [(1, 1), (1, 300), (255, 1), (256, 256), (257, 33), (512, 64), (700, 513), (768, 31), (1025, 40)]
STACKED_SHAPES = [(960, 576), (3072, 192), (1280, 97), (4352, 130), (1024, 2048)]  # grouped queries, gate and up
TAIL_SHAPES = [(64, 5), (65, 33), (192, 31), (193, 7), (320, 66), (576, 97), (640, 130), (704, 41), (1217, 3)]
SHAPES = ODD_SHAPES + STACKED_SHAPES + TAIL_SHAPES


def gemv(backend: Backend, matrix: PackedMatrix, x: Tensor, threshold: Tensor) -> Tensor:
    """A product with the active columns, which are as many as compare greater."""
    loaded = backend.products.load_zigzag(matrix)
    y, active = backend.products.gemv(loaded, x.to(backend.device), threshold.to(backend.device))
    assert active == int((x.abs() > threshold).sum())
    return y.cpu()


# one input, and several


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_with_some_all_and_no_columns_are_right_and_the_same_every_run(
    backend: Backend, shape: tuple[int, int]
) -> None:
    matrix, x = packed(*shape), normal(shape[1], seed=2)
    for threshold in (torch.tensor(0.5), normal(shape[1], seed=3).abs(), torch.tensor(-1.0)):
        y = gemv(backend, matrix, x, threshold)
        assert_close_to_product(backend.bounds, y, matrix, torch.where(x.abs() > threshold, x, 0))
        assert all(torch.equal(gemv(backend, matrix, x, threshold), y) for _ in range(2))
    assert torch.equal(gemv(backend, matrix, x, torch.tensor(1e9)), torch.zeros(shape[0]))
    loaded = backend.products.load_zigzag(matrix)
    for batch in (1, 2, 17):
        x = normal(batch, shape[1], seed=2)
        y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
        assert_close_to_product(backend.many, y, matrix, x)


@pytest.mark.parametrize("shape", [(1, 300), (257, 33), (1025, 40), (4352, 130), (192, 31), (1217, 3)], ids=str)
@pytest.mark.parametrize("block", ZIGZAG_BLOCKS[1:])
def test_products_with_other_blocks(backend: Backend, block: str, shape: tuple[int, int]) -> None:
    if block not in BACKENDS[backend.name].blocks:
        pytest.skip("no kernels for these blocks")
    matrix, x = packed(*shape, block), normal(5, shape[1], seed=2)
    loaded = backend.products.load_zigzag(matrix)
    for threshold in (0.5, -1.0, 1e9):
        y, _ = backend.products.gemv(loaded, x[0].to(backend.device), torch.tensor(threshold, device=backend.device))
        expected = torch.where(x[0].abs() > threshold, x[0], 0)
        assert_close_to_product(backend.bounds_of(block), y.cpu(), matrix, expected)
    y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x)


@pytest.mark.parametrize("active", [1, 2, 3, 7, 63, 65, 299])
def test_gemv_takes_any_number_of_active_columns(backend: Backend, active: int) -> None:
    matrix, x = packed(300, 300), normal(300, seed=2)
    limit = x.abs().sort(descending=True).values[active]
    y = gemv(backend, matrix, x, limit)
    masked = torch.where(x.abs() > limit, x, 0)
    assert int(masked.count_nonzero()) == active
    assert_close_to_product(backend.bounds, y, matrix, masked)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_ties_with_the_threshold_are_not_active(backend: Backend, kind: str) -> None:
    threshold = torch.tensor(0.1)
    above = torch.nextafter(threshold, torch.tensor(1.0))
    x = torch.stack([threshold, -threshold, above, -above, torch.tensor(0.0)])
    matrix = packed(300, 5)
    y = gemv(backend, matrix, x, threshold if kind == "scalar" else threshold.repeat(5))
    assert_close_to_product(backend.bounds, y, matrix, torch.where(x.abs() == above, x, 0))


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 2), (-1.0, 4)])
def test_zeros_are_not_active_at_threshold_zero_and_below_it_everything_is(
    backend: Backend, threshold: float, expected: int
) -> None:
    x = torch.tensor([0.0, -0.0, 1e-38, -2.0], device=backend.device)
    limit = torch.tensor(threshold, device=backend.device)
    assert backend.products.gemv(backend.products.load_zigzag(packed(300, 4)), x, limit)[1] == expected


def test_gemv_never_reads_inactive_inputs(backend: Backend) -> None:
    matrix, x = packed(300, 64), normal(64)
    x[5] = float("nan")  # compares false: inactive
    y = gemv(backend, matrix, x, torch.tensor(0.5))
    assert_close_to_product(backend.bounds, y, matrix, torch.where(x.abs() > 0.5, x, 0))


@pytest.mark.parametrize(
    ("shape", "threads"),
    [((257, 33), 2), ((700, 513), 3), ((700, 513), 7), ((4352, 130), 7), ((1024, 2048), 2)],
    ids=str,
)
def test_gemv_with_several_threads(backend: Backend, shape: tuple[int, int], threads: int) -> None:
    """The same bits every run; the reference's are those of one thread, too."""
    matrix, x, threshold = packed(*shape), normal(shape[1], seed=2), torch.tensor(0.4)
    alone = gemv(backend, matrix, x, threshold)
    with torch_threads(threads):
        first = gemv(backend, matrix, x, threshold)
        assert all(torch.equal(gemv(backend, matrix, x, threshold), first) for _ in range(3))
    assert_close_to_product(backend.bounds, first, matrix, torch.where(x.abs() > threshold, x, 0))
    if backend.name == "reference" and backend.device == "cpu":
        assert torch.equal(first, alone)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_matmul_with_several_threads(backend: Backend, batch: int, threads: int) -> None:
    matrix, x = packed(1300, 150), normal(batch, 150, seed=2)
    loaded = backend.products.load_zigzag(matrix)
    with torch_threads(threads):
        y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x)


def test_a_site_with_an_offset_is_a_product_with_the_difference(backend: Backend) -> None:
    matrix, x, offset = packed(300, 128), normal(128, seed=2), normal(128, seed=3)
    rule = SiteRule(torch.tensor(0.7), offset)
    loaded = backend.products.load_zigzag(matrix)
    sparse_bias = backend.products.zigzag_matmul(loaded, offset[None].to(backend.device))[0].cpu()
    y = gemv(backend, matrix, x - offset, rule.limits) + sparse_bias
    expected = torch.where(active_channels(x, rule), x, offset).double() @ decode_matrix(matrix).double().T
    assert (y - expected).norm() <= 2 * backend.many.normwise * expected.norm()


# inputs and weights of any size


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 2600),
    columns=st.integers(1, 300),
    batch=st.integers(1, 9),
    active=st.floats(0, 1),
    decades=st.sampled_from([0, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_products_of_random_matrices(
    backend: Backend, rows: int, columns: int, batch: int, active: float, decades: int, seed: int
) -> None:
    bits = torch.Generator().manual_seed(seed)
    bands = zigzag.bands(rows)
    blocks = torch.randint(0, 256, (bands, columns, BLOCKS["Q4_K"].bytes), dtype=torch.uint8, generator=bits)
    scales = torch.rand(bands, columns, 2, generator=bits).add_(0.5).mul_(0.01)
    scales *= 10 ** (-decades * torch.rand(columns, 1, generator=bits))
    blocks[..., :4] = scales.half().view(torch.uint8)
    matrix = PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), rows, columns)
    loaded = backend.products.load_zigzag(matrix)
    # Columns far below the largest of their tile share its precision: 1.2 of the bound measured. Fewer rows than a
    # superblock's may all have small scales, or cancel: only the bound of each counts then.
    allowance = (2 if decades else 1) if rows >= 256 else 1e9

    x = torch.randn(batch, columns, generator=bits)
    y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x, allowance)

    limit = x[0].abs().quantile(1 - active)
    y = gemv(backend, matrix, x[0], limit)
    assert_close_to_product(backend.bounds, y, matrix, torch.where(x[0].abs() > limit, x[0], 0), allowance)


@pytest.mark.parametrize("size", [10, 1e4, 1e8])
@pytest.mark.parametrize("outliers", [1, 5])
def test_products_with_large_outliers(backend: Backend, outliers: int, size: float) -> None:
    """Other inputs of an outlier's tile share its precision, and itself is rounded with little to average over: twice
    the bound (1.9 and 1.1 of it measured)."""
    matrix, x = packed(700, 513), normal(3, 513, seed=2)
    x[:, 7 : 7 + 90 * outliers : 90] *= size
    loaded = backend.products.load_zigzag(matrix)
    y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x, allowance=2)
    y = gemv(backend, matrix, x[0], torch.tensor(0.5))
    assert_close_to_product(backend.bounds, y, matrix, torch.where(x[0].abs() > 0.5, x[0], 0), allowance=2)


@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e9, 1e20])
def test_products_with_inputs_of_any_size(backend: Backend, size: float) -> None:
    matrix, x = packed(300, 100), normal(2, 100, seed=2) * size
    loaded = backend.products.load_zigzag(matrix)
    y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x)
    assert_close_to_product(backend.bounds, gemv(backend, matrix, x[0], torch.tensor(-1.0)), matrix, x[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_products_with_inputs_that_are_not_finite_are_not_finite(backend: Backend, value: float) -> None:
    matrix, x = packed(700, 100), normal(3, 100, seed=2).abs() + 1
    x[1, 37] = value
    loaded = backend.products.load_zigzag(matrix)
    y = backend.products.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert not torch.isfinite(y[1]).any()
    others = torch.tensor([0, 2])
    assert_close_to_product(backend.many, y[others], matrix, x[others])
    y, active = backend.products.gemv(loaded, x[1].to(backend.device), None)
    assert active == 100
    assert not torch.isfinite(y).any()


def test_products_with_zeros_are_zero(backend: Backend) -> None:
    matrix, zeros = packed(300, 100), torch.zeros(2, 100)
    loaded = backend.products.load_zigzag(matrix)
    assert not backend.products.zigzag_matmul(loaded, zeros.to(backend.device)).any()
    assert not gemv(backend, matrix, zeros[0], torch.tensor(-1.0)).any()
    nothing = PackedMatrix(torch.zeros_like(matrix.padded().blocks), MatrixFormat("Q4_K", "zigzag"), 300, 100)
    assert not gemv(backend, nothing, normal(100), torch.tensor(-1.0)).any()


def test_products_with_denormal_scales(backend: Backend) -> None:
    matrix = packed(300, 100)
    blocks = matrix.padded().blocks.clone()
    blocks[..., 1:4:2] &= 0x83  # the exponents of d and dmin
    matrix = PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), 300, 100)
    x = normal(100, seed=2)
    assert_close_to_product(backend.bounds, gemv(backend, matrix, x, torch.tensor(-1.0)), matrix, x)


@pytest.mark.parametrize("shape", [(300, 100), *TAIL_SHAPES], ids=str)
def test_a_tail_and_a_padded_band_are_the_same_matrix(backend: Backend, shape: tuple[int, int]) -> None:
    """Files of before tails have padded bands."""
    matrix, x = packed(*shape), normal(2, shape[1], seed=2)
    padded = matrix.padded()
    assert padded.tail is None
    assert torch.equal(decode_matrix(padded), decode_matrix(matrix))
    y = backend.products.zigzag_matmul(backend.products.load_zigzag(padded), x.to(backend.device)).cpu()
    assert_close_to_product(backend.many, y, matrix, x)
    active = torch.where(x[0].abs() > 0.5, x[0], 0)
    assert_close_to_product(backend.bounds, gemv(backend, padded, x[0], torch.tensor(0.5)), matrix, active)


def test_a_tail_with_several_steps_in_a_column_is_refused(backend: Backend) -> None:
    whole = packed(192, 4)
    assert whole.tail is not None
    matrix = replace(whole, tail=whole.tail.clone())
    matrix.tail[1, 0] ^= 1
    if backend.name == "reference":  # which decodes what is stored
        expected = decode_matrix(matrix) @ normal(4)
        torch.testing.assert_close(gemv(backend, matrix, normal(4), torch.tensor(-1.0)), expected)
        return
    with pytest.raises(PackingError, match="d or dmin differ within a column"):
        backend.products.load_zigzag(matrix)
