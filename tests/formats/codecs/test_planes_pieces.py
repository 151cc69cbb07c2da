"""Pieces of 64 rows: the same weights as superblocks in zigzag order, at every level, there and back."""

import pytest
import torch

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q6_p
from sparsepack.formats.orders import planes, zigzag

ROWS = [1, 63, 64, 65, 192, 193, 255, 256, 257, 448, 500, 1000]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [1, 3, 8, 17])
def test_they_have_the_bits_of_superblocks(rows: int, columns: int) -> None:
    blocks, tail = zigzag.pack_with_tail(torch.randn(rows, columns), "Q6_P")
    stored = planes.from_zigzag(blocks, tail, rows)
    assert stored.shape == (planes.pieces(rows), columns, 50)
    for level in range(1, 6):
        expected = zigzag.unpack(blocks, rows, tail=tail, block="Q6_P", level=level)
        assert torch.equal(planes.decode(stored, rows, level), expected)
    again, again_tail = planes.to_zigzag(stored, rows)
    assert torch.equal(again, blocks)
    assert (again_tail is None) == (tail is None)
    assert tail is None or torch.equal(again_tail, tail)


def test_ranks_take_whole_pieces_and_any_columns() -> None:
    weight = torch.randn(320, 10)
    stored = planes.from_zigzag(*zigzag.pack_with_tail(weight, "Q6_P"), 320)
    whole = planes.decode(stored, 320)
    assert torch.equal(planes.decode(stored[2:4, 3:7], 128), whole[128:256, 3:7])
    blocks, tail = planes.to_zigzag(stored[2:5, 3:7].contiguous(), 192)
    assert torch.equal(zigzag.unpack(blocks, 192, tail=tail, block="Q6_P"), whole[128:320, 3:7])


def test_the_bits_are_where_the_page_says() -> None:
    """docs/planes-folder.md, by hand: row 37 of a piece."""
    blocks, tail = zigzag.pack_with_tail(torch.randn(64, 1), "Q6_P")
    piece = planes.from_zigzag(blocks, tail, 64)[0, 0].tolist()
    s, b = piece[0], piece[1]
    q = piece[2 + 37 % 16] >> 2 * (37 // 16) & 3
    for plane in range(4):
        q = q << 1 | piece[18 + 8 * plane + 37 % 8] >> 37 // 8 & 1
    scale = 2.0 ** (s // 8 - 24) * (1 + s % 8 / 8 + b // 64 / 32)
    low = b % 64
    m = 4 * (low - 64 if low > 31 else low) + 2
    assert scale * (4 * q - 126 + m) == float(planes.decode(torch.tensor([[piece]], dtype=torch.uint8), 64)[37, 0])


@pytest.mark.parametrize("shape", [(2, 3, 49), (1, 3, 50), (3, 3, 50), (2, 50)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PackingError, match=r"expected uint8 \[2, columns, 50\] for 65 rows"):
        planes.decode(torch.zeros(shape, dtype=torch.uint8), 65)


def test_padding_behind_the_last_column_is_zero() -> None:
    """Also where groups come from error feedback, which has none for these."""
    each, numbers = q6_p.fit(torch.randn(3, 1, 64))
    _, tail = planes.superblocks(each, numbers, 64)
    assert tail is not None
    assert not q6_p.decode(tail).view(4, 64)[3].any()
