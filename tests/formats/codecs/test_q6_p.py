"""Q6_P: bytes, levels that are nested, what each loses, and matrices in zigzag order read at a level."""

import pytest
import torch
from codec_cases import relative_error, synthetic
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q6_p
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix, zigzag_rows
from sparsepack.formats.orders import zigzag

LEVELS = (1, 2, 3, 4, 5)
LOST = {1: 0.36, 2: 0.18, 3: 0.09, 4: 0.046, 5: 0.024}
"""The relative error of normal weights at each level, at most."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(count: int) -> Tensor:
    return torch.randint(256, (count, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_planes_alone_say_what_a_level_has(level: int) -> None:
    blocks = random_blocks(50)
    end = BLOCKS["Q6_P"].level_bytes[level - 1]
    others = blocks.clone()
    others[:, end:] = random_blocks(50).flip(0)[:, end:]
    assert torch.equal(q6_p.decode_level(blocks, level), q6_p.decode_level(others, level))
    if level < 5:
        assert not torch.equal(q6_p.decode_level(blocks, level + 1), q6_p.decode_level(others, level + 1))


def test_a_superblock_is_what_the_page_says_byte_by_byte() -> None:
    blocks = random_blocks(3)
    for block in blocks:
        pairs = zip(block[:4].tolist(), block[4:8].tolist(), strict=True)
        scales = [2.0 ** (s // 8 - 24) * (1 + s % 8 / 8 + b // 64 / 32) for s, b in pairs]
        centres = [4 * (b % 64 - 64 * (b % 64 >= 32)) + 2 for b in block[4:8].tolist()]
        for weight in (0, 63, 64, 130, 255):
            group, place = divmod(weight, 64)
            half, byte = divmod(place, 32)
            q = int(block[8 + place]) >> 2 * group & 3
            for level, (step, middle) in enumerate(((60, 90), (32, 112), (16, 120), (8, 124), (4, 126)), 1):
                if level > 1:
                    q = 2 * q + (int(block[72 + 32 * (level - 2) + byte]) >> 2 * group + half & 1)
                expected = scales[group] * (step * q - middle + centres[group])
                assert q6_p.decode_level(block[None], level)[0, weight] == expected


@pytest.mark.parametrize("level", LEVELS)
def test_normal_weights_lose_little_at_each_level(level: int) -> None:
    weights = normal(500, 256)
    assert relative_error(BLOCKS["Q6_P"].decode(q6_p.encode(weights), level=level), weights) < LOST[level]


@pytest.mark.parametrize("name", sorted(synthetic().keys() - {"normal 1e-6", "normal 1e6", "cauchy"}))
def test_no_weights_are_beyond_the_bound_of_the_type(name: str) -> None:
    """But those of sizes that no scale is for, below 1e-5 and above 3e4."""
    weights = synthetic()[name]
    assert relative_error(q6_p.decode(q6_p.encode(weights)), weights) < BLOCKS["Q6_P"].error


def test_zeros_stay_zeros_and_what_no_number_is_is_refused() -> None:
    assert not q6_p.decode(q6_p.encode(torch.zeros(2, 512))).any()
    pruned = normal(50, 256) * (normal(50, 256, seed=1) > 0) + (normal(50, 1, seed=2) > 0)
    assert not q6_p.decode(q6_p.encode(pruned))[pruned == 0].any()
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(PackingError, match="infinite or NaN"):
            q6_p.encode(torch.full((256,), wrong))
    with pytest.raises(PackingError, match="multiple of 256"):
        q6_p.encode(torch.zeros(300))


def test_parts_go_together_again() -> None:
    blocks = random_blocks(20)
    assert torch.equal(q6_p.CODEC.together(q6_p.CODEC.apart(blocks)), blocks)


@pytest.mark.parametrize("size", [1e-4, 1.0, 400.0])
def test_weights_of_all_sizes_lose_as_little(size: float) -> None:
    weights = size * torch.rand(50, 256, generator=torch.Generator().manual_seed(3)) - size / 2
    assert relative_error(q6_p.decode(q6_p.encode(weights)), weights) < 0.02
    beyond = torch.full((1, 256), 3 * q6_p.HIGHEST)
    assert q6_p.decode(q6_p.encode(beyond)).allclose(torch.tensor(q6_p.HIGHEST), rtol=0.02)


@pytest.mark.parametrize("rows", [1, 64, 192, 256, 300, 449, 1100])
@pytest.mark.parametrize("level", LEVELS)
def test_a_matrix_in_zigzag_order_is_read_at_a_level(rows: int, level: int) -> None:
    weight = normal(rows, 37)
    blocks, tail = zigzag.pack_with_tail(weight, "Q6_P")
    scales = torch.rand(rows) + 0.5
    matrix = PackedMatrix(blocks, MatrixFormat("Q6_P", "zigzag"), rows, 37, tail, scales)
    found = decode_matrix(matrix, level)
    assert relative_error(found, weight * scales[:, None]) < LOST[level] * (1.5 if rows < 64 else 1.1)
    assert torch.equal(decode_matrix(matrix.padded(), level), found)
    assert torch.equal(zigzag_rows(matrix, rows // 3, rows, level), found[rows // 3 :])
    assert (matrix.levels, matrix.units) == ((72, 104, 136, 168, 200), 37 * 200)


def test_a_dense_read_is_the_last_level() -> None:
    blocks = random_blocks(9)
    assert torch.equal(q6_p.decode(blocks), q6_p.decode_level(blocks, 5))
