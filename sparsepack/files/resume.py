"""The state of a long run that has not finished: a folder beside its output, from which a killed run goes on.

Tensors are kept in files of their own; `state.json`, always written after them, says which of them count. Until it is
there, what was committed before is the state.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import OutputError
from sparsepack.files.atomic import atomic_file, write_json
from sparsepack.files.tensors import save_tensors

_STATE = "state.json"


def unfinished_path(output: Path) -> Path:
    """Where the run that makes `output` keeps its state: `.NAME.unfinished` beside it."""
    return output.absolute().parent / f".{output.name}.unfinished"


@contextmanager
def state_beside(output: Path) -> Iterator[Path]:
    """Yield the folder for the state of the run that makes `output`; it is removed once the output is written.

    An interrupt says whether there is a state to go on from.
    """
    path = unfinished_path(output)
    try:
        yield path
    except KeyboardInterrupt as interrupt:
        if not path.is_dir():
            raise
        raise KeyboardInterrupt(f"{path} keeps what was done, and the same command goes on from there") from interrupt
    shutil.rmtree(path, ignore_errors=True)


class ResumeState:
    """A run's state in the folder `path` (None keeps nothing).

    fingerprint -- of everything the result depends on; the state of a run with another one is removed
    state       -- the JSON-able values that were committed last; empty for a run that begins
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.state: dict[str, Any] = {}
        if path is not None and path.exists():
            file = path / _STATE
            state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if state.pop("fingerprint", None) == fingerprint:
                self.state = state
            else:
                self.discard()

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors that count from the next `commit` on. Raises `OutputError` where the disk refuses them."""
        if self.path is not None:
            _make(self.path)
            with atomic_file(self._file(self.path, name), overwrite=True) as temporary:
                save_tensors(tensors, temporary)

    def commit(self, **values: Any) -> None:
        """Change these values of the state, in one step with the tensors kept before."""
        self.state |= values
        if self.path is not None:
            _make(self.path)
            write_json(self.path / _STATE, {"fingerprint": self.fingerprint, **self.state})

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors that were kept, on the CPU."""
        from safetensors.torch import load_file

        assert self.path is not None
        tensors: dict[str, torch.Tensor] = load_file(self._file(self.path, name))
        return tensors

    def drop(self, name: str) -> None:
        """Remove tensors that the committed state no longer needs."""
        if self.path is not None:
            self._file(self.path, name).unlink(missing_ok=True)

    def blocks(self) -> list[dict[str, torch.Tensor]]:
        """What was found at each finished decoder block, from the first on."""
        return [self.load(f"block-{layer:05}") for layer in range(self.state.get("blocks", 0))]

    def hidden(self) -> torch.Tensor | None:
        """The hidden states after the last finished block, if there is one."""
        done = self.state.get("blocks", 0)
        return self.load(f"hidden-{done:05}")["hidden"] if done else None

    def save_block(
        self, layer: int, found: Mapping[str, torch.Tensor], hidden: torch.Tensor | None = None, **values: Any
    ) -> None:
        """Commit a finished block - tensors found there, values of the state - and the hidden states after it where the
        run needs them."""
        done = layer + 1
        if found:
            self.keep(f"block-{layer:05}", found)
        if hidden is not None:
            self.keep(f"hidden-{done:05}", {"hidden": hidden})
        self.commit(blocks=done, **values)
        self.drop(f"hidden-{layer:05}")

    def discard(self) -> None:
        """Forget everything."""
        self.state = {}
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def _file(folder: Path, name: str) -> Path:
        return folder / f"{name}.safetensors"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
