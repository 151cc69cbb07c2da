"""Products with matrices stored by rows and look-ups in them on the GPU, against float64 and the codecs."""

from functools import cache

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.models.activations import soft_capped
from sparsepack.runtime.cuda.decoder.step_end import pick_likeliest
from sparsepack.runtime.cuda.products import rows
from sparsepack.runtime.cuda.products.rows import blocks, embed, load_rows, matmul, new_candidates, product

pytestmark = pytest.mark.gpu

FLOATS = ["F32", "F16", "BF16"]
TYPES = [*FLOATS, "Q4_K", "Q6_K", "Q8_0"]
SHAPES = [(77, 512), (1, 256), (2000, 1024)]
FLOAT_SHAPES = [(300, 64), (33, 513), (5, 3)]
Q8_0_SHAPES = [(9, 32), (33, 96), (300, 896), (130, 1056)]
CASES = [
    *((type, shape) for type in TYPES for shape in SHAPES),
    *((type, shape) for type in FLOATS for shape in FLOAT_SHAPES),
    *(("Q8_0", shape) for shape in Q8_0_SHAPES),
]
EPS = 1e-5


@cache
def packed(type: str, shape: tuple[int, int]) -> PackedMatrix:
    return PackedMatrix(BLOCKS[type].encode(normal(*shape, seed=shape[0])), MatrixFormat(type), *shape)


@cache
def weights(type: str, shape: tuple[int, int]) -> Tensor:
    """What the codec decodes: float32."""
    return decode_matrix(packed(type, shape))


@cache
def loaded(type: str, shape: tuple[int, int]) -> rows.RowsMatrix:
    return load_rows(packed(type, shape), "cuda")


def multiplied(type: str, shape: tuple[int, int], x: Tensor, norm: Tensor | None = None) -> Tensor:
    y = torch.full((len(x), shape[0]), float("nan"), device="cuda")
    product(loaded(type, shape), x.cuda(), y, norm=None if norm is None else norm.cuda(), eps=EPS)
    return y.cpu()


def assert_is_product(y: Tensor, weight: Tensor, x: Tensor) -> None:
    """Every vector within 1e-6 of what the terms amount to where their signs are random."""
    w, x = weight.double(), x.double()
    assert y.shape == (len(x), len(w))
    error, size = y.double() - x @ w.T, (x.square() @ w.square().T).sqrt()
    assert (error.norm(dim=1) <= 1e-6 * size.norm(dim=1)).all()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("vectors", [1, 2, 5, 8])
@pytest.mark.parametrize(("type", "shape"), CASES, ids=str)
def test_product_is_that_of_the_decoded_weights(type: str, shape: tuple[int, int], vectors: int, norm: bool) -> None:
    x = normal(vectors, shape[1], seed=vectors) * torch.logspace(-3, 3, vectors)[:, None]
    weight = normal(shape[1], seed=4)
    y = multiplied(type, shape, x, weight if norm else None)
    x = x.double()
    if norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()
    assert_is_product(y, weights(type, shape), x)


@pytest.mark.parametrize(
    ("type", "factors"), [("Q4_K", slice(0, 4)), ("Q6_K", slice(208, 210)), ("Q8_0", slice(0, 2))], ids=str
)
def test_every_pattern_of_bits_counts(type: str, factors: slice) -> None:
    weights, block_bytes = BLOCKS[type].weights, BLOCKS[type].bytes
    shape = (40, 512 // weights, block_bytes)
    blocks = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(9)).to(torch.uint8)
    fresh = normal(*shape[:2], (factors.stop - factors.start) // 2, seed=8).half()
    blocks[..., factors] = fresh.view(torch.uint8).view(*shape[:2], -1)
    matrix = PackedMatrix(blocks.view(40, -1), MatrixFormat(type), 40, 512)
    x, on_device = normal(3, 512), load_rows(matrix, "cuda")
    y = torch.empty(3, 40, device="cuda")
    product(on_device, x.cuda(), y)
    assert_is_product(y.cpu(), decode_matrix(matrix), x)
    out = torch.empty(40, 512, device="cuda")
    embed(on_device, torch.arange(40, dtype=torch.int32, device="cuda"), out)
    assert torch.equal(out.cpu(), decode_matrix(matrix))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("vectors", [1, 8])
def test_rows_wider_than_shared_memory_take_several_pieces(type: str, vectors: int) -> None:
    shape = (40, 16384)
    x = normal(vectors, shape[1])
    y = multiplied(type, shape, x, torch.ones(shape[1]))
    assert_is_product(y, weights(type, shape), x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS))
    assert torch.equal(y, multiplied(type, shape, x, torch.ones(shape[1])))


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_the_size_of_the_input_does_not_matter(size: float) -> None:
    x = normal(1, 1024) * size
    x[0, 100] *= 1000
    assert_is_product(multiplied("Q6_K", (2000, 1024), x), weights("Q6_K", (2000, 1024)), x)


@pytest.mark.parametrize("type", TYPES)
def test_a_vector_has_the_same_bits_every_time_and_in_any_company(type: str) -> None:
    x = normal(8, 1024, seed=5)
    together = multiplied(type, (2000, 1024), x)
    assert torch.equal(together, multiplied(type, (2000, 1024), x))
    for i in range(8):
        assert torch.equal(together[i], multiplied(type, (2000, 1024), x[i : i + 1])[0])


@pytest.mark.parametrize("vectors", [0, 1, 8, 9, 16, 17, 50])
@pytest.mark.parametrize(
    ("type", "shape"), [("Q8_0", (33, 96)), ("Q6_K", (2000, 1024)), ("Q4_K", (77, 512)), ("F16", (33, 513))], ids=str
)
def test_matmul_takes_any_number_of_vectors(type: str, shape: tuple[int, int], vectors: int) -> None:
    x = normal(vectors, shape[1])
    y = matmul(loaded(type, shape), x.cuda()).cpu()
    assert_is_product(y, weights(type, shape), x)


def test_matmul_decodes_a_part_of_the_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SCRATCH_WEIGHTS", 300 * 1024)
    x = normal(20, 1024)
    assert_is_product(matmul(loaded("Q6_K", (2000, 1024)), x.cuda()).cpu(), weights("Q6_K", (2000, 1024)), x)


@pytest.mark.parametrize(("type", "shape"), CASES, ids=str)
def test_embed_has_the_bits_of_the_codec(type: str, shape: tuple[int, int]) -> None:
    ids = torch.randint(0, shape[0], (70,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = torch.full((70, shape[1]), float("nan"), device="cuda")
    embed(loaded(type, shape), ids.cuda(), out)
    assert torch.equal(out.cpu(), weights(type, shape)[ids.long()])


@pytest.mark.parametrize("type", TYPES)
def test_rows_that_are_looked_up_may_be_scaled(type: str) -> None:
    out, ids = torch.empty(3, 512, device="cuda"), torch.tensor([76, 0, 5], dtype=torch.int32)
    embed(loaded(type, (77, 512)), ids.cuda(), out, 48.5)
    assert torch.equal(out.cpu(), weights(type, (77, 512))[ids] * torch.tensor(48.5))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("vectors", [1, 8])
def test_products_may_have_a_soft_cap(type: str, vectors: int) -> None:
    matrix, x, y = loaded(type, (2000, 1024)), normal(vectors, 1024), torch.empty(vectors, 2000, device="cuda")
    candidates = new_candidates(matrix, vectors)
    product(matrix, x.cuda(), y, cap=30.0, candidates=candidates)
    expected = soft_capped(x.double() @ weights(type, (2000, 1024)).double().T, 30.0)
    assert (y.cpu() - expected).abs().max() < 1e-4
    assert 10 < float(y.abs().max()) < 30
    ids, best = torch.empty(vectors, dtype=torch.int32, device="cuda"), torch.empty(vectors, device="cuda")
    pick_likeliest(candidates, ids, best)
    assert torch.equal(best, y.amax(1))


def test_an_id_that_is_no_row_gives_nan() -> None:
    out = torch.zeros(3, 512, device="cuda")
    embed(loaded("Q6_K", (77, 512)), torch.tensor([-1, 77, 76], dtype=torch.int32, device="cuda"), out)
    assert out.isnan().all(dim=1).tolist() == [True, True, False]


@pytest.mark.parametrize(("type", "shape"), [("Q6_K", (77, 512)), ("Q4_K", (77, 512)), ("BF16", (33, 513))], ids=str)
def test_loading_in_chunks_gives_the_same(type: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "REPACKED_AT_ONCE", 20 * packed(type, shape).blocks.shape[1])
    assert torch.equal(load_rows(packed(type, shape), "cuda").data, loaded(type, shape).data)


@pytest.mark.parametrize(("type", "stored"), [("Q6_K", 210), ("Q4_K", 144), ("F16", 512)])
def test_a_loaded_matrix_takes_its_stored_size(type: str, stored: int) -> None:
    assert loaded(type, (2000, 1024)).data.numel() == 2000 * 4 * stored


def test_products_and_look_ups_do_not_wait() -> None:
    matrix = loaded("Q6_K", (2000, 1024))
    x, y = torch.zeros(1, 1024, device="cuda"), torch.empty(1, 2000, device="cuda")
    ids, candidates = torch.zeros(1, dtype=torch.int32, device="cuda"), new_candidates(matrix, 1)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)  # the first time compiles
        try:
            embed(matrix, ids, x)
            product(matrix, x, y, candidates=candidates)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert candidates.shape == (1, blocks(matrix))


def test_what_does_not_fit_is_an_error() -> None:
    matrix, x = loaded("Q6_K", (77, 512)), torch.zeros(1, 512, device="cuda")
    y = torch.zeros(1, 77, device="cuda")
    with pytest.raises(ValueError, match=r"x: .*expected contiguous float32 \[1, 512\]"):
        product(matrix, x[:, :256], y)
    with pytest.raises(ValueError, match="9 vectors, expected 1 to 8"):
        product(matrix, x.new_zeros(9, 512), y.new_zeros(9, 77))
    with pytest.raises(ValueError, match="expected a multiple of 16"):
        product(matrix, x.new_zeros(513)[1:].view(1, 512), y)
    with pytest.raises(ValueError, match="candidates"):
        product(matrix, x, y, candidates=torch.zeros(1, 999, dtype=torch.int64, device="cuda"))
    with pytest.raises(ValueError, match="expected one stored by rows"):
        load_rows(PackedMatrix(zigzag.pack(normal(256, 4)), MatrixFormat("Q4_K", "zigzag"), 256, 4), "cuda")
