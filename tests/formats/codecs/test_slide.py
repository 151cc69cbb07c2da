"""Sliding windows: slid weights times lifted inputs are weights times inputs, whatever the pattern of the nonzeros."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.errors import PackingError
from sparsepack.formats.orders.slide import Slide, expand, pack_positions, slide, unpack_positions, unslide, windowed
from sparsepack.models.pattern import Pattern, kept

PATTERNS = [(2, 4), (4, 6), (4, 8), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers other than 0."""
    values = torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(seed))
    return values * (1 - 2 * (values % 2))


def pruned(rows: int, columns: int, pattern: Pattern, seed: int = 0) -> torch.Tensor:
    weight = numbers(rows, columns, seed=seed)
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 1))
    return weight * kept(scores, pattern)


def assert_exact(weight: torch.Tensor, how: Slide) -> None:
    """All that a slid matrix has to be."""
    rows, columns = weight.shape
    values, positions = slide(weight, how)
    assert values.shape == positions.shape == (rows, how.stored(columns))
    assert torch.equal(unslide(values, positions, how, columns), weight)
    dense = windowed(values, positions, how)
    assert dense.shape == (rows, how.expanded(columns))
    assert ((dense.view(rows, -1, how.window) != 0).sum(-1) <= how.most).all()
    x = numbers(5, columns, seed=7)
    expanded = expand(x, how)
    assert expanded.shape == (5, how.expanded(columns))
    assert torch.equal(expanded @ dense.t(), x @ weight.t())


@pytest.mark.parametrize(("keep", "of"), [(4, 6), (6, 8), (8, 10)])
def test_every_set_of_nonzeros_is_exact(keep: int, of: int) -> None:
    masks = [set(chosen) for count in range(keep + 1) for chosen in combinations(range(of), count)]
    mask = torch.tensor([[i in chosen for i in range(of)] for chosen in masks])
    assert_exact(numbers(len(masks), of) * mask, Slide(Pattern(keep, of)))


@given(
    st.sampled_from(PATTERNS),
    st.integers(1, 20),
    st.integers(1, 100),
    st.integers(0, 1000),
    st.sampled_from([torch.int8, torch.float32, torch.float16, torch.bfloat16]),
)
@settings(deadline=None, max_examples=60)
def test_any_matrix_with_tails_and_empty_groups_is_exact(
    kind: tuple[int, int], rows: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    pattern = Pattern(*kind)
    weight = pruned(rows, columns, pattern, seed)
    weight[0] = 0
    weight[:, : pattern.of] *= seed % 2
    assert_exact(weight, Slide(pattern))
    values, positions = slide(weight.to(dtype), Slide(pattern))
    assert values.dtype == dtype
    assert torch.equal(unslide(values, positions, Slide(pattern), columns).long(), weight)


def test_the_paper_s_example() -> None:
    how = Slide(Pattern(6, 8))
    values, positions = slide(torch.tensor([[1, 2, 3, 4, 0, 0, 5, 6]]), how)
    assert values.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert windowed(values, positions, how).tolist() == [[1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 5, 6]]
    assert expand(torch.arange(8), how).tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7]


@pytest.mark.parametrize(("keep", "of", "most", "window"), [(3, 6, 2, 4), (6, 9, 3, 6), (9, 12, 3, 6), (5, 6, 3, 4)])
def test_other_hardware_is_exact_too(keep: int, of: int, most: int, window: int) -> None:
    pattern = Pattern(keep, of)
    assert_exact(pruned(300, 5 * of + 1, pattern), Slide(pattern, most, window))


@pytest.mark.parametrize(
    ("keep", "of", "most", "window", "said"),
    [
        (7, 8, 2, 4, "have no room for every choice of 7"),
        (2, 7, 1, 4, "have no room for every choice of 2"),  # where theorem 2 of the paper says that they have
        (6, 9, 2, 4, "do not cover it"),
        (1, 2, 2, 4, "do not cover it"),
    ],
)
def test_a_pattern_that_windows_cannot_hold_is_refused(keep: int, of: int, most: int, window: int, said: str) -> None:
    with pytest.raises(PackingError, match=said):
        Slide(Pattern(keep, of), most, window)


def test_a_matrix_without_the_pattern_is_refused_by_row_and_inputs() -> None:
    weight = pruned(4, 20, Pattern(6, 8))
    weight[2, 8:16] = 1
    with pytest.raises(PackingError, match=r"^row 2 has 8 nonzeros in its inputs 8 to 15, keep 6 of 8 allows 6"):
        slide(weight, Slide(Pattern(6, 8)))


@pytest.mark.parametrize("columns", [8, 12, 20, 64])
def test_positions_go_into_two_bits_and_back(columns: int) -> None:
    how = Slide(Pattern(6, 8))
    _, positions = slide(pruned(9, columns, how.pattern), how)
    packed = pack_positions(positions)
    assert packed.shape == (9, -(-how.stored(columns) // 4))
    assert torch.equal(unpack_positions(packed, how.stored(columns), how), positions)


def test_positions_that_no_hardware_takes_are_refused() -> None:
    how = Slide(Pattern(6, 8))
    _, positions = slide(pruned(9, 64, how.pattern), how)
    positions[3, 10:12] = 2
    with pytest.raises(PackingError, match="the positions of row 3, window 5 do not ascend"):
        unpack_positions(pack_positions(positions), how.stored(64), how)


@pytest.mark.parametrize(("keep", "of"), [(0, 4), (4, 4), (5, 4), (16, 17)])
def test_a_pattern_that_means_nothing_is_refused(keep: int, of: int) -> None:
    with pytest.raises(PackingError, match=f"keep {keep} of {of}: expected"):
        Pattern(keep, of)


@pytest.mark.parametrize("columns", [1, 5, 8, 21])
def test_the_highest_scores_of_each_group_are_kept(columns: int) -> None:
    pattern = Pattern(6, 8)
    scores = torch.rand(50, columns, generator=torch.Generator().manual_seed(0))
    scores[0] = 0
    mask = kept(scores, pattern)
    for first in range(0, columns, 8):
        part, chosen = scores[:, first : first + 8], mask[:, first : first + 8]
        assert (chosen.sum(1) == min(6, part.shape[1])).all()
        lost = torch.where(chosen, -1.0, part).amax(1)
        assert (lost <= torch.where(chosen, part, 2.0).amin(1)).all()
    assert mask[0].tolist() == [i % 8 < 6 for i in range(columns)]
