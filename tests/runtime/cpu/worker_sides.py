"""A native worker, and what a device does beside it."""

import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import neuron as neurons
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.hybrid.mailbox import Abort, Mailbox, Views, views

PATIENCE = 60.0  # seconds: of a machine that does much else


@lru_cache(maxsize=8)
def _records(count: int, hidden: int, seed: int) -> Tensor:
    """Random ones, as stored. To encode them takes longer than what is done with them."""
    generator = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(*shape, generator=generator) for shape in ((count, hidden), (hidden, count)))
    return neurons.pack(up, down, torch.arange(count))


class Block:
    """Random records, as stored, decoded and loaded."""

    def __init__(self, count: int, hidden: int, seed: int) -> None:
        stored = _records(count, hidden, seed)
        self.up, self.down = (half.double() for half in neurons.unpack(stored))
        self.loaded = operations.load_neurons(PackedMatrix(stored, MatrixFormat("Q4_K"), count, 2 * hidden))

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
        layout: Mailbox,
        threads: int,
        limit: float = PATIENCE,
        gates: Sequence[Any] = (),
    ) -> None:
        self.memory = np.zeros(layout.size, np.uint8)
        self.seen, self.layout, self.blocks = views(layout, self.memory), layout, blocks
        records = [block.loaded for block in blocks]
        self.worker: Any = machine.native().ColdWorker(
            machine.instruction_set(), records, self.memory, layout, threads, limit, [], list(gates)
        )


def made(layout: Mailbox, threads: int = 2, limit: float = PATIENCE) -> Side:
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
    seen.request_numbers[block] = number


def answer(seen: Views, block: int, number: int, texts: int) -> Tensor:
    end = time.monotonic() + PATIENCE
    while seen.count[block] and seen.answer_numbers[block] != number:
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
