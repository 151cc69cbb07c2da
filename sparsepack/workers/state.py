"""The state of a long run that has not finished: a folder beside its output, from which a killed run goes on.

Its values come in parts, each a JSON-able object: how far the blocks are, how far the learning. Tensors are kept in
files of their own, each of them a part's. `state.json`, always written after them, holds the values, and the SHA-256 of
every file and of itself: until it is there, what was committed before is the state. A part that lost a file, or has one
that changed, is dropped, and so is everything where `state.json` changed: it is computed anew, and the user told.
Whoever can write there can make hashes anew: what a state with right hashes says is checked, and a run that fails as it
goes on from one says where it lies.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import OutputError, UserError, WorkerLost
from sparsepack.files.atomic import atomic_file, remove, write_json
from sparsepack.files.hashing import fingerprint as hash_of
from sparsepack.files.hashing import sha256_of_pieces
from sparsepack.files.lock import locked
from sparsepack.files.side_files import check_no_link, folders_in, is_file, is_folder, make_folder, open_regular
from sparsepack.files.stored import Name, Stored, shown, validate
from sparsepack.files.tensors import save_tensors
from sparsepack.files.transfer import on_host
from sparsepack.progress import say

_STATE = "state.json"
BLOCKS = "blocks"
"""The part whose values say how many decoder blocks are `done`."""

SAVE_EVERY = 20.0
"""A state is saved when the one before is so many seconds old (`pause_after`)."""


_WRITTEN = 1e9
"""Bytes of a state that are written and hashed in a second, as long as none was: a slow disk's."""


def pause_after(seconds: float) -> float:
    """How many seconds pass before a state is saved again that took so many to save: `SAVE_EVERY`, or so many times as
    long as saving took, if that is more than one. The hidden states of a large model are gigabytes, and a block may
    take less than writing them."""
    return SAVE_EVERY * max(1.0, seconds)


def unfinished_path(output: Path) -> Path:
    """The folder in which the run that makes `output` keeps its state: `.NAME.unfinished` beside it."""
    return output.absolute().parent / f".{output.name}.unfinished"


@contextmanager
def state_beside(output: Path) -> Iterator[Path]:
    """Yield the folder for the state of the run that makes `output`; it is removed once the output is written. A link
    in its place is refused.

    A run that is refused leaves no state of its own, since the same command would be refused again. An interrupt says
    whether there is a state to go on from; one stays, too, where the disk refuses the output. Raises `OutputError`
    where another process is making the output.
    """
    path = unfinished_path(output)
    with locked(output):
        check_no_link(path)
        before = _written(path)
        try:
            yield path
        except KeyboardInterrupt as interrupt:
            if _written(path) is None:
                raise
            kept = f"{path} keeps what was done, and the same command goes on from there"
            raise KeyboardInterrupt(kept) from interrupt
        except OutputError:
            raise  # with room on the disk, the same command goes on
        except UserError:
            if before is None or _written(path) != before:  # else it is another command's
                _discard(path)
            raise
        except (OSError, MemoryError, WorkerLost):
            raise
        except Exception as error:
            memory = "alloc" in str(error)  # torch's words for one that is full
            if memory or not any(path in (state, state.parent) for state in _gone_on_from):
                raise
            raise OutputError(
                f"{path}: going on from what an interrupted run kept there failed ({shown(error)}); remove the folder "
                "and run again"
            ) from error
        finally:
            _gone_on_from.difference_update([state for state in _gone_on_from if path in (state, state.parent)])
        _discard(path)


_gone_on_from: set[Path] = set()
"""The folders from whose states runs of this process go on."""


class _File(Stored):
    part: Name
    sha256: Name


class _State(Stored):
    fingerprint: Name
    files: dict[Name, _File]
    parts: dict[Name, dict[str, Any]]


class State:
    """A run's state in the folder `path` (None keeps nothing).

    fingerprint -- of everything the result depends on, or what finds it, when it is first needed; the state of a run
                   with another one is removed
    layers      -- how many decoder blocks can be finished; None: any number
    parts       -- the values that were committed last, by part; empty for a run that begins
    seconds     -- what saving blocks took so far
    """

    def __init__(self, path: Path | None, fingerprint: str | Callable[[], str], layers: int | None = None) -> None:
        self.path, self.layers, self._found = path, layers, fingerprint
        self.parts: dict[str, Any] = {}
        self._files: dict[str, dict[str, str]] = {}  # name -> the part it is of, and its SHA-256
        self._unneeded: list[Path] = []
        self._saved, self._pause, self._timed = time.monotonic(), pause_after(0), False
        self.seconds = 0.0
        if self.path is not None and os.path.lexists(self.path):
            check_no_link(self.path)
            self._read(self.path)

    @property
    def fingerprint(self) -> str:
        """The hash of everything that the result depends on."""
        if callable(self._found):
            self._found = self._found()
        return self._found

    def keep(self, part: str, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors that count from the next `commit` on. Raises `OutputError` where the disk refuses them."""
        if self.path is not None:
            make_folder(self.path)
            file = self._file(name)
            with atomic_file(file, overwrite=True) as temporary:
                save_tensors({name: on_host(value) for name, value in tensors.items()}, temporary)
                digest = sha256_of_pieces(temporary)
            self._files[file.name] = {"part": part, "sha256": digest}

    def drop(self, name: str) -> None:
        """Do without tensors from the next `commit` on, which removes them."""
        if self.path is not None and (file := self._file(name)).name in self._files:
            del self._files[file.name]
            self._unneeded.append(file)

    def commit(self, part: str, **values: Any) -> None:
        """Set a part's values, in one step with what was kept and dropped before."""
        self.parts[part] = json.loads(json.dumps(values))  # as a run that goes on will find them
        if self.path is not None:
            make_folder(self.path)
            state = {"fingerprint": self.fingerprint, "files": self._files, "parts": self.parts}
            write_json(self.path / _STATE, {**state, "sha256": hash_of(state)})
            for file in self._unneeded:
                if file.name not in self._files:
                    remove(file)
            self._unneeded.clear()

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were kept, on the CPU; none where none were."""
        return self.load(name) if f"{name}.safetensors" in self._files else {}

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were kept, on the CPU."""
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = load_file(self._file(name))
        return tensors

    @property
    def stale(self) -> bool:
        """Whether the blocks that were committed last are so few that others are worth the time of saving them."""
        return time.monotonic() - self._saved >= self._pause

    def expect(self, nbytes: int) -> None:
        """Pause as long as bytes ask for that will be saved, where none were yet: the first state may be the most that
        a short run does beside its work."""
        if not self._timed and (seconds := nbytes / _WRITTEN) > 1.0:
            self._pause = max(self._pause, pause_after(seconds))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Within the context a block is saved; where it was committed, the next pause is as long as that took."""
        began, before = time.monotonic(), self.parts.get(BLOCKS)
        yield
        self.seconds += time.monotonic() - began
        if self.parts.get(BLOCKS) is not before:
            self._saved, self._timed = time.monotonic(), True
            self._pause = pause_after(self._saved - began)

    def _read(self, path: Path) -> None:
        """Take what is there and fits; remove the rest."""
        try:
            with open_regular(path / _STATE) as file:
                text = file.read().decode()
        except (FileNotFoundError, NotADirectoryError):
            return _discard(path)  # killed before it was first committed
        except (OSError, ValueError):
            text = ""
        try:
            state = json.loads(text)
            intact = state.pop("sha256") == hash_of(state)
            self._check(state)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            say(f"{path / _STATE}: damaged; everything that it kept is computed anew")
        if not intact or state["fingerprint"] != self.fingerprint:
            return _discard(path)
        self.parts, self._files = state["parts"], state["files"]
        damaged = {file["part"]: name for name, file in self._files.items() if not _intact(path / name, file)}
        for part, name in damaged.items():
            say(f"{path / name}: missing or damaged; what was kept with it is computed anew")
            self.parts.pop(part, None)
        self._files = {name: file for name, file in self._files.items() if file["part"] not in damaged}
        for entry in path.glob("*.safetensors"):
            if entry.name not in self._files:
                remove(entry)
        _gone_on_from.add(path)

    def _check(self, state: Any) -> None:
        """Raise ValueError or TypeError where a state says what no run of ours keeps."""
        validate(_State, state)
        if any(Path(name).name != name for name in state["files"]):
            raise ValueError("files elsewhere")
        done = state["parts"].get(BLOCKS, {}).get("done", 0)
        if type(done) is not int or done < 0 or (self.layers is not None and done > self.layers):
            raise ValueError("another number of blocks than there are")

    def _file(self, name: str) -> Path:
        assert self.path is not None
        return self.path / f"{name}.safetensors"


def _intact(path: Path, file: Mapping[str, str]) -> bool:
    try:
        return is_file(path) and sha256_of_pieces(path) == file["sha256"]
    except OSError:
        return False


def _written(path: Path) -> int | None:
    """When the state, or one within it, was committed last; None where there is none."""
    try:
        return max((state.lstat().st_mtime_ns for state in _states(path)), default=None)
    except OSError:
        return None


def _states(path: Path) -> tuple[Path, ...]:
    """The `state.json` of a folder, and of states within it: a run of several parts may give each a folder there."""
    folders = [path, *folders_in(path)] if is_folder(path) else []
    return tuple(folder / _STATE for folder in folders if os.path.lexists(folder / _STATE))


def _discard(path: Path) -> None:
    """Forget everything; without `state.json`, which goes first, nothing else counts."""
    for state in _states(path):
        remove(state)
    remove(path)
