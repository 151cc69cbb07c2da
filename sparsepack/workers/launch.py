"""A command starts the workers itself: itself again, once for each device, as torchrun would.

The first worker has this process's output. What the others print is kept: where one of them fails first, its line is
told. When one ends before its work is done, or is stopped, all are ended, and one line says which and why; one that is
killed after that, while Python ends, ends nobody. An interrupt or SIGTERM ends all; none outlives this process. Nothing
heavy is imported.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from sparsepack.errors import WorkersError
from sparsepack.process import cores, exit_with_parent, python_environment, python_module
from sparsepack.terminal import printable, tell

LAUNCHED = "SPARSEPACK_LAUNCHED_BY"
"""The process that started the workers (`--devices`), by its number; torchrun sets no such variable."""

DONE = "SPARSEPACK_DONE"
"""The file that a worker makes, when its work is done, for whom it was started by (`--devices`); torchrun has none."""

INTERRUPTED = ".interrupted"
"""That file has this suffix where a worker was interrupted and has said so."""

LOST = 20.0
"""A worker that gave no sign of life, or was stopped, for so many seconds is lost."""

_NAMES = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def several() -> bool:
    """Whether this process was started as one of several workers."""
    return workers_count() > 1


def several_machines() -> bool:
    """Whether some of the workers are on other machines than this one."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return several() and here.isdecimal() and int(here) < workers_count()


def missing() -> list[str]:
    """The variables without which one of several workers does not find the others, as far as they are not set."""
    return [name for name in _NAMES if name not in os.environ]


def worker_number() -> int:
    """The number of this worker, from 0; -1 where the environment gives none."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else -1


def workers_count() -> int:
    """How many workers there are."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 1


def number_here() -> int:
    """The number of this worker among those of its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def end_with_launcher() -> None:
    """End when the process that started this worker (`--devices`) does, whatever ends that one."""
    launcher = os.environ.get(LAUNCHED, "")
    if launcher.isdecimal():
        exit_with_parent(int(launcher))


def say_done() -> None:
    """Tell whoever started this worker that its work is done and its output out: from here on its end, whatever it is,
    takes nothing away. One that nobody started so has nobody to tell."""
    _leave("")


def say_interrupted() -> None:
    """Tell whoever started this worker that it has said on standard error what the interrupt left."""
    _leave(INTERRUPTED)


def _leave(suffix: str) -> None:
    if path := os.environ.get(DONE):
        with suppress(OSError):  # where not even an empty file can be made, the process's end alone tells
            Path(f"{path}{suffix}").touch()


_POLL = 0.05
_FIRST_SAYS = 2.0  # seconds in which the first worker may come to the same end by itself, and say so
_END = 10.0  # seconds in which a worker ends that was told to
_INTERRUPTED = 1.0  # seconds in which a worker ends that a terminal has interrupted together with this process
_SAVED = 5.0  # seconds in which an interrupted worker ends and says what is kept
_GOES_ON = "nothing is written, and the same command goes on"


class _Ended(KeyboardInterrupt):
    """A signal that ends this process, by its number."""


@dataclass(frozen=True)
class _Started:
    number: int
    device: str
    process: subprocess.Popen[bytes]
    said: IO[bytes] | None
    done: Path  # it makes this file when its work is done

    @property
    def killed_late(self) -> bool:
        """Whether a signal ended it after its work was done."""
        status = self.process.poll()
        return status is not None and status < 0 and self.done.exists()

    @property
    def stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP), as far as the system says so."""
        if self.process.poll() is not None or not hasattr(os, "waitid"):
            return False
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            return False
        return found is not None and found.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)


def devices_of(text: str) -> tuple[str, ...]:
    """The devices that a text such as "0,1" or "cpu,cpu" lists. Raises `WorkersError` for what is no such list."""
    found = tuple(f"cuda:{part}" if part.isdigit() else part for part in (each.strip() for each in text.split(",")))
    if not all(found):
        raise WorkersError(f"--devices {text!r}: expected devices between commas, such as 0,1,2,3 or cpu,cpu")
    kinds = sorted({device.partition(":")[0] for device in found})
    if len(kinds) > 1:
        raise WorkersError(f"--devices {text}: {' and '.join(kinds)} round differently; give devices of one kind")
    return found


def launch(arguments: Sequence[str], devices: Sequence[str]) -> int:
    """Run a command by one worker for each device, and return the exit status.

    arguments -- the command line, in which one argument is `--devices` and the next one, or its end, is their list
    """
    ours = socket.socket()
    ours.bind(("127.0.0.1", 0))
    port = ours.getsockname()[1]
    ours.close()
    started: list[_Started] = []
    with tempfile.TemporaryDirectory() as folder, _ending_signals():
        try:
            for number, device in enumerate(devices):
                done = Path(folder) / str(number)
                started.append(_start(arguments, number, device, devices, port, done))
            return _wait(started)
        except KeyboardInterrupt as interrupt:
            return _interrupt(started, interrupt.args[0] if isinstance(interrupt, _Ended) else signal.SIGINT)
        finally:
            _end_all(started)
            for each in started:
                if each.said is not None:
                    each.said.close()


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise `_Ended`, unless they are ignored; only a main thread can see to that."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        before = {n: signal.signal(n, end) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    arguments: Sequence[str], number: int, device: str, devices: Sequence[str], port: int, done: Path
) -> _Started:
    here = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(devices), "LOCAL_WORLD_SIZE": len(devices)}
    environment = python_environment(
        **{name: str(value) for name, value in here.items()},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: str(os.getpid()), DONE: str(done)},
    )
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else a host's name would have to resolve
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // len(devices))))
    said = None if number == 0 else tempfile.TemporaryFile()  # noqa: SIM115 (it is read when the worker has ended)
    process = subprocess.Popen(
        python_module("sparsepack", *with_device(arguments, device)),
        env=environment,
        stdin=None if number == 0 else subprocess.DEVNULL,
        stdout=None if number == 0 else subprocess.DEVNULL,
        stderr=said,
    )
    return _Started(number, device, process, said, done)


def with_device(arguments: Sequence[str], device: str) -> list[str]:
    """A command line with `--device` and one device in the place of `--devices` and its list."""
    made: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--devices":
            next(rest)
        if argument.partition("=")[0] == "--devices":
            made += ["--device", device]
        else:
            made.append(argument)
    return made


def _wait(started: Sequence[_Started]) -> int:
    """Wait until all have ended well, or one has not. Returns the exit status."""
    stopped = dict.fromkeys(started, 0.0)  # seconds that this process has seen it stopped: both may have been
    while True:
        statuses = {each: each.process.poll() for each in started}
        failed = [each for each, status in statuses.items() if status and not each.killed_late]
        if failed:
            return _told(failed[0], started)
        if None not in statuses.values():
            for each in started:
                if each.killed_late:
                    _tell(f"note: {_name(each, started)} was killed by {_signal(each)} when its work was done")
            return 0
        for each in started:
            stopped[each] = stopped[each] + _POLL if each.stopped else 0.0
            if stopped[each] >= LOST:
                _end_all(started)
                _tell(f"{_name(each, started)} has been stopped for {LOST:.0f} seconds; {_GOES_ON}")
                return 1
        time.sleep(_POLL)


def _interrupt(started: Sequence[_Started], number: int) -> int:
    """End workers as an interrupt does, and return the exit status; they say what is kept, else one line says why."""
    end = time.monotonic() + (_INTERRUPTED if number == signal.SIGINT else 0.0)
    _wait_until(started, end)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # which workers inherit: nothing interrupts them then
        for each in started:
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGINT)
        _wait_until(started, time.monotonic() + _SAVED)
    _end_all(started)
    if not _has_said(started):
        _tell("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
    return 128 + number


def _has_said(started: Sequence[_Started]) -> bool:
    """Whether the first worker, which alone keeps a state, has said that it was interrupted."""
    return bool(started) and started[0].done.with_name(f"{started[0].done.name}{INTERRUPTED}").exists()


def _wait_until(started: Sequence[_Started], end: float) -> None:
    """Wait until the first worker has said what is kept, all have ended that are not stopped, or it is `end` by
    `time.monotonic`."""
    while time.monotonic() < end and not _has_said(started):
        if all(each.process.poll() is not None or each.stopped for each in started):
            return
        time.sleep(_POLL)


def _told(failed: _Started, started: Sequence[_Started]) -> int:
    """Say why a worker ended, unless the first one says it, and return the exit status."""
    status = failed.process.returncode
    if status > 0 and failed.number:
        first = _ended(started[0], _FIRST_SAYS)  # it may have found the same
        if first is not None and first > 0:
            return first
    if status > 0 and not failed.number:
        return int(status)
    _end_all(started)
    _tell(f"{_name(failed, started)} {_why(failed)}")
    return int(status) if status > 0 else 1


def _name(worker: _Started, started: Sequence[_Started]) -> str:
    return f"worker {worker.number} of {len(started)} ({worker.device})"


def _signal(worker: _Started) -> str:
    return signal.Signals(-worker.process.returncode).name


def _why(failed: _Started) -> str:
    status = failed.process.returncode
    if status < 0:
        name = _signal(failed)
        memory = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{memory}; {_GOES_ON}"
    assert failed.said is not None
    failed.said.seek(0)
    lines = failed.said.read().decode(errors="replace").strip().splitlines() or [f"ended with status {status}"]
    ours = [line.removeprefix("sparsepack: ") for line in lines if line.startswith("sparsepack: ")]
    return f"failed: {(ours or lines)[-1]}"


def _ended(worker: _Started, seconds: float) -> int | None:
    """The exit status of a worker that ends within so many seconds; None of one that does not."""
    try:
        return worker.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end_all(started: Sequence[_Started]) -> None:
    for each in started:
        if each.process.poll() is None:
            each.process.kill() if each.stopped else each.process.terminate()
    for each in started:
        if _ended(each, _END) is None:
            each.process.kill()
            each.process.wait()


def _tell(line: str) -> None:
    tell(f"sparsepack: {printable(line)}", sys.stderr)
