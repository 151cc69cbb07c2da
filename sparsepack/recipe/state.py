"""The work folder of a recipe: what each stage made, from which settings, so that only what changed runs again.

`state.json` holds, per finished stage, its fingerprint (a hash of its settings and of what it was made from) and for
every output its size, time of change and SHA-256, and the SHA-256 of all this. It is written after each stage, whole or
not at all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsepack.errors import OutputError
from sparsepack.files.atomic import write_json
from sparsepack.files.hashing import fingerprint, sha256_file
from sparsepack.files.side_files import check_no_link, open_regular

SCHEMA = 1
STATE = "state.json"


@dataclass(frozen=True)
class Finished:
    """A stage that is done: its fingerprint, how long it took, and its outputs by path within the work folder."""

    fingerprint: str
    seconds: float
    outputs: Mapping[str, Mapping[str, Any]]


class WorkFolder:
    """A work folder and what is known to be finished in it.

    outputs   -- names of what the recipe will leave in it
    owner     -- who the recipe is: its name, its file's name, its model as written. Not its settings: these may change,
                 and what they change runs again. No whole path: the folder and the recipe may be moved

    Raises `OutputError` for a link in the place of an output, which would lead elsewhere; and, unless told to
    `overwrite`, where the folder belongs to another recipe, or holds files by the
    names of our outputs that no run of a recipe made.
    """

    def __init__(self, path: Path, outputs: Sequence[str], owner: Mapping[str, str], overwrite: bool = False) -> None:
        self.path = path
        self.notes: list[str] = []
        self._owner, self._found_owner = dict(owner), dict(owner)
        for name in (STATE, *outputs):
            for within in (Path(name), *Path(name).parents[:-1]):
                check_no_link(path / within)
        self._finished = self._read()
        if not overwrite:
            self._refuse_what_is_not_ours(outputs)

    def _refuse_what_is_not_ours(self, outputs: Sequence[str]) -> None:
        foreign = [name for name in outputs if (self.path / name).exists()]
        if foreign and not (self.path / STATE).exists():
            raise OutputError(
                f"{self.path / foreign[0]}: no recipe made this file; give another folder as --work, or --overwrite"
            )
        other = [key for key, value in self._owner.items() if self._found_owner.get(key) != value]
        if other:
            found = ", ".join(f"{key} {self._found_owner.get(key)}, not {self._owner[key]}" for key in other)
            raise OutputError(
                f"{self.path}: holds the outputs of another recipe ({found}); give another folder as --work, or "
                "--overwrite"
            )

    def create(self) -> None:
        """Make the folder, and mark it as ours before anything is in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path}: no folder can be made there ({error.strerror})") from error
        self._write()

    def fingerprint(self, settings: Any, needs: Sequence[str]) -> str:
        """The fingerprint of a stage with these settings, made from the present outputs of the stages `needs`."""
        made_from = {
            name: [self._finished[name].fingerprint, {n: o["sha256"] for n, o in self._finished[name].outputs.items()}]
            for name in needs
        }
        return fingerprint({"settings": settings, "needs": made_from})

    def current(self, stage: str, fingerprint: str) -> bool:
        """Whether a stage with this fingerprint is finished and its outputs are what it left."""
        known = self._finished.get(stage)
        return known is not None and known.fingerprint == fingerprint and all(map(self._intact, known.outputs.items()))

    def finished(self, stage: str) -> Finished:
        """What a finished stage left; KeyError where it is not."""
        return self._finished[stage]

    def finish(self, stage: str, fingerprint: str, seconds: float, outputs: Sequence[str]) -> None:
        """Record a stage that has just finished."""
        self._finished[stage] = Finished(fingerprint, seconds, {name: self._stamp(name) for name in outputs})
        self._write()

    def _intact(self, output: tuple[str, Mapping[str, Any]]) -> bool:
        """Same size and time of change, or (copied, restored from a cache) the same bytes."""
        name, stamp = output
        path = self.path / name
        if not path.exists() or (found := _measured(path))["bytes"] != stamp["bytes"]:
            return False
        return bool(found["mtime_ns"] == stamp["mtime_ns"] or _sha256(path) == stamp["sha256"])

    def _stamp(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return {**_measured(path), "sha256": _sha256(path)}

    def _read(self) -> dict[str, Finished]:
        path = self.path / STATE
        if not path.exists():
            return {}
        try:
            with open_regular(path) as file:
                value = json.loads(file.read().decode())
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']}, expected {SCHEMA}")
            if value["sha256"] != fingerprint([value["recipe"], value["stages"]]):
                raise ValueError("changed since it was written")
            finished = {name: _finished(entry) for name, entry in value["stages"].items()}
            self._found_owner = dict(value["recipe"])
            return finished
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.notes.append(f"{path}: not understood ({error!r}); every stage runs again")
            return {}

    def _write(self) -> None:
        stages = {name: vars(stage) for name, stage in self._finished.items()}
        written = datetime.now(UTC).isoformat(timespec="seconds")
        said = {"recipe": self._owner, "sha256": fingerprint([self._owner, stages])}
        head = {"schema": SCHEMA, "kind": "recipe state", "written": written, **said}
        write_json(self.path / STATE, {**head, "stages": stages})


def _files(output: Path) -> list[Path]:
    """An output that is a file, or the files of one that is a folder."""
    return sorted(path for path in output.rglob("*") if path.is_file()) if output.is_dir() else [output]


def _measured(output: Path) -> dict[str, int]:
    found = [path.stat() for path in _files(output)]
    return {
        "bytes": sum(status.st_size for status in found),
        "mtime_ns": max((status.st_mtime_ns for status in found), default=0),
    }


def _sha256(output: Path) -> str:
    if not output.is_dir():
        return sha256_file(output)
    return fingerprint({str(path.relative_to(output)): sha256_file(path) for path in _files(output)})


def _finished(entry: Mapping[str, Any]) -> Finished:
    stamps = {name: {k: stamp[k] for k in ("bytes", "mtime_ns", "sha256")} for name, stamp in entry["outputs"].items()}
    return Finished(str(entry["fingerprint"]), float(entry["seconds"]), stamps)
