"""Commands of sparsepack in processes of their own, each in a fraction of a second.

One process imports everything once and runs each command in a fork of itself; it has one thread, since the others of a
process do not live on in a fork. It is asked in lines of JSON on its standard input.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    status     -- its exit status; None where it was killed
    operations -- the file operations that it came to, by name; none where it was killed
    said       -- its standard error
    """

    status: int | None
    operations: list[str]
    said: str

    @property
    def errors(self) -> list[str]:
        """Its error lines."""
        return [line for line in self.said.splitlines() if line.startswith("sparsepack: ")]


class Forker:
    """The process that forks."""

    def __init__(self, folder: Path) -> None:
        self.said = folder / "said.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "TOKENIZERS_PARALLELISM": "false",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        command = [sys.executable, str(HERE / "forked.py"), str(self.said)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, command: list[str], folder: Path, at: int | None = None, how: str = "kill", **settings: Any) -> Ended:
        """Run a command, disturbed at its file operation number `at` below `folder` (None: not).

        settings -- `exchange=False`: of a file system that exchanges nothing; `inside=True`: not in a fork, which
                    leaves what it imports for all that follow
        """
        job = {"command": command, "folder": str(folder), "at": at, "how": how, **settings}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks has ended: {self.said.read_text(errors='replace')[-2000:]}")
        return Ended(*json.loads(answer), self.said.read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _status(command: list[str]) -> int:
    from sparsepack.cli import main

    try:
        main(command)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _forked(job: dict[str, Any]) -> tuple[int | None, list[str]]:
    """Exit status and operations of a fork that does the job."""
    import torch
    from operations import Operations

    from sparsepack.files import atomic

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        operations = Operations(Path(job["folder"]), job["at"], job["how"])
        if not job.get("exchange", True):
            atomic.exchange = lambda one, other: False
        operations.install()
        # A fork has none of torch's threads; two threads of a command that both come to make them anew fail.
        torch.set_num_threads(1)
        status = _status(job["command"])
        sys.stderr.flush()
        with os.fdopen(writing, "w") as file:
            json.dump(operations.names, file)
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        names = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (-signal.SIGKILL, *range(256)):
        print(f"ended by signal {-status}", file=sys.stderr)
        status = 71
    return (None if status < 0 else status), json.loads(names or "[]")


def _serve(said: str) -> None:
    # A command finds its own standard streams unused, and can take no line that is for this process.
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 2)

    import torch

    from sparsepack.workers import state as states

    torch.set_num_threads(1)
    states.SAVE_EVERY = 0.0  # each block and each step, so that there are states to go on from
    for line in jobs:
        job = json.loads(line)
        os.truncate(said, 0)
        if job.get("inside"):
            answer = _status(job["command"]), []
            gc.collect()
            gc.freeze()  # what a fork's collector does not touch need not be copied
        else:
            answer = _forked(job)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
