"""Commands as forks of one process that has imported what they need: each begins at once, and does not import torch and
transformers for seconds. All else is a process's own: its environment, standard streams, signals and exit status.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from commands_for_tests import sparsepack

from sparsepack.process import python_module
from sparsepack.workers import launch
from sparsepack.workers.launch import LAUNCHED

_PRELOADED = (
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "sparsepack.calibrate.collection",
    "sparsepack.eval.run",
    "sparsepack.packing",
    "sparsepack.calibrate.pruning",
    "sparsepack.calibrate.rotation",
    "sparsepack.serve.server",
    "sparsepack.calibrate.find_thresholds",
)
_FORKS = multiprocessing.get_context("forkserver")


class _Stream:
    """A file that a fork reads or writes; None: nothing."""

    def __init__(self, file: IO[Any] | None) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (None if self.file is None else reduction.DupFd(self.file.fileno()),)


def _received(copy: Any) -> int:
    return os.open(os.devnull, os.O_RDWR) if copy is None else copy.detach()


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: Path | None,
    before: Callable[[], None] | None,
    given: int,
    output: int,
    errors: int,
) -> None:
    import torch

    os.dup2(given, 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    # What is there reads and writes what the process that forks had.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environment)
    if LAUNCHED in environment:
        os.environ[LAUNCHED] = str(os.getppid())
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # as torch itself does when it is imported
    if folder is not None:
        os.chdir(folder)
    if before is not None:
        before()
    from sparsepack.cli import main

    main(arguments)


class Fork:
    """A command of sparsepack, with what `launch` asks of a `subprocess.Popen`.

    stdout, stderr -- files; None: nothing
    folder         -- where it runs; None: here
    before         -- a function of a module, which the fork calls first
    stdin          -- a file; None: nothing
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        folder: Path | None = None,
        before: Callable[[], None] | None = None,
        stdin: IO[Any] | None = None,
    ) -> None:
        _FORKS.set_forkserver_preload([*_PRELOADED])
        streams = _Stream(stdin), _Stream(stdout), _Stream(stderr)
        self.process = _FORKS.Process(target=_run, args=(arguments, environment, folder, before, *streams))
        self.process.start()

    def send_signal(self, number: int) -> None:
        """As `subprocess` has it."""
        if self.process.is_alive():
            assert self.process.pid is not None
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.process.pid, number)

    @property
    def pid(self) -> int:
        """As `subprocess` has it."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """As `subprocess` has it."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess` has it."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self.process.exitcode

    def terminate(self) -> None:
        """As `subprocess` has it."""
        self.process.terminate()

    def kill(self) -> None:
        """As `subprocess` has it."""
        self.process.kill()


def _call(answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flags), number)
    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a fork that has imported what commands need; a `ChildProcessError` where
    the fork ends before that."""
    _FORKS.set_forkserver_preload([*_PRELOADED])
    answer, sending = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_call, args=(sending, function, arguments))
    process.start()
    sending.close()
    try:
        done, said = answer.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"ended with {process.exitcode}") from None
    process.join()
    assert done, said
    return said


_EACH_IN_A_FORK = """
import os, sys, traceback
codes = sys.argv[1:]
for code in codes:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        said = ""
        try:
            exec(code, {})
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        sys.stdout.buffer.write(file.read() + b"\\0")
    assert os.wait()[1] == 0
"""


def in_forks(before: str, codes: Sequence[str]) -> list[str]:
    """The traceback of each code, run in a new interpreter that has run `before`; empty where there is none.

    before -- code after which the process has one thread
    """
    command = [sys.executable, "-c", f"{before}\n{_EACH_IN_A_FORK}", *codes]
    # torch imports installed packages that ask for it, and ours does so for lm-eval.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split("\0")[:-1]


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A command by so many workers of one thread each, which must succeed; what the first one says."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path_factory.mktemp("forks") / "said.txt"

    def run(count: int, *command: str) -> str:
        with path.open("w") as said, monkeypatch.context() as patch:

            def started(command: list[str], env: dict[str, str], stdin: Any, stdout: Any, stderr: Any) -> Fork:
                arguments = command[len(python_module("sparsepack")) :]
                assert command == python_module("sparsepack", *arguments)
                printed = None if stdout == subprocess.DEVNULL else stdout or said
                return Fork(arguments, env, printed, stderr or said)

            replaced = SimpleNamespace(
                Popen=started, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
            )
            patch.setattr(launch, "subprocess", replaced)
            ended = sparsepack(*command, "--devices", ",".join(["cpu"] * count))
        assert ended.exit_code == 0, ended.output + path.read_text()
        return path.read_text()

    return run
