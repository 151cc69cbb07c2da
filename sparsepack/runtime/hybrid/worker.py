"""A second worker: it does one piece of work after the other, handed over by sequence numbers.

    caller   work, then `posted` n       ...        waits for `done` n, then reads the result
    worker   waits for `posted` n, does the work, leaves the result, then `done` n

Both numbers only rise, each is written by one side, and what they announce is there before them. It takes any piece of
work, of any backend, copies too; the native worker of the cpu backend answers requests for native records alone.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

LONGEST = 60.0
"""One piece of work may take this many seconds. Work takes milliseconds: where it takes longer than this, nobody
computes."""
_LOOK = 0.1  # seconds between two looks whether the worker lives


def _nothing() -> None:
    """What is there to do where nothing was posted."""


class _Shared:
    """What both sides see. It knows nothing of the caller, so that a forgotten caller ends the thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted = self.done = 0
        self.work: Callable[[], Any] = _nothing
        self.result: Any = None
        self.error: BaseException | None = None
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Worker:
    """A thread of its own. Whoever posts takes, from one thread.

    longest -- seconds to wait for one piece of work

    Where the work fails or the thread is gone, `post` and `take` raise RuntimeError from then on: never do they wait
    for what nobody does.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest, self._shared = longest, _Shared()
        self._thread = threading.Thread(target=_serve, args=(self._shared,), name="offloaded neurons", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._shared, self._thread, longest)

    def post(self, work: Callable[[], Any]) -> int:
        """Hand over what is to be done. Returns its number. Waits for what was posted before."""
        shared = self._shared
        with shared.changed:
            self._wait_for(shared.posted)
            shared.work = work
            shared.posted += 1
            shared.changed.notify_all()
            return shared.posted

    def take(self, number: int) -> Any:
        """The result of the work posted last, whose number this is, when it is there."""
        shared = self._shared
        with shared.changed:
            self._wait_for(number)
            result, shared.result = shared.result, None
            return result

    def close(self) -> None:
        """End the thread."""
        self._shared.close()

    def _wait_for(self, number: int) -> None:
        shared, end = self._shared, time.monotonic() + self._longest
        while True:
            if shared.error is not None:
                raise RuntimeError(f"the worker of the offloaded neurons failed: {shared.error!r}") from shared.error
            if not self._thread.is_alive() or shared.closed:
                raise RuntimeError("the worker of the offloaded neurons is gone; load the model again")
            if shared.done >= number:
                return
            if time.monotonic() > end:
                self.close()
                raise RuntimeError(f"the worker of the offloaded neurons has not answered for {self._longest:g} s")
            shared.changed.wait(_LOOK)


def _end(shared: _Shared, thread: threading.Thread, longest: float) -> None:
    """Nobody knows the caller any more, or Python ends, which aborts where a thread comes back from a kernel later."""
    shared.close()
    if thread is not threading.current_thread():
        thread.join(longest)


def _serve(shared: _Shared) -> None:
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.closed or shared.posted > shared.done)
            if shared.closed:
                return
            work, shared.work = shared.work, _nothing
        try:
            result = work()
        except BaseException as error:
            with shared.changed:
                shared.error = error
                shared.changed.notify_all()
            return
        del work  # which holds the caller
        with shared.changed:
            shared.result = result
            shared.done += 1
            shared.changed.notify_all()
        del result
