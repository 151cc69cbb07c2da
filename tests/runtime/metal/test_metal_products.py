"""The Metal kernels that multiply with matrices, zigzag and stored by rows, from their own sources on this processor
(metal_emulation.py), against plain torch."""

import pytest
import torch
from metal_emulation import Library
from metal_launches import CANDIDATES, SEGMENT, TYPES, assert_near, bits, launched, listed, random
from torch import Tensor

from sparsepack.formats.blocks import q4_k
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.zigzag import BAND_ROWS


@pytest.mark.parametrize(("splits", "simdgroups"), [(1, 1), (1, 2), (5, 2), (32, 2), (3, 8), (7, 3)])
@pytest.mark.parametrize(("rows", "columns", "share"), [(300, 70, 0.5), (1, 1, 1), (513, 2100, 0.1), (256, 1025, 1)])
def test_gemv_sums_the_active_columns(
    library: Library, rows: int, columns: int, share: float, splits: int, simdgroups: int
) -> None:
    check_gemv(library, rows, columns, torch.rand(columns) < share, splits, simdgroups)


@pytest.mark.parametrize("active", [0, 1, 2, 3, 63, 64, 65, 127, 300])
def test_gemv_divides_any_number_of_columns(library: Library, active: int) -> None:
    mask = torch.zeros(300, dtype=torch.bool)
    mask[torch.randperm(300)[:active]] = True
    check_gemv(library, 257, 300, mask, splits=16, simdgroups=4)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_gemv_steps_over_segments_without_active_columns(library: Library, empty: int) -> None:
    mask = torch.rand(3 * SEGMENT) < 0.05
    mask[empty * SEGMENT : (empty + 1) * SEGMENT] = False
    check_gemv(library, 20, 3 * SEGMENT, mask, splits=3, simdgroups=2)


def check_gemv(library: Library, rows: int, columns: int, mask: Tensor, splits: int, simdgroups: int) -> None:
    blocks = zigzag.pack(random(rows, columns))
    bands, active, x = len(blocks), mask.nonzero()[:, 0], random(columns)
    row_scale = torch.rand(bands * BAND_ROWS)
    parts, counted = launched(
        library,
        "zigzag_gemv",
        [blocks, *listed(x, active), None, None, columns, row_scale, 1],
        lambda: [torch.full((splits, bands * BAND_ROWS), float("nan")), torch.full((1,), 7, dtype=torch.int32)],
        (splits, bands),
        32 * simdgroups,
    )
    assert int(counted) == 7 + len(active)
    assert torch.isfinite(parts).all()
    # Minima are taken off in the end, so that an error is one of the largest weights.
    weights, of_x = (zigzag.unpack(blocks, rows) * row_scale[:rows, None]).double()[:, active], x[active].double()
    size = 4 * zigzag.unpack(blocks, rows).abs().max() * (of_x.abs().sum() + 1)
    assert_near(parts.double().sum(0)[:rows], weights @ of_x, size)
    # The columns are divided evenly, and in order: the first splits have those that are left over.
    ends = [0]
    for number in range(splits * simdgroups):
        each, rest = divmod(len(active), splits * simdgroups)
        ends.append(ends[-1] + each + (number < rest))
    for split in range(splits):
        part = slice(ends[split * simdgroups], ends[(split + 1) * simdgroups])
        assert_near(parts[split, :rows], weights[:, part] @ of_x[part], size)


LEVELS_OF = {
    "mixed": lambda columns: torch.randint(6, (columns,)),
    "none": lambda columns: torch.zeros(columns, dtype=torch.int64),
    **{str(level): lambda columns, level=level: torch.full((columns,), level) for level in range(1, 6)},
}


@pytest.mark.parametrize("kind", [*LEVELS_OF, "whole"])
@pytest.mark.parametrize(
    ("rows", "columns", "splits", "simdgroups"), [(300, 70, 5, 2), (1, 1, 1, 1), (513, 2100, 3, 8)]
)
def test_planes_are_summed_at_the_levels_of_their_columns(
    library: Library, kind: str, rows: int, columns: int, splits: int, simdgroups: int
) -> None:
    blocks, x = zigzag.pack(random(rows, columns), "Q6_P"), random(columns)
    levels = LEVELS_OF.get(kind, LEVELS_OF["5"])(columns)
    bands, row_scale = len(blocks), torch.rand(len(blocks) * BAND_ROWS)
    active = levels.nonzero()[:, 0]
    parts, counted = launched(
        library,
        "planes_gemv",
        [blocks, *listed(x, active, None if kind == "whole" else levels), None, None, columns, row_scale, 1],
        lambda: [torch.full((splits, bands * BAND_ROWS), float("nan")), torch.full((1,), 7, dtype=torch.int32)],
        (splits, bands),
        32 * simdgroups,
    )
    assert int(counted) == 7 + sum((0, *BLOCKS["Q6_P"].level_bytes)[level] for level in levels.tolist())
    expected = torch.zeros(rows, dtype=torch.float64)
    for level in range(1, 6):
        weights = zigzag.unpack(blocks, rows, block="Q6_P", level=level).double()
        expected += weights @ torch.where(levels == level, x, 0).double()
    size = 4 * zigzag.unpack(blocks, rows, block="Q6_P").abs().max() * (x.abs().sum() + 1)
    assert_near(parts.double().sum(0)[:rows], expected * row_scale[:rows], size)


@pytest.mark.parametrize("level", range(1, 6))
def test_decoded_planes_are_the_codecs_weights(library: Library, level: int) -> None:
    blocks = zigzag.pack(random(700, 17), "Q6_P")
    (out,) = launched(
        library,
        "planes_decode",
        [blocks, None, 17, 1, level],
        lambda: [torch.full((17, 2 * BAND_ROWS), float("nan"))],
        (3, 2),
        256,
    )
    expected = BLOCKS["Q6_P"].decode(blocks[1:3], level=level).permute(1, 0, 2).reshape(17, -1)
    assert_near(out, expected.double())


@pytest.mark.parametrize(
    ("rows", "columns", "first", "bands"), [(300, 5, 0, 2), (700, 17, 1, 2), (1, 1, 0, 1), (513, 8, 2, 1)]
)
def test_decoded_bands_are_the_codecs_weights(
    library: Library, rows: int, columns: int, first: int, bands: int
) -> None:
    blocks = zigzag.pack(random(rows, columns))
    (out,) = launched(
        library,
        "zigzag_decode",
        [blocks, None, columns, first],
        lambda: [torch.full((columns, bands * BAND_ROWS), float("nan"))],
        (-(-columns // 8), bands),
        256,
    )
    expected = q4_k.decode(blocks[first : first + bands]).permute(1, 0, 2).reshape(columns, -1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("type", TYPES)
def test_embedded_rows_are_the_codecs(library: Library, type: str) -> None:
    rows, columns = 9, 1280
    blocks = BLOCKS[type].encode(random(rows, columns))
    ids = torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    assert torch.equal(embedded(library, blocks, type, rows, columns, ids), BLOCKS[type].decode(blocks[ids]))


@pytest.mark.parametrize(("type", "columns"), [("F32", 1), ("F16", 5), ("BF16", 1027), ("Q8_0", 32), ("Q8_0", 1056)])
def test_embedded_rows_of_odd_widths(library: Library, type: str, columns: int) -> None:
    blocks = BLOCKS[type].encode(random(4, columns))
    ids = torch.tensor([2, 1], dtype=torch.int32)
    assert torch.equal(embedded(library, blocks, type, 4, columns, ids), BLOCKS[type].decode(blocks[ids]))


def test_an_id_that_is_no_row_gives_nan(library: Library) -> None:
    blocks = BLOCKS["F16"].encode(random(4, 8))
    out = embedded(library, blocks, "F16", 4, 8, torch.tensor([-1, 3, 4], dtype=torch.int32))
    assert out.isnan().all(1).tolist() == [True, False, True]


def embedded(library: Library, blocks: Tensor, type: str, rows: int, columns: int, ids: Tensor) -> Tensor:
    given = [ids, blocks, None, TYPES.index(type), rows, columns, blocks.shape[1]]
    groups = (-(-columns // 1024), len(ids))
    return launched(library, "embed", given, lambda: [torch.empty(len(ids), columns)], groups, 256)[0]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 77])
def test_products_with_rows(library: Library, type: str, rows: int) -> None:
    columns = {"F16": 37, "Q8_0": 96}.get(type, 512)
    blocks, x = BLOCKS[type].encode(random(rows, columns)), random(columns)
    groups = -(-rows // 16)
    y, best, best_rows = launched(
        library,
        "rows_product",
        [blocks, x, None, None, None, TYPES.index(type), rows, columns, blocks.shape[1], CANDIDATES],
        lambda: [torch.empty(rows), torch.empty(groups), torch.empty(groups, dtype=torch.int32)],
        groups,
        128,
    )
    weights = BLOCKS[type].decode(blocks).double()
    assert_near(y, weights @ x.double(), 3 * (weights.abs() @ x.double().abs()))
    for group in range(groups):
        part = y[16 * group : 16 * (group + 1)]
        assert best[group] == part.max()
        assert best_rows[group] == 16 * group + int((part == part.max()).nonzero()[0])


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-3.0, -1.0, -2.0], 1),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([1.0, float("inf"), float("nan")], 2),
        ([float("-inf")], 0),
        ([float("-inf")] * 40, 0),
        ([0.0] * 50 + [1.0] * 50, 50),
    ],
)
def test_the_likeliest_is_the_lowest_of_equals(library: Library, logits: list[float], expected: int) -> None:
    """By a product with a matrix of one column, whose candidates are picked from."""
    rows = len(logits)
    blocks, groups = torch.tensor(logits)[:, None].view(torch.uint8), -(-rows // 16)
    picked, top = picked_from(library, blocks, rows, groups)
    assert picked == expected
    assert bits(top).item() & 0x7FFFFFFF == bits(torch.tensor([logits[expected]])).item() & 0x7FFFFFFF


def test_the_likeliest_of_many(library: Library) -> None:
    logits = random(20000)
    logits[[7, 12345, 19999]] = 9.0
    assert picked_from(library, BLOCKS["F32"].encode(logits[:, None]), 20000, 1250)[0] == 7


def picked_from(library: Library, blocks: Tensor, rows: int, groups: int) -> tuple[int, Tensor]:
    _, best, best_rows = launched(
        library,
        "rows_product",
        [blocks, torch.ones(1), None, None, None, 0, rows, 1, 4, CANDIDATES],
        lambda: [torch.empty(rows), torch.empty(groups), torch.empty(groups, dtype=torch.int32)],
        groups,
        128,
    )
    id, top = launched(
        library,
        "pick_likeliest",
        [best, best_rows, None, None, groups],
        lambda: [torch.full((1,), -1, dtype=torch.int32), torch.empty(1)],
        1,
        1024,
    )
    return int(id), top
