"""The layout of the memory between a device and the worker: parts that do not overlap, numbers that go round."""

from dataclasses import astuple, fields

import numpy as np
import pytest

from sparsepack.runtime.hybrid.mailbox import LAST_NUMBER, PART, Mailbox, ProductRequest, next_number, views

SHAPES = [Mailbox(1, 1, 1, 1), Mailbox(3, 37, 256, 1), Mailbox(2, 1280, 512, 8), Mailbox(5, 33, 5120, 3)]


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_parts_begin_at_multiples_of_a_part_and_follow_each_other(layout: Mailbox) -> None:
    offsets = [layout.number, layout.indices, layout.gates, layout.x, layout.request_size]
    assert all(offset % PART == 0 for offset in [*offsets, layout.requests, layout.answers, layout.y, layout.size])
    assert offsets == sorted(set(offsets))
    assert layout.gates - layout.indices >= 4 * layout.neurons
    assert layout.x - layout.gates >= 4 * layout.sequences * layout.neurons
    assert layout.request_size - layout.x >= 4 * layout.sequences * layout.hidden
    assert layout.answer_size - layout.y >= 4 * layout.sequences * layout.hidden


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_views_cover_memory_without_overlap(layout: Mailbox) -> None:
    memory = np.zeros(layout.size, np.uint8)
    parts = views(layout, memory)
    names = [field.name for field in fields(parts)]
    for mark, name in enumerate(names, 1):
        getattr(parts, name)[...] = mark
    for mark, name in enumerate(names, 1):
        assert (getattr(parts, name) == mark).all(), name
    words = sum(getattr(parts, name).size for name in names)
    assert np.count_nonzero(memory.view(np.int32)) == words


def test_views_lie_where_the_layout_says() -> None:
    layout = Mailbox(3, 37, 256, 2)
    memory = np.zeros(layout.size, np.uint8)
    parts = views(layout, memory)
    words = memory.view(np.float32)
    parts.gates[2, 1, 5], parts.x[1, 1, 7], parts.y[2, 1, 9] = 1.5, 2.5, 3.5
    assert words[(layout.requests + 2 * layout.request_size + layout.gates) // 4 + 37 + 5] == 1.5
    assert words[(layout.requests + layout.request_size + layout.x) // 4 + 256 + 7] == 2.5
    assert words[(layout.answers + 2 * layout.answer_size + layout.y) // 4 + 256 + 9] == 3.5


@pytest.mark.parametrize("sequences", [1, 3])
def test_products_lie_behind_the_answers_without_overlap(sequences: int) -> None:
    products = (
        ProductRequest(0, 300, 1),
        ProductRequest(0, 32, 1301),
        ProductRequest(2, 1, 33),
        ProductRequest(2, 300, 1301, levels=True, begins=64),
    )
    layout = Mailbox(3, 37, 256, sequences, products)
    end = Mailbox(3, 37, 256, sequences).size
    for of, at in zip(products, layout.places, strict=True):
        assert (at.request, at.x) == (end, end + PART)
        after = at.x + 4 * sequences * of.columns
        assert at.levels >= after if of.levels else at.levels == 0
        assert at.answer >= (at.levels + of.columns if of.levels else after)
        assert at.y == at.answer + PART
        assert all(place % PART == 0 for place in (at.request, at.x, at.answer, at.y))
        end = -(-(at.y + 4 * sequences * of.rows) // PART) * PART
    assert layout.size == end
    assert layout.product_parts[1] == (0, 32, 1301, False, 0, *astuple(layout.places[1]))
    assert layout.product_parts[3] == (2, 300, 1301, False, 64, *astuple(layout.places[3]))


@pytest.mark.parametrize("products", [(ProductRequest(1, 2, 2), ProductRequest(0, 2, 2)), (ProductRequest(0, 0, 2),)])
def test_products_that_no_step_has_are_refused(products: tuple[ProductRequest, ...]) -> None:
    with pytest.raises(ValueError, match="expected products by block"):
        Mailbox(2, 1, 1, 1, products)


def test_numbers_go_round_without_zero() -> None:
    assert next_number(0) == 1
    assert next_number(LAST_NUMBER - 1) == LAST_NUMBER
    assert next_number(LAST_NUMBER) == 1


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 1, 1, 0), (1, 1, 1, 9), (1, -1, 1, 1)])
def test_sizes_that_no_hand_over_has_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected sizes"):
        Mailbox(*sizes)


def test_memory_of_another_size_is_refused() -> None:
    layout = Mailbox(1, 8, 256, 1)
    with pytest.raises(ValueError, match="expected uint8"):
        views(layout, np.zeros(layout.size - 1, np.uint8))
