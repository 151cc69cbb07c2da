"""The native worker against float64 sums, with a thread that asks as a device does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from native_build import skip_without_kernels
from operations_for_tests import packed
from torch import Tensor

from sparsepack.formats.codecs import neurons
from sparsepack.formats.codecs.matrices import PackedMatrix, decode_matrix, encode_rows
from sparsepack.runtime.cpu import dispatch, operations
from sparsepack.runtime.hybrid.handover import LAST_NUMBER, Abort, AskedProduct, HandOver, Views, next_number, views

skip_without_kernels()

PATIENCE = 60.0  # seconds: of a machine that does much else


class Block:
    """Random records, as stored, decoded and loaded."""

    def __init__(self, count: int, hidden: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        up, down = (torch.randn(*shape, generator=generator) for shape in ((count, hidden), (hidden, count)))
        stored = neurons.pack(up, down, torch.arange(count))
        self.up, self.down = (half.double() for half in neurons.unpack(stored))
        self.loaded = operations.load_neurons(PackedMatrix(stored, "Q4_K", count, 2 * hidden))

    def ffn(self, x: Tensor, gates: Tensor) -> Tensor:
        """[texts, hidden], [texts, neurons] -> [texts, hidden]"""
        return (gates.double() * (x.double() @ self.up.t())) @ self.down.t()

    def typical(self, x: Tensor, gates: Tensor) -> Tensor:
        """The norm of each text if all terms had random signs."""
        inner = gates.double() * (x.double().square() @ self.up.t().square()).sqrt()
        return (inner.square() @ self.down.t().square()).sum(-1).sqrt()


class Side:
    """A worker, and the memory that a device sees of it."""

    def __init__(
        self,
        blocks: Sequence[Block],
        layout: HandOver,
        threads: int,
        limit: float = PATIENCE,
        gates: Sequence[Any] = (),
    ) -> None:
        self.memory = np.zeros(layout.size, np.uint8)
        self.seen, self.layout, self.blocks = views(layout, self.memory), layout, blocks
        records = [block.loaded for block in blocks]
        self.worker: Any = dispatch.native().ColdWorker(
            dispatch.instruction_set(), records, self.memory, layout, threads, limit, [], list(gates)
        )


def made(layout: HandOver, threads: int = 2, limit: float = PATIENCE) -> Side:
    blocks = [Block(layout.neurons, layout.hidden, seed) for seed in range(layout.blocks)]
    return Side(blocks, layout, threads, limit)


def ask(seen: Views, block: int, number: int, x: Tensor, gates: Tensor) -> None:
    """What a device writes for texts: x [texts, hidden], gates [texts, neurons], those of nobody zero."""
    texts = len(x)
    listed = gates.any(0).nonzero().ravel()
    count = len(listed)
    seen.count[block] = count
    seen.indices[block, :count] = listed.int().numpy()
    seen.gates[block, :texts, :count] = gates[:, listed].numpy()
    seen.x[block, :texts] = x.numpy()
    seen.requested[block] = number


def answer(seen: Views, block: int, number: int, texts: int) -> Tensor:
    end = time.monotonic() + PATIENCE
    while seen.count[block] and seen.answered[block] != number:
        assert time.monotonic() < end, "no answer"
        assert not seen.abort[0], Abort(seen.abort[0])
        time.sleep(0)
    y = torch.from_numpy(seen.y[block, :texts].copy())
    return y if seen.count[block] else torch.zeros_like(y)


def step(side: Side, number: int, x: Tensor, gates: Sequence[Tensor]) -> list[Tensor]:
    """The answers to a step; the x of a block is that of the one before, rolled."""
    found: list[Tensor] = []

    def device() -> None:
        for block, gate in enumerate(gates):
            ask(side.seen, block, number, x.roll(block, -1), gate)
            found.append(answer(side.seen, block, number, len(x)))

    side.worker.begin(number, len(x))
    thread = threading.Thread(target=device)
    thread.start()
    try:
        side.worker.end(number)
    finally:
        thread.join()
    return found


def gates_of(count: int, active: int, texts: int, generator: torch.Generator) -> Tensor:
    gates = torch.zeros(texts, count)
    for row in gates:
        chosen = torch.randperm(count, generator=generator)[:active]
        row[chosen] = torch.rand(active, generator=generator) + 0.01
    return gates


def check(side: Side, number: int, actives: Sequence[int], texts: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(texts, side.layout.hidden, generator=generator)
    gates = [gates_of(side.layout.neurons, active, texts, generator) for active in actives]
    found = step(side, number, x, gates)
    assert len(found) == len(actives)
    for block, (y, gate) in enumerate(zip(found, gates, strict=True)):
        asked = x.roll(block, -1)
        expected = side.blocks[block].ffn(asked, gate)
        error = (y.double() - expected).norm(dim=-1)
        assert (error <= 1e-3 * side.blocks[block].typical(asked, gate)).all(), block
    return found


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("texts", [1, 2, 8])
@pytest.mark.parametrize(("count", "hidden"), [(37, 256), (1280, 512), (131, 5120)])
def test_answers_are_the_sums_over_the_listed_neurons(count: int, hidden: int, texts: int, threads: int) -> None:
    side = made(HandOver(4, count, hidden, texts), threads)
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
    layout = HandOver(4, count, hidden, texts)
    blocks = [Block(count, hidden, seed) for seed in range(4)]
    stored = [encode_rows(torch.randn(count, hidden, generator=generator), "Q4_K") for _ in blocks]
    matrices = [PackedMatrix(rows, "Q4_K", count, hidden) for rows in stored]
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
    layout, blocks = HandOver(2, 37, 256, 1), [Block(37, 256, seed) for seed in range(2)]
    wrong = operations.load_gates(PackedMatrix(encode_rows(torch.randn(36, 256), "Q4_K"), "Q4_K", 36, 256))
    with pytest.raises(ValueError, match="gates: expected as many"):
        Side(blocks, layout, 1, gates=[wrong, None])
    with pytest.raises(ValueError, match="gates: expected those of every block"):
        Side(blocks, layout, 1, gates=[None])


def test_fewer_texts_than_there_is_room_for() -> None:
    side = made(HandOver(2, 300, 256, 8), 3)
    for number, texts in enumerate((8, 1, 3, 1), 1):
        check(side, number, [100, 299], texts, seed=number)


@pytest.mark.parametrize("texts", [1, 3])
def test_the_same_request_has_the_same_bits(texts: int) -> None:
    layout = HandOver(3, 1280, 512, texts)
    sides = made(layout, 3), made(layout, 3)
    first = check(sides[0], 1, [700, 131, 1280], texts, seed=5)
    for number in range(2, 6):
        for side in sides:
            again = check(side, number, [700, 131, 1280], texts, seed=5)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_numbers_go_round() -> None:
    side, number = made(HandOver(2, 64, 256, 1)), LAST_NUMBER - 2
    for _ in range(5):
        number = next_number(number)
        check(side, number, [64, 5], 1, seed=number % 1000)
    assert number == 3


def test_threads_that_slept_wake_for_the_next_step() -> None:
    side = made(HandOver(2, 1280, 512, 1), 2)
    for number in range(1, 4):
        check(side, number, [1280, 400], 1, seed=number)
        time.sleep(0.05)


def test_what_was_computed_is_counted() -> None:
    side = made(HandOver(3, 64, 256, 1))
    check(side, 1, [64, 0, 5], 1, seed=1)
    assert side.worker.neurons == 69
    assert 0 < side.worker.seconds < PATIENCE


PRODUCTS = (AskedProduct(0, 512, 1301), AskedProduct(0, 256, 1), AskedProduct(2, 512, 300), AskedProduct(2, 1280, 512))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("texts", [1, 3])
def test_rows_are_multiplied_before_the_neurons_of_their_block(texts: int, threads: int) -> None:
    layout = HandOver(3, 64, 256, texts, PRODUCTS)
    matrices = [packed(each.rows, each.columns) for each in PRODUCTS]
    blocks = [Block(64, 256, seed) for seed in range(3)]
    memory = np.zeros(layout.size, np.uint8)
    seen, words, floats = views(layout, memory), memory.view(np.int32), memory.view(np.float32)
    given = [block.loaded for block in blocks], memory, layout, threads, PATIENCE
    loaded = [operations.load_zigzag(each) for each in matrices]
    worker = dispatch.native().ColdWorker(dispatch.instruction_set(), *given, loaded)
    generator = torch.Generator().manual_seed(texts)
    inputs = [torch.randn(texts, each.columns, generator=generator) for each in PRODUCTS]
    x, gates = torch.randn(texts, 256, generator=generator), gates_of(64, 40, texts, generator)
    found: dict[int, Tensor] = {}

    def device(number: int) -> None:
        for block in range(3):
            for n, (asked, at) in enumerate(zip(PRODUCTS, layout.places, strict=True)):
                if asked.block != block:
                    continue
                floats[at.x // 4 : at.x // 4 + inputs[n].numel()] = inputs[n].flatten().numpy()
                words[at.request // 4] = number
                end = time.monotonic() + PATIENCE
                while words[at.answer // 4] != number:
                    assert time.monotonic() < end, "no answer"
                    time.sleep(0)
                y = floats[at.y // 4 : at.y // 4 + texts * asked.rows].copy()
                found[n] = torch.from_numpy(y).view(texts, asked.rows)
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


@pytest.mark.parametrize("products", [(), PRODUCTS[:3], (*PRODUCTS[:3], AskedProduct(2, 1280, 511))])
def test_products_that_are_not_those_of_the_hand_over_are_refused(products: tuple[AskedProduct, ...]) -> None:
    layout = HandOver(3, 64, 256, 1, products)
    matrices = [operations.load_zigzag(packed(each.rows, each.columns)) for each in PRODUCTS]
    given = [Block(64, 256, 0).loaded] * 3, np.zeros(layout.size, np.uint8), layout, 1, PATIENCE
    with pytest.raises(ValueError, match="products: expected"):
        dispatch.native().ColdWorker(dispatch.instruction_set(), *given, matrices)


def test_another_placement_between_steps_changes_rounding_only() -> None:
    """Neurons that moved to the device are no longer listed; the parts of both sides add up to the same."""
    side = made(HandOver(1, 300, 512, 1), 2)
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(1, 512, generator=generator), gates_of(300, 200, 1, generator)
    whole = side.blocks[0].ffn(x, gate)
    for number, share in enumerate((0.0, 0.2, 0.9, 1.0), 1):
        resident = torch.rand(300, generator=generator) < share
        (y,) = step(side, number, x, [gate * ~resident])
        both = y.double() + side.blocks[0].ffn(x, gate * resident)
        assert ((both - whole).norm(dim=-1) <= 1e-3 * side.blocks[0].typical(x, gate)).all()


def test_a_device_that_never_asks_is_an_error_on_both_sides() -> None:
    side = made(HandOver(2, 64, 256, 1), limit=0.3)
    side.worker.begin(1)
    with pytest.raises(RuntimeError, match=r"has waited 0\.3 s for the device"):
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.WORKER_WAITED
    with pytest.raises(RuntimeError, match="load the model again"):
        side.worker.begin(2)


def test_a_device_that_stops_asking_is_an_error() -> None:
    side = made(HandOver(3, 64, 256, 1), limit=0.3)
    side.worker.begin(1)
    ask(side.seen, 0, 1, torch.ones(1, 256), torch.ones(1, 64))
    answer(side.seen, 0, 1, 1)
    with pytest.raises(RuntimeError, match="has waited"):
        side.worker.end(1)


def test_a_device_that_gave_up_is_an_error_within_a_second() -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    side.seen.abort[0] = Abort.DEVICE_WAITED
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has not answered in time"):
        side.worker.end(1)
    assert time.monotonic() - start < 1 + 0.5  # a machine that does much else


@pytest.mark.parametrize("bad", [-1, 64, 1 << 30])
def test_a_request_for_neurons_that_are_not_is_an_error(bad: int) -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    side.seen.count[0], side.seen.indices[0, 0] = 1, bad
    side.seen.requested[0] = 1
    with pytest.raises(RuntimeError, match="neurons that there are not"):
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.BAD_REQUEST
    assert side.seen.answered[0] == 0


@pytest.mark.parametrize("bad", [-1, 65])
def test_a_count_that_is_none_is_an_error(bad: int) -> None:
    side = made(HandOver(1, 64, 256, 1))
    side.worker.begin(1)
    side.seen.count[0] = bad
    side.seen.requested[0] = 1
    with pytest.raises(RuntimeError, match="neurons that there are not"):
        side.worker.end(1)


def test_a_worker_that_was_stopped_in_a_step_is_an_error_within_a_second() -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    threading.Timer(0.1, side.worker.stop).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="is gone"):
        side.worker.end(1)
    assert time.monotonic() - start < 1 + 0.5
    assert side.seen.abort[0] == Abort.INTERRUPTED, "the device waits on"
    with pytest.raises(RuntimeError, match="is gone"):
        side.worker.begin(2)


def test_after_an_interrupted_step_the_next_one_is_right() -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    ask(side.seen, 0, 1, torch.ones(1, 256), torch.ones(1, 64))
    side.worker.interrupt()
    with pytest.raises(RuntimeError, match="interrupted"):
        side.worker.end(1)
    check(side, 2, [64, 5], 1, seed=2)


def test_a_step_that_no_device_asked_for_is_given_up_when_the_next_begins() -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    check(side, 2, [64, 5], 1, seed=2)


def test_ctrl_c_ends_both_sides() -> None:
    side = made(HandOver(2, 64, 256, 1))
    side.worker.begin(1)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.INTERRUPTED
    check(side, 2, [64, 5], 1, seed=2)


def test_a_forgotten_worker_ends_its_threads_in_a_step_too() -> None:
    program = """
import numpy as np
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.hybrid.handover import HandOver

layout = HandOver(2, 64, 256, 1)
records = [operations.new_neurons(64, 256) for _ in range(2)]
worker = operations.cold_worker(records, np.zeros(layout.size, np.uint8), layout)
worker.begin(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_has_workers_of_its_own() -> None:
    side = made(HandOver(2, 64, 256, 1))
    check(side, 1, [64, 5], 1, seed=1)
    child = os.fork()
    if not child:
        try:
            side.worker.begin(2)
            for block in range(2):
                ask(side.seen, block, 2, torch.ones(1, 256), torch.ones(1, 64))
                answer(side.seen, block, 2, 1)
            side.worker.end(2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    check(side, 2, [64, 5], 1, seed=2)


def test_sizes_that_do_not_fit_are_refused() -> None:
    layout = HandOver(2, 64, 256, 1)
    records = [operations.new_neurons(64, 256) for _ in range(2)]
    memory = np.zeros(layout.size, np.uint8)
    with pytest.raises(ValueError, match="every block"):
        operations.cold_worker(records[:1], memory, layout)
    with pytest.raises(ValueError, match="as wide"):
        operations.cold_worker([records[0], operations.new_neurons(64, 512)], memory, layout)
    with pytest.raises(ValueError, match="size of the hand-over"):
        operations.cold_worker(records, memory[:-1], layout)
    worker = operations.cold_worker(records, memory, layout)
    with pytest.raises(ValueError, match="room"):
        worker.begin(1, 2)
    with pytest.raises(ValueError, match="from 1 on"):
        worker.begin(0)
    with pytest.raises(ValueError, match="began last"):
        worker.end(7)
