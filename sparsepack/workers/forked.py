"""Work on many items by processes of this machine that share what this one has in memory.

Threads of Python take turns at its interpreter: encoders, which call a small operation of torch every few microseconds,
gain nothing from more than a few of them. A fork has the weights' files open and mapped as its parent has, and takes no
time to start. It computes on one thread, since threads do not live on in a fork.
"""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from sparsepack.errors import WorkerLost
from sparsepack.process import exit_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class _Fork:
    process: BaseProcess
    connection: Connection
    item: int | None = None  # what it works on, by its number


def can_fork() -> bool:
    """Whether forks of this process can work: elsewhere than on Linux, libraries do not live on in them."""
    return sys.platform == "linux"


def forked_map(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    sizes: Sequence[int],
    processes: int,
    most: int,
    done: Callable[[], object],
) -> list[Result]:
    """`work(item)` of every item, in the order of the items, each in one of so many forks of this process.

    sizes -- what each item takes of `most`, in bytes: those that are worked on together take no more, unless it is one
    done  -- called after each item

    Items are begun in their order, which is that of what they read; but first those that would keep the others waiting
    at the end, being more than a quarter of what each process has to do. The error raised is that of the first item, in
    their order, that has one: items before it are all worked on. Raises `WorkerLost` where a fork is killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, of which they use none
        forks = _started(work, items, min(processes, len(items)))
    large = sum(sizes) / (4 * processes)
    waiting = sorted(range(len(items)), key=lambda number: sizes[number] <= large)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    try:
        while waiting or any(fork.item is not None for fork in forks):
            for fork in forks:
                taken = sum(sizes[other.item] for other in forks if other.item is not None)
                if fork.item is None and (number := _next(waiting, sizes, most - taken, taken == 0)) is not None:
                    waiting.remove(number)
                    fork.item = number
                    fork.connection.send(number)
            for fork in _answered(forks):
                number, fork.item = fork.item, None
                assert number is not None
                error, result = _answer(fork)
                if error is None:
                    results[number] = result
                    done()
                else:
                    errors[number] = error
                    waiting = [other for other in waiting if other < min(errors)]
    finally:
        _end(forks)
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]


def _next(waiting: Sequence[int], sizes: Sequence[int], left: int, alone: bool) -> int | None:
    """The first item that fits into what is left, or any where nothing else is worked on."""
    return next((number for number in waiting if alone or sizes[number] <= left), None)


def _started(work: Callable[[Any], Any], items: Sequence[Any], count: int) -> list[_Fork]:
    context = get_context("fork")
    forks: list[_Fork] = []
    gc.collect()
    for _ in range(count):
        ours, theirs = context.Pipe()
        # A fork that held its parent's end of a pipe, its own or another's, would not see that the parent is gone.
        ends = [ours, *(fork.connection for fork in forks)]
        process = context.Process(target=_serve, args=(work, items, theirs, ends, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        forks.append(_Fork(process, ours))
    return forks


def _serve(
    work: Callable[[Any], Any], items: Sequence[Any], asked: Connection, others: Sequence[Connection], parent: int
) -> None:
    """What a fork does: work on the items whose numbers it is sent, until its parent is gone or ends it."""
    import torch

    exit_with_parent(parent)  # in the midst of an item, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, too, and ends it
    torch.set_num_threads(1)
    for other in others:
        other.close()
    with suppress(EOFError, OSError):
        while True:
            number = asked.recv()
            try:
                answer: tuple[BaseException | None, Any] = (None, work(items[number]))
            except BaseException as error:
                answer = (error, None)
            try:
                asked.send(answer)
            except (TypeError, AttributeError):  # what cannot be sent: an error that holds more than its words
                asked.send((RuntimeError(f"{type(answer[0]).__name__}: {answer[0]}"), None))
    os._exit(0)  # what the parent has registered for its end is the parent's


def _answered(forks: Sequence[_Fork]) -> list[_Fork]:
    """The forks that have come to the end of their item, at least one."""
    ready = wait([fork.connection for fork in forks if fork.item is not None])
    return [fork for fork in forks if fork.connection in ready]


def _answer(fork: _Fork) -> tuple[BaseException | None, Any]:
    try:
        error, result = fork.connection.recv()
    except (EOFError, OSError):
        fork.process.join(5)
        status = fork.process.exitcode
        raise WorkerLost(
            f"a process that worked on a part was ended (status {status}), perhaps for want of memory; nothing is "
            "written"
        ) from None
    return error, result


def _end(forks: Sequence[_Fork]) -> None:
    for fork in forks:
        fork.process.kill()
    for fork in forks:
        fork.process.join()
        fork.connection.close()
