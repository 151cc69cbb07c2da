"""Zigzag: Q4_K superblocks that lie within one input column, band by band."""

import codec_cases
import pytest
import torch
from codec_cases import relative_error
from devices import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.errors import PackingError
from sparsepack.formats import gptq
from sparsepack.formats.blocks import q4_k, superblock
from sparsepack.formats.blocks.table import BLOCKS, ZIGZAG_BLOCKS
from sparsepack.formats.orders import zigzag


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 700), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_packing_is_encoding_the_permuted_matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> None:
    weight = matrix(columns, rows).t() if transposed else matrix(rows, columns)
    weight = weight.to(dtype)
    blocks = zigzag.pack(weight)
    assert blocks.shape == (zigzag.bands(rows), columns, 144)
    assert torch.equal(blocks.view(-1, 144), q4_k.encode(codec_cases.zigzag_order(weight)))


@given(st.integers(1, 700), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_unpacking_restores_shape_and_weights(rows: int, columns: int) -> None:
    weight = matrix(rows, columns)
    assert relative_error(zigzag.unpack(zigzag.pack(weight), rows), weight) < 0.09


def test_a_superblock_is_256_rows_of_one_column() -> None:
    weight = matrix(512, 3)
    blocks = zigzag.pack(weight)
    assert torch.equal(blocks[1, 2], q4_k.encode(weight[256:, 2]))


def test_a_dead_input_column_is_zero_bytes() -> None:
    weight = matrix(300, 5)
    weight[:, 3] = 0
    blocks = zigzag.pack(weight)
    assert not blocks[:, 3].any()
    assert blocks[:, 2].any()


def test_chunks_that_cross_bands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(1000, 17)
    expected = zigzag.pack(weight)
    for superblocks in (1, 5, 17, 20, 40):
        monkeypatch.setattr(superblock, "CPU_WEIGHTS_AT_ONCE", superblocks * 256)
        assert torch.equal(zigzag.pack(weight), expected)


@pytest.mark.parametrize(("rows", "bands"), [(0, 0), (1, 1), (256, 1), (257, 2), (4096, 16)])
def test_bands_cover_all_rows(rows: int, bands: int) -> None:
    assert zigzag.bands(rows) == bands


def test_a_matrix_without_rows_or_columns_packs_to_nothing() -> None:
    assert zigzag.pack(torch.zeros(0, 5)).shape == (0, 5, 144)
    assert zigzag.pack(torch.zeros(5, 0)).shape == (1, 0, 144)
    assert zigzag.unpack(zigzag.pack(torch.zeros(5, 0)), 5).shape == (5, 0)


def test_unpacking_to_bfloat16_rounds_the_float32_result() -> None:
    blocks = zigzag.pack(matrix(300, 4))
    assert torch.equal(zigzag.unpack(blocks, 300, torch.bfloat16), zigzag.unpack(blocks, 300).bfloat16())


def test_wrong_matrices_are_refused() -> None:
    with pytest.raises(PackingError, match="matrix"):
        zigzag.pack(torch.zeros(256))
    with pytest.raises(PackingError, match="infinite or NaN"):
        zigzag.pack(torch.full((256, 2), float("nan")))
    with pytest.raises(PackingError, match=r"expected \[2, columns, 144\] for 300 rows"):
        zigzag.unpack(torch.zeros(1, 3, 144, dtype=torch.uint8), 300)


# rows after the whole bands


OTHERS = [("Q6_K", 0.025), ("Q8_0", 0.008)]
"""The other blocks, and the error that they may cause of such tails."""
TAILS = [(1, 1), (64, 1), (65, 2), (127, 2), (192, 3), (300, 1), (576, 1), (640, 2), (700, 3), (960, 3)]


@pytest.mark.parametrize(("rows", "pieces"), [(0, 0), (193, 0), (255, 0), (256, 0), (257, 1), (449, 0), *TAILS])
def test_at_most_192_rows_after_the_bands_are_a_tail(rows: int, pieces: int) -> None:
    assert zigzag.tail_pieces(rows) == pieces
    assert zigzag.tail_rows(rows) == (rows % 256 if pieces else 0)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 61])
@pytest.mark.parametrize(("rows", "pieces"), TAILS)
def test_a_tail_is_pieces_of_64_rows_four_to_a_superblock(rows: int, pieces: int, columns: int) -> None:
    weight = matrix(rows, columns)
    blocks, tail = zigzag.pack_with_tail(weight)
    assert tail is not None
    assert blocks.shape == (rows // 256, columns, 144)
    assert tail.shape == (-(-columns * pieces // 4), 144)
    found, whole = zigzag.unpack(blocks, rows, tail=tail), rows - rows % 256
    assert relative_error(found, weight) < 0.09
    decoded = q4_k.decode(tail).view(-1, 64)
    for column in range(columns):
        of_column = decoded[column * pieces : (column + 1) * pieces].flatten()
        assert torch.equal(of_column[: rows - whole], found[whole:, column])
    assert not decoded[columns * pieces :].any()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 61])
@pytest.mark.parametrize("rows", [rows for rows, _ in TAILS])
def test_a_tail_laid_out_as_a_band_has_the_same_weights(rows: int, columns: int) -> None:
    blocks, tail = zigzag.pack_with_tail(matrix(rows, columns))
    assert tail is not None
    band = zigzag.expand_tail(tail, rows, columns)
    padded = torch.cat([blocks, band[None]])
    assert torch.equal(zigzag.unpack(padded, rows), zigzag.unpack(blocks, rows, tail=tail))
    assert not q4_k.decode(band)[:, zigzag.tail_pieces(rows) * 64 :].any()


@pytest.mark.parametrize("columns", [1, 3, 61])
@pytest.mark.parametrize("rows", [1, 65, 192, 576, 700])
@pytest.mark.parametrize(("block", "error"), OTHERS)
def test_tails_of_other_blocks(block: str, error: float, rows: int, columns: int) -> None:
    weight = matrix(rows, columns)
    blocks, tail = zigzag.pack_with_tail(weight, block)
    assert tail is not None
    assert blocks.shape == (rows // 256, columns, zigzag.superblock_bytes(block))
    found = zigzag.unpack(blocks, rows, tail=tail, block=block)
    assert relative_error(found, weight) < error
    band = zigzag.expand_tail(tail, rows, columns, block)
    assert torch.equal(zigzag.unpack(torch.cat([blocks, band[None]]), rows, block=block), found)
    assert not BLOCKS[block].decode(band)[:, zigzag.tail_pieces(rows) * 64 :].any()


@pytest.mark.parametrize("rows", [1, 256, 300])
@pytest.mark.parametrize("block", ZIGZAG_BLOCKS[1:])
def test_superblocks_of_other_types_are_blocks_of_the_columns(block: str, rows: int) -> None:
    weight = matrix(rows, 5)
    blocks = zigzag.pack(weight, block)
    columns = torch.nn.functional.pad(weight, (0, 0, 0, -rows % 256)).t().contiguous()
    assert torch.equal(blocks.transpose(0, 1).flatten(1), BLOCKS[block].encode(columns))
    parts = BLOCKS[block].codec.apart(blocks.flatten(0, 1))
    assert torch.equal(BLOCKS[block].codec.together(parts), blocks.flatten(0, 1))


@pytest.mark.parametrize("columns", [1, 2, 3, 61])
@pytest.mark.parametrize("rows", [1, 64, 100, 192])
def test_a_column_of_a_tail_is_set_and_its_neighbours_stay(rows: int, columns: int) -> None:
    tail, other = zigzag.pack_tail(matrix(rows, columns)), matrix(rows, columns, seed=1)
    before = zigzag.unpack_tail(tail, rows, columns).clone()
    for column in {0, columns // 2, columns - 1}:
        steps = tail[:, :4].clone()
        found = gptq.set_tail_column(tail, rows, column, other[:, column].clone())
        assert torch.equal(tail[:, :4], steps)
        before[:, column] = found
        assert torch.equal(zigzag.unpack_tail(tail, rows, columns)[:, column], found)
        assert torch.equal(zigzag.unpack_tail(tail, rows, columns), before)
        assert relative_error(found, other[:, column]) < (0.2 if rows >= 64 else 2)


def test_a_column_that_is_set_to_what_it_was_is_as_near() -> None:
    weight = matrix(192, 40)
    tail = zigzag.pack_tail(weight)
    error = relative_error(zigzag.unpack_tail(tail, 192, 40), weight)
    for column in range(40):
        gptq.set_tail_column(tail, 192, column, weight[:, column].clone())
    assert relative_error(zigzag.unpack_tail(tail, 192, 40), weight) < 1.01 * error


@pytest.mark.parametrize("columns", [4, 6, 9])
def test_three_pieces_of_a_column_have_one_d_and_dmin(columns: int) -> None:
    weight = matrix(192, columns) * torch.logspace(-2, 2, columns)
    tail = zigzag.pack_tail(weight)
    for first in range(0, len(tail), 3):
        assert (tail[first : first + 3, :4] == tail[first, :4]).all()
    zigzag.check_steps(tail, 192, columns)
    tail[1, 2] ^= 1
    with pytest.raises(PackingError, match="d or dmin differ within a column"):
        zigzag.expand_tail(tail, 192, columns)


def test_a_dead_column_of_a_tail_is_zeros_and_a_dead_tail_zero_bytes() -> None:
    weight = matrix(192, 8)
    weight[:, 3] = 0
    assert not zigzag.unpack_tail(zigzag.pack_tail(weight), 192, 8)[:, 3].any()
    assert not zigzag.pack_tail(torch.zeros(192, 8)).any()


@pytest.mark.parametrize("shape", [(3, 144), (1, 144), (2, 140)])
def test_a_tail_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    tail = torch.zeros(shape, dtype=torch.uint8)
    for use in (zigzag.unpack_tail, zigzag.expand_tail, zigzag.check_steps):
        with pytest.raises(PackingError, match="zigzag tail"):
            use(tail, 320, 5)


@pytest.mark.gpu
@needs_cuda
def test_cuda_packs_as_well() -> None:
    weight = matrix(1000, 333)
    on_cuda = zigzag.pack(weight.cuda())
    assert torch.equal(zigzag.unpack(on_cuda, 1000).cpu(), zigzag.unpack(on_cuda.cpu(), 1000))
    ours = relative_error(zigzag.unpack(on_cuda.cpu(), 1000), weight)
    assert ours <= relative_error(zigzag.unpack(zigzag.pack(weight), 1000), weight) * 1.001


def test_scales_of_rows_balance_them_and_stay_within_reach() -> None:
    weight = matrix(300, 70)
    sizes = torch.exp2(torch.linspace(-3, 3, 300))
    scales = zigzag.row_scales(weight * sizes[:, None])
    assert (scales / sizes / (scales / sizes).mean() - 1).abs().max() < 0.4  # of 70 random weights in each
    assert scales.log2().mean().abs() < 0.01
    for column in (0, 69):  # a large column is the business of its own scale
        uneven = weight.clone()
        uneven[:, column] *= 100
        assert (zigzag.row_scales(uneven) / zigzag.row_scales(weight) - 1).abs().max() < 0.6
    weight[0], weight[1], weight[2] = 0, 1e30, 1e-40
    scales = zigzag.row_scales(weight)
    assert ((scales >= 2**-8) & (scales <= 2**8)).all()
    assert scales[0] == 1
    assert torch.equal(zigzag.row_scales(torch.zeros(3, 2)), torch.ones(3))
    weight[7, 7] = torch.nan
    with pytest.raises(PackingError, match="1 of 21000 are infinite or NaN"):
        zigzag.row_scales(weight)
