"""Where a verb is disturbed, and what it leaves when nothing disturbs it."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import Ended, Forker
from verbs import VERBS, Files, Verb, files_in, unit_of

EVERY = os.environ.get("SPARSEPACK_TEST_KILL") == "every"


NAMES = [name for name in VERBS if EVERY or name not in ("thresholds teal", "run pruned")]
"""The verbs that are tried: the short form leaves the slowest out."""


def some(operations: Sequence[str], wanted: int, also: Sequence[int] = ()) -> list[int]:
    """The numbers of so many operations, evenly spaced, and those in `also`; of all of them in the long form."""
    count = len(operations)
    if EVERY or count <= wanted:
        return list(range(1, count + 1))
    return sorted({1 + int((n + 0.5) * count / wanted) for n in range(wanted)} | set(also))


@dataclass
class Place:
    """Where a verb is run: folders side by side, a new one for each case."""

    forker: Forker
    inputs: Path
    folder: Path
    _known: dict[tuple[str, bool], tuple[Path, Files, Ended]] = field(default_factory=dict)
    _operations: dict[Any, list[str]] = field(default_factory=dict)
    _cases: int = 0

    def undisturbed(self, verb: Verb, old: bool = False) -> tuple[Path, Files, Ended]:
        """The folder in which the verb has run, what it left there, and how it ended."""
        key = (verb.name, old)
        if key not in self._known:
            folder = self.empty(f"{verb.name}-{'old' if old else 'new'}".replace(" ", "-"))
            ended = self.forker.run(verb.command(self.inputs, folder, old), folder)
            assert ended.status == 0, ended.said
            self._known[key] = folder, files_in(folder), ended
        return self._known[key]

    def operations(self, verb: Verb, old: bool, **settings: bool) -> list[str]:
        """The file operations that the verb comes to where an old output is there or not."""
        if not old and not settings:
            return self.undisturbed(verb)[2].operations
        key = (verb.name, old, *settings.items())
        if key not in self._operations:
            folder = self.begin(verb, old)
            self._operations[key] = self.check_rerun(verb, folder, f"{verb.name}, undisturbed", **settings).operations
            self.end(folder)
        return self._operations[key]

    def begin(self, verb: Verb, old: bool) -> Path:
        """A new folder for a case, with the old output or without."""
        folder = self.empty("case")
        if old:
            shutil.rmtree(folder)
            shutil.copytree(self.undisturbed(verb, old=True)[0], folder)
        return folder

    def end(self, folder: Path) -> None:
        """Remove the folder of a case that went well."""
        shutil.rmtree(folder)

    def empty(self, name: str) -> Path:
        """A new folder."""
        self._cases += 1
        folder = self.folder / f"{self._cases}-{name}"
        folder.mkdir()
        return folder

    def check_old_or_new(self, verb: Verb, folder: Path, old: bool, case: str) -> None:
        """Each unit is the old one or the new one, or, where there was none, none."""
        found, new = files_in(folder), self.undisturbed(verb)[1]
        before = self.undisturbed(verb, old=True)[1] if old else {}
        for unit in verb.units:
            there = unit_of(found, unit)
            assert there in (unit_of(before, unit), unit_of(new, unit)), f"{case}: {unit} is neither old nor new"

    def check_rerun(self, verb: Verb, folder: Path, case: str, **settings: bool) -> Ended:
        """The same command again leaves what an undisturbed run leaves, and nothing else."""
        ended = self.forker.run(verb.command(self.inputs, folder, False), folder, **settings)
        assert ended.status == 0, f"{case}: {ended.said}"
        found, new = files_in(folder), self.undisturbed(verb)[1]
        assert found.keys() == new.keys(), f"{case}: {sorted(found.keys() ^ new.keys())} in one alone"
        differ = [name for name in new if found[name] != new[name]]
        assert not differ, f"{case}: {differ} differ"
        return ended
