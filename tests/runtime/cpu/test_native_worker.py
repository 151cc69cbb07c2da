"""The native worker against float64 sums, with a thread that asks as a device does."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_build import skip_without_kernels
from operations_for_tests import packed
from pairwise import each_value
from torch import Tensor
from worker_sides import PATIENCE, Block, Side, answer, ask, check, gates_of, made, step

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.hybrid import measure_bandwidth as measure
from sparsepack.runtime.hybrid.mailbox import LAST_NUMBER, Mailbox, ProductPlaces, ProductRequest, next_number, views

skip_without_kernels()


@each_value({"threads": [1, 2, 3, 7], "texts": [1, 2, 8], "count, hidden": [(37, 256), (1280, 512), (131, 5120)]})
def test_answers_are_the_sums_over_the_listed_neurons(count: int, hidden: int, texts: int, threads: int) -> None:
    side = made(Mailbox(4, count, hidden, texts), threads)
    number = 0
    for actives in ([0, 1, count, count // 3], [0, 0, 0, 0], [count] * 4, [count // 2 + 1, 0, 7, 0]):
        number = next_number(number)
        check(side, number, actives, texts, seed=number)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize(("count", "hidden"), [(37, 256), (1280, 512)])
def test_of_neurons_that_may_be_active_it_keeps_those_with_gates_above_zero(
    count: int, hidden: int, texts: int, threads: int
) -> None:
    """Every second block has gates; of its listed neurons about half are active."""
    generator = torch.Generator().manual_seed(3)
    layout = Mailbox(4, count, hidden, texts)
    blocks = [Block(count, hidden, seed) for seed in range(4)]
    stored = [BLOCKS["Q4_K"].encode(torch.randn(count, hidden, generator=generator)) for _ in blocks]
    matrices = [PackedMatrix(rows, MatrixFormat("Q4_K"), count, hidden) for rows in stored]
    loaded = [operations.load_gates(matrix) if n % 2 else None for n, matrix in enumerate(matrices)]
    side = Side(blocks, layout, threads, gates=loaded)
    for number, listed in enumerate([count, count // 3, 1, 0], 1):
        x = torch.randn(texts, hidden, generator=generator)
        asked = [gates_of(count, listed, texts, generator) for _ in blocks]
        found = step(side, number, x, asked)
        again = step(side, number + 10, x, asked)
        for n, (y, gates) in enumerate(zip(found, asked, strict=True)):
            here = x.roll(n, -1)
            if n % 2:  # what the device left as gates means nothing
                gates = (here @ decode_matrix(matrices[n]).t()).relu() * gates.any(0)
            error = (y.double() - blocks[n].ffn(here, gates)).norm(dim=-1)
            assert (error <= 1e-3 * blocks[n].typical(here, gates) + 1e-6).all(), (n, listed)
            assert torch.equal(y, again[n])


def test_gates_of_other_sizes_are_refused() -> None:
    layout, blocks = Mailbox(2, 37, 256, 1), [Block(37, 256, seed) for seed in range(2)]
    wrong = operations.load_gates(
        PackedMatrix(BLOCKS["Q4_K"].encode(torch.randn(36, 256)), MatrixFormat("Q4_K"), 36, 256)
    )
    with pytest.raises(ValueError, match="gates: expected as many"):
        Side(blocks, layout, 1, gates=[wrong, None])
    with pytest.raises(ValueError, match="gates: expected those of every block"):
        Side(blocks, layout, 1, gates=[None])


def test_fewer_texts_than_there_is_room_for() -> None:
    side = made(Mailbox(2, 300, 256, 8), 3)
    for number, texts in enumerate((8, 1, 3, 1), 1):
        check(side, number, [100, 299], texts, seed=number)


@pytest.mark.parametrize("texts", [1, 3])
def test_the_same_request_has_the_same_bits(texts: int) -> None:
    layout = Mailbox(3, 1280, 512, texts)
    sides = made(layout, 3), made(layout, 3)
    first = check(sides[0], 1, [700, 131, 1280], texts, seed=5)
    for number in range(2, 6):
        for side in sides:
            again = check(side, number, [700, 131, 1280], texts, seed=5)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_numbers_go_round() -> None:
    side, number = made(Mailbox(2, 64, 256, 1)), LAST_NUMBER - 2
    for _ in range(5):
        number = next_number(number)
        check(side, number, [64, 5], 1, seed=number % 1000)
    assert number == 3


def test_threads_that_slept_wake_for_the_next_step() -> None:
    side = made(Mailbox(2, 1280, 512, 1), 2)
    for number in range(1, 4):
        check(side, number, [1280, 400], 1, seed=number)
        time.sleep(0.05)


def test_what_was_computed_is_counted() -> None:
    side = made(Mailbox(3, 64, 256, 1))
    check(side, 1, [64, 0, 5], 1, seed=1)
    assert side.worker.neurons == 69
    assert 0 < side.worker.seconds < PATIENCE


PRODUCTS = (
    ProductRequest(0, 512, 1301),
    ProductRequest(0, 256, 1),
    ProductRequest(2, 512, 300),
    ProductRequest(2, 1280, 512),
)


def multiplied(memory: np.ndarray, asked: ProductRequest, at: ProductPlaces, x: Tensor, number: int) -> Tensor:
    """What the device does: it asks for a product with x [texts, columns], and takes the answer [texts, rows]."""
    words, floats = memory.view(np.int32), memory.view(np.float32)
    floats[at.x // 4 : at.x // 4 + x.numel()] = x.flatten().numpy()
    words[at.request // 4] = number
    end = time.monotonic() + PATIENCE
    while words[at.answer // 4] != number:
        assert time.monotonic() < end, "no answer"
        time.sleep(0)
    return torch.from_numpy(floats[at.y // 4 : at.y // 4 + len(x) * asked.rows].copy()).view(len(x), asked.rows)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("texts", [1, 3])
def test_rows_are_multiplied_before_the_neurons_of_their_block(texts: int, threads: int) -> None:
    layout = Mailbox(3, 64, 256, texts, PRODUCTS)
    matrices = [packed(each.rows, each.columns) for each in PRODUCTS]
    blocks = [Block(64, 256, seed) for seed in range(3)]
    memory = np.zeros(layout.size, np.uint8)
    seen = views(layout, memory)
    given = [block.loaded for block in blocks], memory, layout, threads, PATIENCE
    loaded = [operations.load_zigzag(each) for each in matrices]
    worker = machine.native().ColdWorker(machine.instruction_set(), *given, loaded)
    generator = torch.Generator().manual_seed(texts)
    inputs = [torch.randn(texts, each.columns, generator=generator) for each in PRODUCTS]
    x, gates = torch.randn(texts, 256, generator=generator), gates_of(64, 40, texts, generator)
    found: dict[int, Tensor] = {}

    def device(number: int) -> None:
        for block in range(3):
            for n, (asked, at) in enumerate(zip(PRODUCTS, layout.places, strict=True)):
                if asked.block != block:
                    continue
                found[n] = multiplied(memory, asked, at, inputs[n], number)
            ask(seen, block, number, x, gates)
            error = (answer(seen, block, number, texts).double() - blocks[block].ffn(x, gates)).norm(dim=-1)
            assert (error <= 1e-3 * blocks[block].typical(x, gates)).all()

    before: list[Tensor] = []
    for number in (1, 2):
        worker.begin(number, texts)
        thread = threading.Thread(target=device, args=(number,))
        thread.start()
        worker.end(number)
        thread.join()
        for n, matrix in enumerate(matrices):
            weight = decode_matrix(matrix).double()
            error = (found[n].double() - inputs[n].double() @ weight.t()).norm()
            assert error <= 1e-3 * (inputs[n].double().square() @ weight.square().t()).sum().sqrt()
        assert not before or all(torch.equal(a, b) for a, b in zip(before, found.values(), strict=True))
        before = list(found.values())
        found = {}
    assert 0 < worker.product_seconds < PATIENCE
    assert worker.neurons == 2 * 3 * int(gates.any(0).sum())


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("active", [0.0, 0.01, 0.5, 1.0])
def test_columns_whose_input_is_zero_are_left_out(active: float, texts: int, threads: int) -> None:
    """And nobody is asked for neurons. The weights there are no numbers: who reads them spoils the sums."""
    products = (ProductRequest(0, 512, 1301, skips=True), ProductRequest(1, 301, 512, skips=True))
    layout = Mailbox(2, 0, 256, texts, products)
    generator = torch.Generator().manual_seed(texts)
    on = [torch.rand(each.columns, generator=generator) < active for each in products]
    matrices = [packed(each.rows, each.columns) for each in products]
    matrices = [replace(each, blocks=each.blocks.clone()) for each in matrices]  # others have them, too
    weights = [decode_matrix(each).double() for each in matrices]
    for matrix, is_on in zip(matrices, on, strict=True):
        matrix.blocks[:, ~is_on, :4] = torch.tensor([0, 0x7E, 0, 0x7E], dtype=torch.uint8)  # d and dmin are NaN
    memory = np.zeros(layout.size, np.uint8)
    loaded = [operations.load_zigzag(each) for each in matrices]
    worker = machine.native().ColdWorker(machine.instruction_set(), [], memory, layout, threads, PATIENCE, loaded)
    inputs = [
        torch.randn(texts, each.columns, generator=generator) * is_on for each, is_on in zip(products, on, strict=True)
    ]
    found: list[Tensor] = []

    def device(number: int) -> None:
        for n, (asked, at) in enumerate(zip(products, layout.places, strict=True)):
            found.append(multiplied(memory, asked, at, inputs[n], number))

    for number in (1, 2):
        worker.begin(number, texts)
        thread = threading.Thread(target=device, args=(number,))
        thread.start()
        worker.end(number)
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(found[:2], found[2:], strict=True))
    for x, weight, y in zip(inputs, weights, found, strict=False):
        error = (y.double() - x.double() @ weight.t()).norm()
        assert error <= 1e-3 * (x.double().square() @ weight.square().t()).sum().sqrt()
    assert worker.neurons == 0


def planes_matrix(rows: int, columns: int, scaled: bool = False) -> PackedMatrix:
    generator = torch.Generator().manual_seed(rows)
    blocks = zigzag.pack(torch.randn(rows, columns, generator=generator), "Q6_P")
    scale = 0.5 + torch.rand(rows, generator=generator) if scaled else None
    return PackedMatrix(blocks, MatrixFormat("Q6_P", "zigzag"), rows, columns, row_scale=scale)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("absent", [0, 1, 2, 4])
def test_planes_that_the_device_lacks_are_added_at_the_levels_it_says(absent: int, threads: int) -> None:
    texts, begins = 2, 130 if absent else 0
    products = (ProductRequest(0, 512, 1301, levels=True, begins=begins), ProductRequest(1, 301, 512, levels=True))
    layout = Mailbox(2, 0, 256, texts, products)
    matrices = [planes_matrix(each.rows, each.columns, n == 0) for n, each in enumerate(products)]
    memory = np.zeros(layout.size, np.uint8)
    loaded = [operations.load_zigzag(each, absent=absent) for each in matrices]
    worker = machine.native().ColdWorker(machine.instruction_set(), [], memory, layout, threads, PATIENCE, loaded)
    generator = torch.Generator().manual_seed(absent)
    for number in (1, 2, 3):
        levels = [torch.randint(6, (each.columns,), generator=generator) for each in products]
        if number == 3:
            levels = [torch.zeros_like(levels[0]), torch.full_like(levels[1], 5)]
        inputs = [torch.randn(texts, each.columns, generator=generator) for each in products]
        found: list[Tensor] = []

        def device(number: int = number, levels: list[Tensor] = levels, inputs: list[Tensor] = inputs) -> None:
            for asked, at, x, level in zip(products, layout.places, inputs, levels, strict=True):
                memory[at.levels : at.levels + asked.columns] = level.numpy()
                found.append(multiplied(memory, asked, at, x, number))  # noqa: B023

        worker.begin(number, texts)
        thread = threading.Thread(target=device)
        thread.start()
        worker.end(number)
        thread.join()
        for matrix, x, level, y in zip(matrices, inputs, levels, found, strict=True):
            expected = torch.zeros(texts, matrix.rows, dtype=torch.float64)
            without = matrix.blocks.clone()
            without[..., matrix.levels[absent - 1] if absent else 0 :] = 0
            first = replace(matrix, blocks=without)
            for above in range(absent + 1, 6):
                weight = decode_matrix(matrix, above).double()
                weight -= decode_matrix(first, above).double() if absent else 0
                if matrix.columns == 512:
                    weight[:1024, :begins] = 0
                expected += torch.where(level == above, x.double(), 0) @ weight.t()
            assert float((y - expected).norm()) <= 1.5e-2 * float(expected.norm())


@pytest.mark.parametrize("levels", [False, True])
def test_levels_are_for_planes(levels: bool) -> None:
    layout = Mailbox(1, 0, 256, 1, (ProductRequest(0, 90, 300, levels=levels),))
    matrix = packed(300, 90) if levels else planes_matrix(300, 90)
    given = [], np.zeros(layout.size, np.uint8), layout, 1, PATIENCE, [operations.load_zigzag(matrix)]
    with pytest.raises(ValueError, match="products: expected levels where there are planes"):
        machine.native().ColdWorker(machine.instruction_set(), *given)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="absent: expected fewer planes than there are"):
            operations.load_zigzag(matrix, absent=wrong)


@pytest.mark.parametrize("products", [(), PRODUCTS[:3], (*PRODUCTS[:3], ProductRequest(2, 1280, 511))])
def test_products_that_are_not_those_of_the_hand_over_are_refused(products: tuple[ProductRequest, ...]) -> None:
    layout = Mailbox(3, 64, 256, 1, products)
    matrices = [operations.load_zigzag(packed(each.rows, each.columns)) for each in PRODUCTS]
    given = [Block(64, 256, 0).loaded] * 3, np.zeros(layout.size, np.uint8), layout, 1, PATIENCE
    with pytest.raises(ValueError, match="products: expected"):
        machine.native().ColdWorker(machine.instruction_set(), *given, matrices)


def test_another_placement_between_steps_changes_rounding_only() -> None:
    """Neurons that moved to the device are no longer listed; the parts of both sides add up to the same."""
    side = made(Mailbox(1, 300, 512, 1), 2)
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(1, 512, generator=generator), gates_of(300, 200, 1, generator)
    whole = side.blocks[0].ffn(x, gate)
    for number, share in enumerate((0.0, 0.2, 0.9, 1.0), 1):
        resident = torch.rand(300, generator=generator) < share
        (y,) = step(side, number, x, [gate * ~resident])
        both = y.double() + side.blocks[0].ffn(x, gate * resident)
        assert ((both - whole).norm(dim=-1) <= 1e-3 * side.blocks[0].typical(x, gate)).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    layout = Mailbox(2, 64, 256, 1)
    records = [operations.load_neurons(measure.records(64, 256))] * 2
    memory = np.zeros(layout.size, np.uint8)
    with pytest.raises(ValueError, match="every block"):
        operations.cold_worker(records[:1], memory, layout)
    with pytest.raises(ValueError, match="as wide"):
        operations.cold_worker([records[0], operations.load_neurons(measure.records(64, 512))], memory, layout)
    with pytest.raises(ValueError, match="size of the mailbox"):
        operations.cold_worker(records, memory[:-1], layout)
    worker = operations.cold_worker(records, memory, layout)
    with pytest.raises(ValueError, match="room"):
        worker.begin(1, 2)
    with pytest.raises(ValueError, match="from 1 on"):
        worker.begin(0)
    with pytest.raises(ValueError, match="began last"):
        worker.end(7)
