"""Commands with standard streams like no pipe of `subprocess` has: closed, without a reader, of another encoding.

One process imports what commands need, and forks for each. The fork makes its standard streams as an interpreter makes
them that is started so, and ends as an interpreter does.
"""

import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOSED, NO_READER = "closed", "no reader"
_PRELOADED = (
    "import torch, transformers, sparsepack.cli, sparsepack.formats.open, sparsepack.inspection, sparsepack.loading, "
    "sparsepack.packing, sparsepack.runtime.cpu.backend"
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, and what it printed."""

    status: int
    output: bytes
    errors: bytes


class Starter:
    """The process that forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", f"{_PRELOADED}\nimport started_for_tests\nstarted_for_tests.serve()"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self,
        *arguments: object,
        stdin: str | bytes = b"",
        stdout: str | None = None,
        stderr: str | None = None,
        encoding: str | None = None,
    ) -> Ended:
        """Run a command of sparsepack.

        stdin    -- CLOSED, or what it reads
        stdout   -- CLOSED, NO_READER, a file's name, or None: what it prints is returned
        stderr   -- the same
        encoding -- what PYTHONIOENCODING would say
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            given, output, errors = (Path(name) / stream for stream in ("stdin", "stdout", "stderr"))
            given.write_bytes(b"" if stdin == CLOSED else stdin)  # type: ignore[arg-type]
            output.touch()
            errors.touch()
            streams = [CLOSED if stdin == CLOSED else str(given), stdout or str(output), stderr or str(errors)]
            job = {"arguments": list(map(os.fsdecode, map(_plain, arguments))), "streams": streams}
            print(json.dumps(job | {"encoding": encoding}), file=self.process.stdin, flush=True)
            status = self.process.stdout.readline()
            if not status:
                raise RuntimeError("the process that forks has ended")
            return Ended(int(status), output.read_bytes(), errors.read_bytes())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _plain(argument: object) -> str | bytes:
    return argument if isinstance(argument, bytes) else str(argument)


def serve() -> None:
    """Run what standard input asks for, each in a fork; a fork returns as well, when its command has ended."""
    import torch

    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    torch.set_num_threads(1)  # a fork has none of the others
    gc.freeze()  # what a fork's collector does not touch need not be copied
    for line in jobs:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**job)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(arguments: list[str], streams: list[str], encoding: str | None) -> None:
    from sparsepack.cli import main

    for number, what in enumerate(streams):
        os.close(number)
        if what == NO_READER:
            reading, writing = os.pipe()
            os.dup2(writing, number)  # of which the pipe may have taken the number
            for each in {reading, writing} - {number}:
                os.close(each)
        elif what != CLOSED:
            opened = os.open(what, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    made = [_stream(number, encoding) for number in range(3)]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = made
    main(arguments)


def _stream(number: int, encoding: str | None) -> Any:
    """What CPython makes of a standard stream (`create_stdio` of pylifecycle.c), where it is no terminal."""
    try:
        os.fstat(number)
    except OSError:
        return None
    before: Any = (sys.stdin, sys.stdout, sys.stderr)[number]
    errors = "backslashreplace" if number == 2 else "strict" if encoding else before.errors
    name, _, how = (encoding or "utf-8").partition(":")
    file = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 (it stays open)
    return io.TextIOWrapper(
        file,
        name,
        how if how and number != 2 else errors,
        newline=None if number == 0 else "\n",
        line_buffering=number == 2,
    )
