"""What a stranger has put beside an output under the names of our side files leads nowhere and is believed nothing."""

import json
import os
from pathlib import Path

import pytest
import torch

from sparsepack.errors import OutputError
from sparsepack.files.atomic import _start, atomic_file, atomic_folder, check_output, write_json
from sparsepack.files.lock import locked, remove_lock
from sparsepack.files.side_files import create_file, make_folder, open_file, open_regular, process_number
from sparsepack.recipe.run import run_recipe
from sparsepack.recipe.state import WorkFolder
from sparsepack.workers.state import State, state_beside


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder elsewhere with a file that must stay as it is."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "state.json").write_text("precious")
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The folder of a stranger."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


def _untouched(victim: Path) -> bool:
    return [(file.name, file.read_text()) for file in victim.iterdir()] == [("state.json", "precious")]


def test_a_lock_that_is_a_link_is_refused_by_its_path(theirs: Path, victim: Path) -> None:
    lock = theirs / ".out.lock"
    for target in (victim / "state.json", victim / "none", victim, Path("/dev/null")):
        lock.symlink_to(target)
        refused = rf"^{lock}: a link, which is not followed; remove it"
        with pytest.raises(OutputError, match=refused), locked(theirs / "out"):
            pytest.fail("the body must not run")
        remove_lock(theirs / "out")
        assert lock.is_symlink()
        lock.unlink()
    assert _untouched(victim)


@pytest.mark.parametrize("kind", ["hard link", "pipe", "folder"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(kind: str, theirs: Path, victim: Path) -> None:
    lock = theirs / ".out.lock"
    if kind == "hard link":
        os.link(victim / "state.json", lock)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(OutputError, match=rf"^{lock}: .*; remove it"), locked(theirs / "out"):
        pytest.fail("the body must not run")
    assert _untouched(victim)


def test_what_a_lock_says_of_its_holder_may_be_anything(theirs: Path) -> None:
    with locked(theirs / "out"):
        for said in (b"[" * 100000, b'{"process": 1e999, "since": 0}', b'{"process": 1, "since": 1e300}', b"\xff"):
            (theirs / ".out.lock").write_bytes(said)
            with pytest.raises(OutputError, match="another process is working on it"), locked(theirs / "out"):
                pass


def test_a_link_under_the_name_of_a_temporary_file_is_not_written_through(theirs: Path, victim: Path) -> None:
    out = theirs / "out"
    temporary = theirs / f"{_start(out)}{os.getpid()}"
    temporary.symlink_to(victim / "state.json")
    with atomic_file(out) as path:
        assert path == temporary
        path.write_text("whole")
    assert out.read_text() == "whole"
    (theirs / f"{_start(theirs / 'folder')}{os.getpid()}").symlink_to(victim)
    with atomic_folder(theirs / "folder") as path:
        (path / "of").write_text("whole")
    assert sorted(entry.name for entry in theirs.iterdir()) == ["folder", "out"]
    assert _untouched(victim)


def test_a_file_is_created_only_where_nothing_is(theirs: Path, victim: Path) -> None:
    (theirs / "link").symlink_to(victim / "none")
    (theirs / "file").write_text("x")
    for name in ("link", "file"):
        with pytest.raises(OutputError, match=f"{name}: stands where a temporary file is to be made"):
            create_file(theirs / name)
    assert _untouched(victim)


def test_numbers_of_processes_that_none_can_have_are_no_leftovers_of_ours(theirs: Path) -> None:
    out = theirs / "out"
    forged = ["9" * 30, "0", "-1", "4294967296", "٣", "1e5", "9" * 10, " 7"]
    for number in forged:
        (theirs / f"{_start(out)}{number}").write_text("x")
        assert process_number(number) is None
    write_json(out, {})
    assert {entry.name for entry in theirs.iterdir()} == {"out", *(f"{_start(out)}{number}" for number in forged)}


def test_a_link_that_stands_aside_as_a_replaced_folder_is_not_put_back(theirs: Path, victim: Path) -> None:
    (theirs / ".out.replaced").symlink_to(victim)
    check_output(theirs / "out", overwrite=True, folder=True)
    assert not os.path.lexists(theirs / "out")
    with atomic_folder(theirs / "out", overwrite=True) as folder:
        (folder / "of").write_text("whole")
    assert not (theirs / "out").is_symlink()
    assert _untouched(victim)


@pytest.mark.parametrize("target", ["victim", "none"])
def test_a_state_that_is_a_link_is_refused_by_its_path(target: str, theirs: Path, victim: Path) -> None:
    state = theirs / ".out.unfinished"
    state.symlink_to(victim.parent / target)
    with pytest.raises(OutputError, match=rf"^{state}: a link, which is not followed"), state_beside(theirs / "out"):
        pytest.fail("the body must not run")
    with pytest.raises(OutputError, match=rf"^{state}: a link"):
        State(state, "fingerprint")
    assert _untouched(victim)


def test_links_within_a_state_lead_nowhere(theirs: Path, victim: Path) -> None:
    state = theirs / ".out.unfinished"
    state.mkdir()
    (state / "link").symlink_to(victim)
    (state / "state.json").symlink_to(victim / "state.json")
    (state / "a.safetensors").symlink_to(victim / "state.json")
    with state_beside(theirs / "out") as path:
        with pytest.raises(OutputError, match="link: a link, which is not followed"):
            make_folder(path / "link")
        made = State(path, "fingerprint")
        assert made.parts == {}
        made.keep("part", "a", {"x": torch.zeros(1)})
        made.commit("part", step=1)
    assert not os.path.lexists(state)
    assert _untouched(victim)


def test_a_state_whose_files_are_links_or_pipes_is_computed_anew(
    theirs: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State(theirs / "s", "fingerprint")
    for name in ("a", "b"):
        state.keep(name, name, {"x": torch.zeros(1)})
        state.commit(name, step=1)
    (theirs / "s" / "a.safetensors").rename(victim / "kept")
    (theirs / "s" / "a.safetensors").symlink_to(victim / "kept")
    (theirs / "s" / "b.safetensors").unlink()
    os.mkfifo(theirs / "s" / "b.safetensors")
    assert State(theirs / "s", "fingerprint").parts == {}
    assert capsys.readouterr().err.count("missing or damaged") == 2
    assert (victim / "kept").is_file()


def test_what_is_no_ordinary_file_is_not_read(theirs: Path, victim: Path) -> None:
    os.mkfifo(theirs / "pipe")
    (theirs / "link").symlink_to(victim / "state.json")
    for name in ("pipe", "link", "none"):
        with pytest.raises(OSError, match=name), open_regular(theirs / name):
            pytest.fail("the body must not run")


def test_a_file_is_opened_beside_an_output_without_truncation(theirs: Path) -> None:
    (theirs / "lock").write_text("kept")
    os.close(open_file(theirs / "lock"))
    assert (theirs / "lock").read_text() == "kept"


def test_a_link_in_the_place_of_a_recipes_output_is_refused_even_to_overwrite(theirs: Path, victim: Path) -> None:
    (theirs / "made").symlink_to(victim)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"made: a link, which is not followed"):
            WorkFolder(theirs, ["made/model.gguf"], {"name": "r"}, overwrite)
    (theirs / "state.json").symlink_to(victim / "state.json")
    with pytest.raises(OutputError, match=r"state\.json: a link"):
        WorkFolder(theirs, [], {"name": "r"})
    assert _untouched(victim)


def test_the_work_folder_that_nobody_named_is_no_link(
    theirs: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(theirs)
    recipe = {"schema": 1, "name": "theirs", "model": "shipped:tiny"}
    (theirs / "r.yaml").write_text(json.dumps(recipe))
    (theirs / "work").symlink_to(victim)
    with pytest.raises(OutputError, match=r"^work: a link, which is not followed"):
        run_recipe(Path("r.yaml"))
    assert _untouched(victim)
