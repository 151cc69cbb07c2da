"""Workers that are threads of one process: what is exchanged goes through queues.

One of them runs at a time, until it waits for another: while transformers makes a model it changes torch's default
type, for all threads.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparsepack.workers.shard import Shard


@dataclass
class Board:
    """What all links share."""

    values: dict[str, str] = field(default_factory=dict)
    sent: dict[tuple[int, int], "queue.Queue[Tensor | None]"] = field(default_factory=lambda: defaultdict(queue.Queue))
    ended: set[int] = field(default_factory=set)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def let_others(self) -> None:
        """Called by the thread whose turn it is: lets another one run for a while."""
        self.turn.release()
        time.sleep(0.002)
        self.turn.acquire()


class ThreadLink:
    """The link of one worker."""

    def __init__(self, board: Board, number: int) -> None:
        self.board, self.number = board, number

    def set(self, key: str, value: str) -> None:
        self.board.values[key] = value

    def get(self, key: str) -> str | None:
        if key not in self.board.values:
            self.board.let_others()
        return self.board.values.get(key)

    def forget(self, key: str) -> None:
        del self.board.values[key]

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        for tensor in tensors:  # where there are none, as with gloo, nobody need be there any more
            if to in self.board.ended:
                raise RuntimeError("connection reset by peer")
            self.board.sent[self.number, to].put(tensor.clone())

    def receive(self, into: Sequence[Tensor], sender: int) -> None:
        for tensor in into:
            self._receive(tensor, sender)

    def _receive(self, into: Tensor, sender: int) -> None:
        while True:
            try:
                found = self.board.sent[sender, self.number].get_nowait()
            except queue.Empty:
                if sender in self.board.ended:
                    raise RuntimeError("connection closed by peer") from None
                self.board.let_others()
                continue
            assert found is not None
            assert (found.dtype, found.shape) == (into.dtype, into.shape)
            into.copy_(found)
            return


def together(count: int, work: Callable[[Shard], Any]) -> list[Any]:
    """What each of so many workers returns, or the error that it raises."""
    board, found = Board(), [None] * count
    names = tuple(f"worker {number} of {count} on here" for number in range(count))

    def run(number: int) -> None:
        shard = Shard(number, count, ThreadLink(board, number), names)
        with board.turn:
            try:
                found[number] = work(shard)
            except Exception as error:
                found[number] = error
                shard.failed(str(error))
            finally:
                board.ended.add(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a worker waits for ever"
    return found
