"""Killed at any file operation, or with a disk that fails there: the old output or the new one, whole, and a rerun ends
as if nothing had been. `make test-kill` tries every operation, `make test-all` some of them."""

import pytest
from places import EVERY, NAMES, Place, some
from verbs import VERBS, Verb, files_in, unit_of

pytestmark = pytest.mark.long  # tests/files checks the same of single writes
_EACH = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("old", [True, False], ids=["an old output", "no output"])
@_EACH
def test_a_kill_leaves_the_old_or_the_new_and_a_rerun_ends_the_same(place: Place, name: str, old: bool) -> None:
    verb = VERBS[name]
    operations = place.operations(verb, old)
    exchanged = [number for number, name in enumerate(operations, 2) if name == "exchange"]
    for at in some(operations, 1, exchanged):
        folder, case = place.begin(verb, old), f"{name} killed at file operation {at}"
        ended = place.forker.run(verb.command(place.inputs, folder, False), folder, at)
        assert ended.status is None, f"{case}: {ended.said}"
        place.check_old_or_new(verb, folder, old, case)
        rerun = place.check_rerun(verb, folder, case)
        assert "damaged" not in rerun.said, f"{case}: {rerun.said}"
        place.end(folder)


@pytest.mark.parametrize("name", ["calibrate", "run"] if EVERY else ["calibrate"])
def test_without_exchange_the_old_one_is_restored_by_the_next_run(place: Place, name: str) -> None:
    """A file system that exchanges nothing: between two renames the old folder stands under another name."""
    verb, settings = VERBS[name], {"exchange": False}
    unit = {"calibrate": "c", "run": "work/calibration"}[name]
    aside = {"calibrate": ".c.replaced/replaced", "run": "work/.calibration.replaced/replaced"}[name]
    old, new = (unit_of(place.undisturbed(verb, old=was)[1], unit) for was in (True, False))
    operations = place.operations(verb, True, **settings)
    asked = operations.index("exchange") + 1
    assert operations[asked : asked + 5] == ["os.rmdir", "os.mkdir", "open", "os.rename", "os.rename"]
    for at in some(operations, 1, range(asked, asked + 7)):
        folder, case = place.begin(verb, True), f"{name} killed at file operation {at}"
        ended = place.forker.run(verb.command(place.inputs, folder, False), folder, at, **settings)
        assert ended.status is None, f"{case}: {ended.said}"
        found = files_in(folder)
        there = unit_of(found, aside if at == asked + 5 else unit)
        assert {path.replace(aside, unit): data for path, data in there.items()} in (old, new), case
        place.check_rerun(verb, folder, case, **settings)
        place.end(folder)


@pytest.mark.parametrize("how", ["EIO", "ENOSPC"])
@_EACH
def test_a_disk_that_fails_is_one_line_and_leaves_the_old_or_the_new(place: Place, name: str, how: str) -> None:
    verb = VERBS[name]
    for at in some(place.operations(verb, True), 1):
        _check_failing(place, verb, at, how)


def _check_failing(place: Place, verb: Verb, at: int, how: str) -> None:
    folder, case = place.begin(verb, True), f"{verb.name}, {how} at file operation {at}"
    ended = place.forker.run(verb.command(place.inputs, folder, False), folder, at, how)
    assert "Traceback" not in ended.said, f"{case}: {ended.said}"
    assert (ended.status, len(ended.errors)) in ((0, 0), (1, 1), (2, 1)), f"{case}: {ended.said}"
    place.check_old_or_new(verb, folder, True, case)
    place.check_rerun(verb, folder, case)
    place.end(folder)
