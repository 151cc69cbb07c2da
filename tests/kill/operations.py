"""File operations of a process, counted, and one of them disturbed: the process is killed there, or the disk fails.

Counted is what happens below one folder: opening for writing, each write that reaches the system, rename, exchange,
remove, mkdir, rmdir, truncate, chmod, fsync, and a safetensors file, which its library writes as a whole. Audit hooks
see most of them whoever calls; those that have none are patched. Nothing is undone: this is for a process that ends.
"""

import builtins
import errno
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOWS = ("kill", "EIO", "ENOSPC")
_AUDITED = {  # event -> which of its arguments are paths, which are folders' descriptors
    "os.rename": ((0, 1), (2, 3)),
    "os.remove": ((0,), (1,)),
    "os.rmdir": ((0,), (1,)),
    "os.mkdir": ((0,), (2,)),
    "os.truncate": ((0,), ()),
    "os.chmod": ((0,), (2,)),
}
_NEED_SPACE = ("open", "write", "os.mkdir", "save", "fsync")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Operations:
    """Counts the operations below `folder`, and disturbs number `at` (from 1) as `how` says.

    kill   -- SIGKILL before it happens; a write is torn: half of it happens
    EIO    -- it fails, once
    ENOSPC -- it and all after it that need space fail
    """

    def __init__(self, folder: Path, at: int | None = None, how: str = "kill") -> None:
        self.folder, self.at, self.how = f"{folder}{os.sep}", at, how
        self._numbers = itertools.count(1)
        self.names: list[str] = []

    def install(self) -> None:
        """From now on."""
        import safetensors.torch

        from sparsepack.files import atomic

        sys.addaudithook(self._audit)
        self._open = io.open
        io.open = builtins.open = self._opened  # type: ignore[assignment]
        fsync, save, exchange = os.fsync, safetensors.torch.save_file, atomic.exchange

        def synced(file: Any) -> None:
            self.happens("fsync")
            fsync(file)

        def saved(tensors: Any, path: Any) -> None:
            def half() -> None:
                save(tensors, path)
                os.truncate(path, os.path.getsize(path) // 2)

            try:
                self.happens("save", half)
            except OSError as error:  # as the library says it
                raise safetensors.SafetensorError(f"I/O error: {error.strerror} (os error {error.errno})") from None
            save(tensors, path)

        def exchanged(one: Path, other: Path) -> bool:
            self.happens("exchange")
            return exchange(one, other)

        os.fsync, safetensors.torch.save_file, atomic.exchange = synced, saved, exchanged

    def happens(self, what: str, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation that is about to happen; it may not come to that. `half` does a part of it."""
        number = next(self._numbers)
        self.names.append(what)
        if self.at is None or number < self.at:
            return
        if self.how == "kill" and number == self.at:
            self.at = None  # what `half` does is none
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.how == "EIO" and number == self.at) or (self.how == "ENOSPC" and what in _NEED_SPACE):
            code = getattr(errno, self.how)
            raise OSError(code, os.strerror(code))

    def _below(self, path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.folder)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & _WRITING and self._below(path):
                self.happens("open")
        elif event in _AUDITED:
            paths, folders = _AUDITED[event]
            # A name with a folder's descriptor: rmtree.
            if any(self._below(arguments[n]) for n in paths) or any(arguments[n] not in (-1, None) for n in folders):
                self.happens(event)

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        """`open`, in whose files each write that reaches the system is counted."""
        if not set(mode) & set("wax+") or not self._below(file) or "opener" in named:  # tempfile's own files
            return self._open(file, mode, buffering, *rest, **named)
        raw = _File(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)


class _File(io.FileIO):
    def __init__(self, operations: Operations, path: Any, mode: str) -> None:
        self.operations = operations
        super().__init__(path, mode)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.operations.happens("write", lambda: super(_File, self).write(view[: len(view) // 2]))
        return super().write(view)
