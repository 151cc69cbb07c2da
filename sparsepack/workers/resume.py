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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
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
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.workers import ALONE, Workers

_STATE = "state.json"
_BLOCKS = "blocks"

_BEHIND = 4
"""What so many blocks have found is kept behind the run: of some it is more than can be written while one is run."""

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
def state_beside(output: Path, workers: Workers = ALONE) -> Iterator[Path]:
    """Yield the folder for the state of the run that makes `output`; it is removed once the output is written. Of
    several workers the first one alone keeps it. A link in its place is refused.

    A run that is refused leaves no state of its own, since the same command would be refused again. An interrupt says
    whether there is a state to go on from; one stays, too, where the disk refuses the output. Raises `OutputError`
    where another process is making the output.
    """
    path = unfinished_path(output)
    if not workers.first:
        yield path
        return
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


def _nothing() -> None:
    """What there is to do before most blocks are committed."""


class ResumeState:
    """A run's state in the folder `path` (None keeps nothing). Of several workers the first one keeps it and tells the
    others its values; hidden states are those of all windows, so another number of workers may go on.

    fingerprint -- of everything the result depends on, or what finds it, when it is first needed; the state of a run
                   with another one is removed
    most        -- how many decoder blocks can be finished; None: any number
    parts       -- the values that were committed last, by part; empty for a run that begins
    workers     -- who keep it together
    first       -- called by all workers before a block is committed first
    seconds     -- what saving blocks took so far
    """

    def __init__(
        self,
        path: Path | None,
        fingerprint: str | Callable[[], str],
        most: int | None = None,
        workers: Workers = ALONE,
        first: Callable[[], object] = _nothing,
    ) -> None:
        self.path, self._found, self._most = path if workers.first else None, fingerprint, most
        self.workers, self._first = workers, first
        self.parts: dict[str, Any] = {}
        self._files: dict[str, dict[str, str]] = {}  # name -> the part it is of, and its SHA-256
        self._unneeded: list[Path] = []
        self._after: dict[str, tuple[Mapping[str, torch.Tensor], Dealt | None]] = {}  # the block at hand, by name
        self._saved, self._pause, self._timed = time.monotonic(), pause_after(0), False
        self.seconds = 0.0
        self._behind: deque[Future[None]] = deque()
        if self.path is not None and os.path.lexists(self.path):
            check_no_link(self.path)
            self._read(self.path)
        self.parts = workers.told_by_first(self.parts)

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

    def keep_with_blocks(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors that count from the next `save_block` on; should they be lost, all blocks are made anew."""
        self.keep(_BLOCKS, name, tensors)

    def begin_blocks(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Commit tensors with which every decoder block is made, before the first one is."""
        self.keep_with_blocks(name, tensors)
        self.commit(_BLOCKS, done=0)

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were kept, on the CPU; none where none were."""
        return self.load(name) if f"{name}.safetensors" in self._files else {}

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were kept, on the CPU."""
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = load_file(self._file(name))
        return tensors

    @property
    def done(self) -> int:
        """How many decoder blocks are finished."""
        return int(self.parts.get(_BLOCKS, {}).get("done", 0))

    def value(self, name: str, otherwise: Any = None) -> Any:
        """A value that was committed with the last finished block."""
        return self.parts.get(_BLOCKS, {}).get(name, otherwise)

    def blocks(self) -> list[dict[str, torch.Tensor]]:
        """What was found at each finished decoder block, from the first on."""
        return [self.block(layer) for layer in range(self.done)]

    def block(self, layer: int) -> dict[str, torch.Tensor]:
        """What was found at one finished decoder block; nothing where nothing was."""
        return self.kept(f"block-{layer:05}")

    def hidden(self, name: str = "hidden", dealt: Dealt | None = None) -> torch.Tensor | None:
        """The hidden states after the last finished block, if there is one; this worker's where windows are `dealt`,
        else all of them."""
        whole = self.load(f"{name}-{self.done:05}")["hidden"] if self.done and self.workers.first else None
        return self.workers.from_first(whole) if dealt is None else dealt.scattered(whole)

    def kept_after(self, name: str) -> dict[str, torch.Tensor]:
        """What `keep_after` has kept after the last finished block."""
        return self.kept(f"{name}-{self.done:05}")

    def keep_hidden(self, hidden: torch.Tensor, name: str = "hidden", dealt: Dealt | None = None) -> None:
        """Keep the hidden states after the block that is being finished, as `keep_after` does."""
        self.keep_after(name, {"hidden": hidden}, dealt)

    def keep_after(self, name: str, tensors: Mapping[str, torch.Tensor], dealt: Dealt | None = None) -> None:
        """Keep tensors that belong to the end of the block that is being finished, if there are any, in place of those
        kept under this name before, from the next `save_block` on that commits.

        dealt -- how their rows are shared among workers; None: the first one has all of them
        """
        self._after[name] = tensors, dealt
        if not self._timed:  # the first state may be the most that a short run does beside its work
            shares = 1 if dealt is None else self.workers.count
            seconds = shares * sum(value.nbytes for value in tensors.values()) / _WRITTEN
            if seconds > 1.0:
                self._pause = max(self._pause, pause_after(seconds))

    def keep_with_block(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep tensors of a block that is being worked on, under a name of their own, from its `save_block` on."""
        self.keep(_BLOCKS, name, tensors)

    def due(self, layer: int) -> bool:
        """Whether `save_block` of a block will commit: now and then, and the last one."""
        due = layer + 1 == self._most or self._stale
        return bool(self.workers.told_by_first(due))

    @property
    def stale(self) -> bool:
        """Whether the state that was committed last is so old that another one is worth its time, as the first worker
        says."""
        return bool(self.workers.told_by_first(self._stale))

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._saved >= self._pause

    def save_block(
        self,
        layer: int,
        found: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        hidden: torch.Tensor | None = None,
        dealt: Dealt | None = None,
        behind: Executor | None = None,
        **values: Any,
    ) -> None:
        """Keep a finished block - tensors found there, values - and the hidden states after it where the run needs
        them. A run that was killed goes on after the last one that was committed (`due`).

        found  -- the tensors, or what gives them
        behind -- a thread that keeps them while the run goes on, `_BEHIND` blocks at most. None: they are kept now
        """
        began = time.monotonic()
        if behind is not None:
            self._wait_behind(_BEHIND - 1)
            self._behind.append(behind.submit(self._keep_found, layer, found))
        else:
            self._keep_found(layer, found)
        if hidden is not None:
            self.keep_hidden(hidden, dealt=dealt)
        if self.due(layer):
            self._first()
            self._first = _nothing
            self.wait_behind()
            for name, (tensors, shared) in self._after.items():
                whole = {key: value if shared is None else shared.gathered(value) for key, value in tensors.items()}
                if whole and self.path is not None:
                    self.keep(_BLOCKS, f"{name}-{layer + 1:05}", {k: v for k, v in whole.items() if v is not None})
                self.drop(f"{name}-{self.done:05}")
            self.commit(_BLOCKS, done=layer + 1, **values)
            self._saved = time.monotonic()
            self._pause, self._timed = pause_after(self._saved - began), True
        self._after.clear()
        self.seconds += time.monotonic() - began

    def _keep_found(
        self, layer: int, found: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        tensors = found() if callable(found) else found
        if tensors:
            self.keep(_BLOCKS, f"block-{layer:05}", tensors)

    def wait_behind(self) -> None:
        """Wait until all blocks that were saved are kept. Raises what keeping one raised."""
        self._wait_behind(0)

    def _wait_behind(self, left: int) -> None:
        while len(self._behind) > left:
            self._behind.popleft().result()

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
        done = state["parts"].get(_BLOCKS, {}).get("done", 0)
        if type(done) is not int or done < 0 or (self._most is not None and done > self._most):
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
