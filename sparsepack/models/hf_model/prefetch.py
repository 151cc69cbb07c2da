"""Read and move ahead: a decoder block while the one before it computes, and hidden states in the host's memory while
the parts before and after them run on a GPU."""

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from sparsepack.files.transfer import stacked_on

Read = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Such a function reads the tensors of a block, by its number, one after the other: name, and what is stored, on the
CPU."""
AT_ONCE = 1
"""So many tensors of a block move to a GPU side by side; more have not been timed on one yet."""
_PAGES_FROM = 1 << 20
"""Tensors of so many bytes get pages of their own."""


class BlocksAhead:
    """The blocks of a model on a device, in the type that is computed in: one is read and moved ahead, never more.

    That is done on a thread, and on a GPU on a stream, of its own, by way of page-locked memory. On a CPU a block that
    is stored in a narrower type waits as it is stored: turning it into the other takes little time, and no memory then.

    at_once                    -- so many tensors move side by side
    read_seconds, read_bytes   -- what reading took so far, from disk or from the page cache, decoding included
    moved_seconds, moved_bytes -- likewise of moving blocks to the device and turning them into the type
    waited_seconds             -- how long somebody waited for a block that was not there yet
    """

    def __init__(self, read: Read, device: torch.device, dtype: torch.dtype, at_once: int = 1) -> None:
        self._read, self._device, self._dtype = read, device, dtype
        self._thread: ThreadPoolExecutor | None = None
        self._movers = ThreadPoolExecutor(at_once, "blocks-moved") if at_once > 1 else None
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.read_seconds = self.moved_seconds = self.waited_seconds = 0.0
        self.read_bytes = self.moved_bytes = 0

    def take(self, number: int) -> dict[str, Tensor]:
        """The tensors of a block. Raises what reading it raises."""
        began = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            tensors = ahead[1].result()
        else:
            if ahead is not None:  # of a block that nobody asks for
                wait([ahead[1]])
            tensors = self._made(number)
        if self._device.type == "cpu":
            began_moving = time.perf_counter()
            for name in list(tensors):
                tensors[name] = _converted(tensors.pop(name), self._dtype)  # one after the other: not two of each
                self.moved_bytes += tensors[name].nbytes
            self.moved_seconds += time.perf_counter() - began_moving
        if self._stream is not None:
            using = torch.cuda.current_stream(self._device)
            for tensor in tensors.values():
                tensor.record_stream(using)  # else the next block could be put there while this one is still used
        self.waited_seconds += time.perf_counter() - began
        return tensors

    def begin(self, number: int) -> None:
        """Read a block that will be taken next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "blocks-ahead")
        self._ahead = number, self._thread.submit(self._made, number)

    def wait(self) -> None:
        """Let what was begun come to its end."""
        if self._ahead is not None:
            wait([self._ahead[1]])

    def _made(self, number: int) -> dict[str, Tensor]:
        placed: dict[str, Tensor] = {}
        moving: dict[str, Future[Tensor]] = {}
        began = time.perf_counter()
        for name, stored in self._read(number):
            read = time.perf_counter()
            self.read_seconds += read - began
            self.read_bytes += stored.nbytes
            if self._movers is not None:
                moving[name] = self._movers.submit(self._placed, stored)
            else:
                placed[name] = self._placed(stored)
            del stored  # before the next one is read
            began = time.perf_counter()
            self.moved_seconds += began - read
        placed |= {name: moved.result() for name, moved in moving.items()}
        self.moved_seconds += time.perf_counter() - began
        self.moved_bytes += sum(each.nbytes for each in placed.values()) if self._device.type != "cpu" else 0
        return placed

    def _placed(self, stored: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return stored if stored.dtype.itemsize < self._dtype.itemsize else _converted(stored, self._dtype)
        if self._stream is None:
            return stored.to(self._device, self._dtype)
        with torch.cuda.stream(self._stream):
            placed = stacked_on(str(self._device), [stored]).to(self._dtype)
        self._stream.synchronize()
        return placed


def _converted(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a type, on the CPU, in pages that go back to the system when the tensor is let go of.

    The allocator would keep them: they are taken by one thread and let go of by another, a block at a time.
    """
    nbytes = stored.numel() * dtype.itemsize
    if stored.dtype == dtype or nbytes < _PAGES_FROM:
        return stored.to(dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(stored.shape).copy_(stored)


def run_between_copies(
    parts: Sequence[Tensor],
    run: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[], object],
) -> None:
    """Put `run` of each part, on the device in the type, in the place of the part; `advance` is called after each run,
    before the GPU may have come to its end.

    parts -- on the CPU, page-locked where copies shall not be waited for

    One part is copied there and one back while one runs. The GPU is waited for at the end, and so that no more than
    that has memory on it.
    """
    using = torch.cuda.current_stream(device)
    there, back = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    there.wait_stream(using)

    def fetched(part: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(there):
            placed = part.to(device, non_blocking=True).to(dtype)
        placed.record_stream(using)
        return placed, there.record_event()

    returned: deque[torch.cuda.Event] = deque()
    ahead = fetched(parts[0]) if parts else None
    for number, part in enumerate(parts):
        assert ahead is not None
        placed, ready = ahead
        ahead = fetched(parts[number + 1]) if number + 1 < len(parts) else None
        using.wait_event(ready)
        made = run(placed)
        del placed
        back.wait_stream(using)
        with torch.cuda.stream(back):
            part.copy_(made, non_blocking=True)
        made.record_stream(back)
        del made
        returned.append(back.record_event())
        advance()
        if len(returned) > 1:
            returned.popleft().synchronize()
    back.synchronize()
