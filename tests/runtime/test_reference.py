"""The operations of every backend against float64 products of the dequantised weights."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparsepack.formats import zigzag
from sparsepack.formats.matrices import ZIGZAG, decode_matrix, encode_rows
from sparsepack.formats.packed import PackedMatrix
from sparsepack.models.policy import SitePolicy, active_channels
from sparsepack.runtime import reference
from sparsepack.runtime.backend import BACKENDS, Operations, open_backend

SHAPES = [(1, 1), (1, 300), (255, 1), (256, 256), (257, 33), (512, 64), (700, 513), (1024, 2048)]
ROW_TYPES = ["F32", "F16", "BF16", "Q4_K", "Q6_K"]
RELATIVE = 1e-6  # of the sum of magnitudes: float32 sums, whatever their order
CASES = [
    pytest.param((name, device), id=f"{name}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
    for name in BACKENDS
    for device in ("cpu", "cuda")
    if name in ("reference", device)
]


@dataclass(frozen=True)
class Backend:
    operations: Operations
    device: str


@pytest.fixture(params=CASES)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Backend(open_backend(name), device)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(rows: int, columns: int) -> PackedMatrix:
    return PackedMatrix(zigzag.pack(normal(rows, columns, seed=rows)), ZIGZAG, rows, columns)


def gemv(backend: Backend, matrix: PackedMatrix, x: Tensor, threshold: Tensor) -> Tensor:
    loaded = backend.operations.load_zigzag(matrix, backend.device)
    x = x.to(backend.device)
    indices, count = backend.operations.collect(x, threshold.to(backend.device))
    return backend.operations.zigzag_gemv(loaded, x, indices, count).cpu()


def assert_close_to_product(y: Tensor, matrix: PackedMatrix, x: Tensor) -> None:
    """y [..., rows] against x [..., columns] W^T in float64."""
    weight, x = decode_matrix(matrix).double(), x.double()
    expected, magnitude = x @ weight.T, x.abs() @ weight.abs().T
    assert y.dtype == torch.float32
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    assert ((y.double() - expected).abs() <= RELATIVE * magnitude).all()


# collect


@pytest.mark.parametrize("columns", [1, 2, 31, 256, 1280, 5000])
@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_collect_lists_the_active_columns_in_order(backend: Backend, columns: int, kind: str) -> None:
    x = normal(columns)
    threshold = torch.tensor(0.6745) if kind == "scalar" else normal(columns, seed=1).abs()
    indices, count = backend.operations.collect(x.to(backend.device), threshold.to(backend.device))
    assert (indices.dtype, count.dtype) == (torch.int32, torch.int32)
    assert (indices.shape, count.shape) == ((columns,), ())
    assert (indices.device.type, count.device.type) == (backend.device, backend.device)
    expected = (x.abs() > threshold).nonzero()[:, 0]
    assert indices[: int(count)].tolist() == expected.tolist()


def test_collect_leaves_out_ties_with_the_threshold(backend: Backend) -> None:
    threshold = torch.tensor(0.1)
    above = torch.nextafter(threshold, torch.tensor(1.0))
    x = torch.stack([threshold, -threshold, above, -above, torch.tensor(0.0)])
    for limit in (threshold, threshold.repeat(5)):
        indices, count = backend.operations.collect(x.to(backend.device), limit.to(backend.device))
        assert indices[: int(count)].tolist() == [2, 3]


def test_collect_leaves_out_zeros_at_threshold_zero_and_keeps_everything_below_it(backend: Backend) -> None:
    x = torch.tensor([0.0, -0.0, 1e-38, -2.0], device=backend.device)
    indices, count = backend.operations.collect(x, torch.tensor(0.0, device=backend.device))
    assert indices[: int(count)].tolist() == [2, 3]
    _, count = backend.operations.collect(x, torch.tensor(-1.0, device=backend.device))
    assert int(count) == 4


def test_collect_can_find_nothing(backend: Backend) -> None:
    x = normal(300).to(backend.device)
    _, count = backend.operations.collect(x, torch.tensor(float("inf"), device=backend.device))
    assert int(count) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_collect_compares_in_float32(backend: Backend, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.1], dtype=dtype)
    limit = torch.stack([x[0].float(), torch.nextafter(x[1].float(), torch.tensor(0.0))])
    indices, count = backend.operations.collect(x.to(backend.device), limit.to(backend.device))
    assert indices[: int(count)].tolist() == [1]


def test_collect_agrees_with_the_policy(backend: Backend) -> None:
    x, policy = normal(512), SitePolicy(normal(512, seed=1).abs())
    indices, count = backend.operations.collect(x.to(backend.device), policy.threshold.to(backend.device))
    assert indices[: int(count)].tolist() == active_channels(x, policy).nonzero()[:, 0].tolist()


# zigzag_gemv and zigzag_matmul


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemv_is_the_product_with_the_active_columns(backend: Backend, shape: tuple[int, int], kind: str) -> None:
    matrix, x = packed(*shape), normal(shape[1], seed=2)
    threshold = torch.tensor(0.5) if kind == "scalar" else normal(shape[1], seed=3).abs()
    y = gemv(backend, matrix, x, threshold)
    assert_close_to_product(y, matrix, torch.where(x.abs() > threshold, x, 0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemv_with_every_column_active_is_the_whole_product(backend: Backend, shape: tuple[int, int]) -> None:
    matrix, x = packed(*shape), normal(shape[1], seed=2)
    assert_close_to_product(gemv(backend, matrix, x, torch.tensor(-1.0)), matrix, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemv_with_no_active_column_is_zero(backend: Backend, shape: tuple[int, int]) -> None:
    y = gemv(backend, packed(*shape), normal(shape[1]), torch.tensor(1e9))
    assert torch.equal(y, torch.zeros(shape[0]))


@pytest.mark.parametrize("active", [1, 2, 3, 7, 63, 65, 299])
def test_gemv_takes_any_number_of_active_columns(backend: Backend, active: int) -> None:
    matrix, x = packed(300, 300), normal(300, seed=2)
    limit = x.abs().sort(descending=True).values[active]
    y = gemv(backend, matrix, x, limit)
    masked = torch.where(x.abs() > limit, x, 0)
    assert int(masked.count_nonzero()) == active
    assert_close_to_product(y, matrix, masked)


def test_gemv_never_reads_inactive_inputs(backend: Backend) -> None:
    matrix, x = packed(300, 64), normal(64)
    x[5] = float("nan")  # compares false: inactive
    y = gemv(backend, matrix, x, torch.tensor(0.5))
    assert_close_to_product(y, matrix, torch.where(x.abs() > 0.5, x, 0))


def test_gemv_never_reads_indices_beyond_the_count(backend: Backend) -> None:
    matrix, x = packed(300, 64), normal(64)
    loaded = backend.operations.load_zigzag(matrix, backend.device)
    indices = torch.full((64,), 1 << 30, dtype=torch.int32)
    indices[:2] = torch.tensor([3, 60])
    on_device = [value.to(backend.device) for value in (x, indices, torch.tensor(2, dtype=torch.int32))]
    y = backend.operations.zigzag_gemv(loaded, *on_device).cpu()
    only = torch.zeros(64)
    only[[3, 60]] = x[[3, 60]]
    assert_close_to_product(y, matrix, only)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemv_gives_the_same_bits_every_run(backend: Backend, shape: tuple[int, int]) -> None:
    matrix, x, threshold = packed(*shape), normal(shape[1], seed=2), torch.tensor(0.4)
    first = gemv(backend, matrix, x, threshold)
    assert all(torch.equal(gemv(backend, matrix, x, threshold), first) for _ in range(3))


@pytest.mark.parametrize("shape", [(700, 513), (1024, 2048)], ids=str)
def test_gemv_gives_the_same_bits_with_any_number_of_threads(backend: Backend, shape: tuple[int, int]) -> None:
    matrix, x, threshold = packed(*shape), normal(shape[1], seed=2), torch.tensor(0.4)
    first = gemv(backend, matrix, x, threshold)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(gemv(backend, matrix, x, threshold), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
def test_collect_and_gemv_never_wait_for_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    loaded = reference.load_zigzag(packed(300, 128), "cuda")
    x, threshold = normal(128).to("cuda"), torch.tensor(0.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        reference.zigzag_gemv(loaded, x, *reference.collect(x, threshold))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zigzag_matmul_is_the_whole_product(backend: Backend, shape: tuple[int, int], batch: int) -> None:
    matrix, x = packed(*shape), normal(batch, shape[1], seed=2)
    loaded = backend.operations.load_zigzag(matrix, backend.device)
    y = backend.operations.zigzag_matmul(loaded, x.to(backend.device)).cpu()
    assert_close_to_product(y, matrix, x)


def test_a_site_with_an_offset_is_a_product_with_the_difference(backend: Backend) -> None:
    matrix, x, offset = packed(300, 128), normal(128, seed=2), normal(128, seed=3)
    policy = SitePolicy(torch.tensor(0.7), offset)
    loaded = backend.operations.load_zigzag(matrix, backend.device)
    constant = backend.operations.zigzag_matmul(loaded, offset[None].to(backend.device))[0].cpu()
    y = gemv(backend, matrix, x - offset, policy.threshold) + constant
    expected = torch.where(active_channels(x, policy), x, offset).double() @ decode_matrix(matrix).double().T
    assert (y - expected).abs().max() < 1e-4


# the other stored types


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("type", ROW_TYPES)
def test_matmul_takes_every_stored_type(backend: Backend, type: str, batch: int) -> None:
    matrix = PackedMatrix(encode_rows(normal(77, 512), type), type, 77, 512)
    loaded = backend.operations.load_rows(matrix, backend.device)
    x = normal(batch, 512, seed=2)
    assert_close_to_product(backend.operations.matmul(loaded, x.to(backend.device)).cpu(), matrix, x)


def test_a_matrix_is_loaded_as_what_it_is(backend: Backend) -> None:
    rows = PackedMatrix(encode_rows(normal(7, 5), "F16"), "F16", 7, 5)
    with pytest.raises(ValueError, match="expected zigzag-q4_k"):
        backend.operations.load_zigzag(rows, backend.device)
    with pytest.raises(ValueError, match="expected one stored by rows"):
        backend.operations.load_rows(packed(3, 4), backend.device)


@pytest.mark.parametrize("type", ROW_TYPES)
def test_embed_looks_up_rows(type: str) -> None:
    matrix = PackedMatrix(encode_rows(normal(77, 512), type), type, 77, 512)
    ids = torch.tensor([76, 0, 3, 3])
    assert torch.equal(reference.embed(matrix, ids), decode_matrix(matrix)[ids])


# norms, rotary embedding, attention: the reference's own, against formulas in float64


def test_rms_norm() -> None:
    x, weight = normal(3, 40), normal(40, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (reference.rms_norm(x, weight, 1e-5) - expected).abs().max() < 1e-5


def test_rotary_turns_pairs_of_halves() -> None:
    inv_freq, x = torch.tensor([1.0, 0.25, 0.01]), normal(2, 4, 6)  # [heads, S, head_dim]
    cos, sin = reference.rotary_table(inv_freq, 1.5, 10)
    found = reference.rotate(x, cos[3:7], sin[3:7])
    positions = torch.arange(3, 7).double()
    pairs = torch.complex(x[..., :3].double(), x[..., 3:].double())
    turned = 1.5 * pairs * torch.polar(torch.ones(4, 3).double(), positions[:, None] * inv_freq.double())
    assert (found - torch.cat([turned.real, turned.imag], -1)).abs().max() < 1e-5


def test_a_query_sees_its_own_and_earlier_positions_within_its_window() -> None:
    assert reference.visible(2, 2, 0, 0).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert reference.visible(2, 2, 0, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert reference.visible(2, 2, 1, 2).int().tolist() == [[1, 1, 0], [0, 1, 1]]
    assert reference.visible(5, 1, 5, 1).int().tolist() == [[1]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 1), (10, 2)])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_attention_with_grouped_queries(heads: int, kv_heads: int, window: int) -> None:
    length, past, width = 4, 5, 7
    q, k, v = (normal(n, s, width, seed=n) for n, s in ((heads, length), (kv_heads, 9), (kv_heads, 9)))
    found = reference.attention(q, k, v, reference.visible(past, length, 0, window))
    for head in range(heads):
        keys, values = (t[head * kv_heads // heads].double() for t in (k, v))
        for row in range(length):
            last = past + row + 1
            first = max(0, last - window) if window else 0
            scores = keys[first:last] @ q[head, row].double() / width**0.5
            expected = scores.softmax(0) @ values[first:last]
            assert (found[row, head * width : (head + 1) * width] - expected).abs().max() < 1e-5
