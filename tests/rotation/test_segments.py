"""Which blocks have one basis: boundaries by what is lost, and the bases of a model's segments."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from sparsepack.calibrate import pca
from sparsepack.calibrate.bases import Run, chosen_segments, energy_lost, pooled
from sparsepack.calibrate.folder import PRODUCT, Calibration
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.statistics import second_moments
from sparsepack.errors import RotationError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import Bases, bases_of

HIDDEN = 16


def moments(seed: int, noise: float = 0.0) -> Tensor:
    """Second moments with axes of a seed's own, and a little of another's."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator).double()).Q
    made = axes @ torch.logspace(0, -4, HIDDEN).double().diag() @ axes.t()
    return made / made.trace() if not noise else made / made.trace() + noise * moments(1000 + int(1e6 * noise))


def runs_of(kinds: str, lengths: Sequence[int] = ()) -> list[Run]:
    """A run for each letter: the same letter has the same axes, a little disturbed."""
    found, first = [], 0
    for number, (letter, blocks) in enumerate(zip(kinds, lengths or [1] * len(kinds), strict=True)):
        found.append((range(first, first + blocks), moments(ord(letter), 1e-3 * (number + 1))))
        first += blocks
    return found


def lost(segment: Sequence[Run]) -> float:
    """In all of its blocks."""
    return sum(len(blocks) * share for (blocks, _), share in zip(segment, energy_lost(segment), strict=True))


def starts(segments: Sequence[Sequence[Run]]) -> list[int]:
    return [runs[0][0].start for runs in segments]


@pytest.mark.parametrize(
    ("kinds", "count", "expected"),
    [
        ("aaabbbbb", 2, [0, 3]),
        ("abbbbbbb", 2, [0, 1]),
        ("aaaaaaab", 2, [0, 7]),
        ("aabbbacc", 4, [0, 2, 5, 6]),
        ("aabbcc", 3, [0, 2, 4]),
        ("aabbccdd", 1, [0]),
        ("abc", 3, [0, 1, 2]),
    ],
)
def test_boundaries_are_where_the_axes_change(kinds: str, count: int, expected: list[int]) -> None:
    assert starts(chosen_segments(runs_of(kinds), count)) == expected


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_no_other_boundaries_lose_less(count: int) -> None:
    runs = runs_of("abcdef", [1, 2, 1, 1, 3, 1])
    chosen = sum(map(lost, chosen_segments(runs, count)))
    every = [[0, *ends, len(runs)] for ends in combinations(range(1, len(runs)), count - 1)]
    least = min(sum(lost(runs[first:end]) for first, end in pairwise(ends)) for ends in every)
    assert chosen == pytest.approx(least, abs=1e-8)


def test_where_all_lose_the_same_segments_are_even_and_begin_early() -> None:
    same = [(range(n, n + 1), moments(1)) for n in range(8)]
    assert [starts(chosen_segments(same, count)) for count in (2, 3, 4, 8)] == [
        [0, 4],
        [0, 2, 5],
        [0, 2, 4, 6],
        [*range(8)],
    ]


def test_even_means_blocks_not_runs() -> None:
    same = [(range(0, 5), moments(1)), (range(5, 6), moments(1)), (range(6, 7), moments(1)), (range(7, 8), moments(1))]
    assert starts(chosen_segments(same, 2)) == [0, 5]


def test_what_is_lost_is_the_smaller_half_of_the_energy_in_the_pooled_axes() -> None:
    sizes = torch.tensor([8.0, 4, 2, 1, 0.5, 0.25]).double()
    one = (range(2), sizes.diag())
    assert energy_lost([one]) == pytest.approx([1.75 / 15.75])
    other = (range(2, 3), sizes.flip(0).diag())
    blocks = (2 * sizes + sizes.flip(0)) / 3
    torch.testing.assert_close(pooled([one, other]).diagonal(), blocks)
    assert energy_lost([one, other]) == pytest.approx([1.75 / 15.75] * 2)  # each block has a smaller half of its own


def test_a_stream_without_energy_loses_none() -> None:
    assert energy_lost([(range(1), torch.zeros(4, 4).double())]) == [0]


def test_pca_has_a_basis_for_each_segment(small: Checkpoint, small_calibration: Calibration) -> None:
    found = pca.bases(small, small_calibration, RotateOptions(segments=3))
    assert found.starts == (0, 1, 2)
    for (_, of_block), basis in zip(second_moments(small_calibration) or [], found.matrices, strict=True):
        torch.testing.assert_close(basis.t() @ basis, torch.eye(256).double(), atol=1e-12, rtol=0)
        turned = basis.t() @ of_block @ basis
        assert float((turned - turned.diagonal().diag()).abs().max()) < 1e-10 * float(turned[0, 0])


def test_blocks_with_one_sum_stay_in_one_segment(small: Checkpoint, small_calibration: Calibration) -> None:
    sums = [layer[PRODUCT] for layer in small_calibration.layers]
    layers = [{name: value for name, value in layer.items() if name != PRODUCT} for layer in small_calibration.layers]
    layers[1][PRODUCT] = sums[0] + sums[1]
    layers[2][PRODUCT] = sums[2]
    shared = replace(small_calibration, layers=tuple(layers))
    assert pca.bases(small, shared, RotateOptions(segments=2)).starts == (0, 2)
    with pytest.raises(
        RotationError,
        match=r"3 segments of 3 blocks, of which a calibration keeps second moments in 2 runs; expected at most 2$",
    ):
        pca.bases(small, shared, RotateOptions(segments=3))


def test_a_block_has_the_basis_of_its_segment_and_each_boundary_a_change() -> None:
    matrices = tuple(torch.linalg.qr(moments(seed)).Q for seed in range(3))
    bases = Bases((0, 2, 3), matrices)
    assert [bases.segment(layer) for layer in range(5)] == [0, 0, 1, 2, 2]
    assert bases.boundaries == (2, 3)
    stream = torch.randn(4, HIDDEN).double()
    for layer in bases.boundaries:
        before, own = (stream @ bases.of_block(of) for of in (layer - 1, layer))
        torch.testing.assert_close(before @ bases.change(layer).t(), own)
    again = bases_of(bases.tensors())
    assert again.starts == bases.starts
    assert all(map(torch.equal, again.matrices, bases.matrices))
