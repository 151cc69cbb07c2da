"""Blocks are read ahead: the same tensors, one block ahead and no more."""

import threading
from collections.abc import Iterator

import pytest
import torch
from devices import DEVICES
from torch import Tensor

from sparsepack.errors import CheckpointError
from sparsepack.models.hf_model.prefetch import BlocksAhead

BLOCKS = [
    {name: torch.randn(5, 3).to(torch.bfloat16) for name in ("q.weight", "down.weight")}
    | {"norm.weight": torch.ones(7)}
    for _ in range(4)
]


class Reader:
    """Gives `BLOCKS`, and says which were asked for."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.called = threading.Event()

    def __call__(self, number: int) -> Iterator[tuple[str, Tensor]]:
        self.read.append(number)
        self.called.set()
        if number == 3:
            raise CheckpointError("block 3 is damaged")
        yield from BLOCKS[number].items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [1, 3])
def test_blocks_are_the_same_ahead_or_not(at_once: int, device: str, dtype: torch.dtype) -> None:
    ahead = BlocksAhead(Reader(), torch.device(device), dtype, at_once)
    for number in (0, 1, 2):
        found = ahead.take(number)
        if number == 0:
            ahead.begin(1)
        assert found.keys() == BLOCKS[number].keys()
        for name, value in found.items():
            assert value.dtype == dtype
            assert value.device.type == device
            assert torch.equal(value.cpu(), BLOCKS[number][name].to(dtype))
    assert ahead.read_bytes == 3 * (2 * 15 * 2 + 7 * 4)
    assert ahead.moved_bytes == 3 * (30 + 7) * dtype.itemsize


def test_a_block_is_read_on_a_thread_and_once() -> None:
    reader = Reader()
    ahead = BlocksAhead(reader, torch.device("cpu"), torch.float32)
    ahead.begin(1)
    assert reader.called.wait(60)
    ahead.take(1)
    assert reader.read == [1]


def test_a_block_that_nobody_takes_costs_nothing_but_its_time() -> None:
    reader = Reader()
    ahead = BlocksAhead(reader, torch.device("cpu"), torch.float32)
    ahead.begin(3)
    assert torch.equal(ahead.take(0)["norm.weight"], torch.ones(7))
    assert reader.read == [3, 0]


def test_what_cannot_be_read_is_said_when_it_is_taken() -> None:
    ahead = BlocksAhead(Reader(), torch.device("cpu"), torch.float32)
    ahead.begin(3)
    with pytest.raises(CheckpointError, match="block 3 is damaged"):
        ahead.take(3)
