"""What a killed run left, damaged at random: it is said, and computed anew; the result is an undisturbed run's."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import EVERY, NAMES, Place
from verbs import VERBS, Verb

pytestmark = pytest.mark.long
_SEEDS = range(200 if EVERY else 1)
_KILLED_AT = {  # share of the file operations after which there is a state of the kind that the name says
    "calibrate": 0.6,
    "thresholds": 0.6,
    "thresholds teal": 0.6,
    "thresholds global": 0.3,
    "prune": 0.3,
    "trace": 0.5,
    "pack": 0.2,
}
_NAMES = [name for name in NAMES if name in _KILLED_AT]


_OVERWRITING = replace(VERBS["run"], command=lambda *given: [*VERBS["run"].command(*given), "--overwrite"])
_WAYS = ("bit", "bytes", "cut", "emptied", "lost", "noise", "longer", "another", "digit")


def _damage(file: Path, draw: random.Random, others: list[Path], way: str) -> None:
    """Damage a file."""
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content)) if content else 0
    if way == "bit" and content:
        content[at] ^= 1 << draw.randrange(8)
    elif way == "bytes":
        content[at : at + draw.randint(1, 16)] = draw.randbytes(draw.randint(1, 16))
    elif way == "cut":
        del content[at:]
    elif way == "emptied":
        content.clear()
    elif way == "noise":
        content[:] = draw.randbytes(len(content))
    elif way == "longer":
        content += draw.randbytes(draw.randint(1, 100))
    elif way == "another":
        content[:] = draw.choice(others).read_bytes()
    elif way == "digit":  # still JSON where it was JSON
        digits = [n for n, byte in enumerate(content) if chr(byte).isdigit()]
        if digits:
            content[draw.choice(digits)] = ord(str(draw.randrange(10)))
    file.unlink()
    if way == "folder":
        file.mkdir()
    elif way != "lost":
        file.write_bytes(content)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@pytest.fixture(scope="session")
def states(place: Place) -> dict[str, Path]:
    """For each verb a folder in which it was killed on its way."""
    made = {}
    for name in _NAMES:
        verb, folder = VERBS[name], place.empty("killed")
        at = round(_KILLED_AT[name] * len(place.operations(verb, False)))
        assert place.forker.run(verb.command(place.inputs, folder, False), folder, at).status is None
        (state,) = folder.glob(".*.unfinished/state.json")
        assert len(list(state.parent.iterdir())) > 1
        made[name] = folder
    return made


def _check_damaged(place: Place, states: dict[str, Path], verb: Verb, seed: int) -> None:
    draw = random.Random(f"{verb.name} {seed}")
    folder = place.empty("damaged")
    shutil.copytree(states[verb.name], folder, dirs_exist_ok=True)
    (state,) = folder.glob(".*.unfinished")
    before = _json(state / "state.json")
    kept = ["state.json", *before["files"]]
    others = [file for other in states.values() for file in sorted(other.glob(".*.unfinished/*")) if file.is_file()]
    damaged = state / draw.choice(kept)
    content = damaged.read_bytes()
    way = draw.choice([*_WAYS, "folder"])
    _damage(damaged, draw, others, way)
    same = damaged.is_file() and damaged.read_bytes() == content
    if damaged.name == "state.json":
        same = _json(damaged) == before
    ended = place.check_rerun(verb, folder, f"{verb.name}, seed {seed}: {damaged.name}, {way}")
    said = ended.said.count("computed anew")
    # Without a list of what counts nothing does: so it is before the first block. That of another run is no damage.
    silent = same or (damaged.name == "state.json" and (way == "lost" or (way == "another" and not said)))
    assert said == (not silent), f"{verb.name}, seed {seed}: {damaged.name}, {way}: {ended.said}"
    place.end(folder)


@pytest.mark.parametrize("name", _NAMES)
def test_a_damaged_state_is_said_and_changes_no_result(place: Place, states: dict[str, Path], name: str) -> None:
    for seed in _SEEDS:
        _check_damaged(place, states, VERBS[name], seed)


def test_a_damaged_work_folder_is_mended_by_the_next_run(place: Place) -> None:
    verb = VERBS["run"]
    finished = place.undisturbed(verb)[0]
    for seed in _SEEDS:
        draw = random.Random(f"work {seed}")
        folder = place.empty("damaged")
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        files = sorted(path for path in (folder / "work").rglob("*") if path.is_file())
        damaged = draw.choice(files)
        way = draw.choice(_WAYS)
        _damage(damaged, draw, files, way)
        case = f"seed {seed}: {damaged.name}, {way}"
        if damaged == folder / "work" / "state.json":
            # Without it nobody knows whose files these are: they are replaced only where the user says so.
            ended = place.forker.run(verb.command(place.inputs, folder, False), folder)
            if ended.status == 2:
                assert "give another folder as --work, or --overwrite" in ended.said, f"{case}: {ended.said}"
                place.check_rerun(_OVERWRITING, folder, case)
                place.end(folder)
                continue
        place.check_rerun(verb, folder, case)
        place.end(folder)
