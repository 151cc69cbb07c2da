"""The Metal kernels that list active columns: their own sources, compiled for this processor (metal_emulation.py), are
compared with plain torch."""

import pytest
import torch
from metal_emulation import Library
from metal_launches import (
    BIAS,
    NORM,
    OFFSET,
    PER_CHANNEL,
    SEGMENT,
    SUM,
    THRESHOLD,
    WITH_LEVELS,
    assert_near,
    from_list,
    launched,
    random,
    room,
)
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.models.blocks import ACTIVATIONS
from sparsepack.models.sites import levels_read
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS, rms_norm

COLUMNS = [1, 31, 32, 33, 1024, 1025, 2500]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["one threshold", "a threshold each", "none", "nothing above", "everything above"])
def test_collect_lists_active_columns_in_order(library: Library, columns: int, kind: str) -> None:
    x = random(columns)
    limits = {"a threshold each": random(columns).abs(), "nothing above": torch.tensor([1e9])}
    limit = limits.get(kind, torch.tensor([-1.0 if kind == "everything above" else 0.7]))
    bits = 0 if kind == "none" else THRESHOLD | (PER_CHANNEL if len(limit) > 1 else 0)
    if columns == 1:
        bits |= PER_CHANNEL if kind == "a threshold each" else 0
    indices, values = collected(library, x, threshold=limit, bits=bits)[:2]
    expected = torch.arange(columns) if kind == "none" else (x.abs() > limit).nonzero()[:, 0]
    assert torch.equal(indices, expected)
    assert torch.equal(values, x[expected])


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_are_listed_with_their_levels(library: Library, columns: int) -> None:
    x, limits = random(columns), random(5, columns).abs().cumsum(0) / 3
    limits[3:, : columns // 2] = float("inf")
    indices, values = collected(library, x, threshold=limits, bits=THRESHOLD | PER_CHANNEL | WITH_LEVELS)[:2]
    levels = levels_read(x, limits)
    assert torch.equal(indices & 0xFFFFFF, levels.nonzero()[:, 0])
    assert torch.equal(indices >> 24, levels[levels > 0].long())
    assert torch.equal(values, x[levels > 0])


def test_ties_and_nan_are_not_active(library: Library) -> None:
    x = torch.tensor([0.5, -0.5, float("nan"), 0.50001, -7.0, 0.0])
    assert collected(library, x, threshold=torch.tensor([0.5]), bits=THRESHOLD)[0].tolist() == [3, 4]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("splits", [0, 1, 5])
@pytest.mark.parametrize(
    "bits", [0, NORM, NORM | OFFSET | THRESHOLD, NORM | BIAS | SUM, BIAS | OFFSET | SUM | THRESHOLD]
)
def test_collect_takes_sums_norms_and_offsets(library: Library, columns: int, splits: int, bits: int) -> None:
    x, stride = 4 * random(columns), -(-columns // BAND_ROWS) * BAND_ROWS
    parts = random(max(splits, 1), stride)
    bias, norm, offset = random(columns), 1 + 0.1 * random(columns), 0.1 * random(columns)
    indices, values, total = collected(
        library, x, parts, bias, norm, offset, torch.tensor([0.3]), bits=bits, splits=splits
    )
    expected = x.double() + parts[:splits, :columns].double().sum(0)
    if bits & BIAS:
        expected = expected + bias
    if bits & SUM:
        assert_near(total, expected, 10)
    else:
        assert total.isnan().all()
    if bits & NORM:
        expected = rms_norm(expected, norm.double(), 1e-5)
    if bits & OFFSET:
        expected = expected - offset
    assert_near(values, expected[indices], 10)
    left = torch.ones(columns, dtype=torch.bool)
    left[indices] = False
    if bits & THRESHOLD:
        assert (expected[left].abs() <= 0.3 + 1e-4).all()
        assert (values.abs() > torch.tensor(0.3)).all()
    else:
        assert not left.any()


def collected(
    library: Library,
    x: Tensor,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    offset: Tensor | None = None,
    threshold: Tensor | None = None,
    *,
    bits: int,
    splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = len(x)
    given = [x if each is None else each for each in (parts, bias, norm, offset, threshold)]
    total, values, indices, counts = launched(
        library,
        "collect",
        [x, *given, None, None, None, None, columns, splits, given[0].shape[-1], bits, 1e-5],
        lambda: [torch.full((columns,), float("nan")), *room(columns)],
        -(-columns // SEGMENT),
        SEGMENT,
    )
    return *from_list(values, indices, counts), total


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("columns", "splits", "bits"), [(1, 1, 0), (172, 3, BIAS), (1280, 4, THRESHOLD | OFFSET), (1024, 1, THRESHOLD)]
)
def test_gated_columns_are_activation_of_gate_times_up(
    library: Library, activation: str, columns: int, splits: int, bits: int
) -> None:
    stride = -(-2 * columns // BAND_ROWS) * BAND_ROWS
    parts, bias, offset = 2 * random(splits, stride), random(2 * columns), 0.1 * random(columns)
    numbers = (columns, splits, stride, bits, ACTIVATIONS.index(activation))
    indices, values = from_list(
        *launched(
            library,
            "collect_gated",
            [parts, bias, offset, torch.tensor([0.4]), None, None, None, *numbers],
            lambda: room(columns),
            -(-columns // SEGMENT),
            SEGMENT,
        )
    )
    both = parts.double().sum(0)[: 2 * columns] + (bias if bits & BIAS else 0)
    expected = ACTIVATION_FUNCTIONS[activation](both[:columns]) * both[columns:]
    if bits & OFFSET:
        expected = expected - offset
    assert_near(values, expected[indices], 10)
    left = torch.ones(columns, dtype=torch.bool)
    left[indices] = False
    assert (expected[left].abs() <= 0.4 + 1e-4).all()
    assert bits & THRESHOLD or not left.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_numbers_stay_finite(library: Library, activation: str) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4, 1e30])
    parts = torch.zeros(1, BAND_ROWS)
    parts[0, :10], parts[0, 10:20] = gate, 1.0
    _, values = from_list(
        *launched(
            library,
            "collect_gated",
            [parts, parts, parts, parts, None, None, None, 10, 1, BAND_ROWS, 0, ACTIVATIONS.index(activation)],
            lambda: room(10),
            1,
            SEGMENT,
        )
    )
    assert_near(values, ACTIVATION_FUNCTIONS[activation](gate.double()))
