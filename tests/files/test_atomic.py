"""Outputs appear whole or not at all."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sparsepack.errors import OutputError
from sparsepack.files import atomic
from sparsepack.files.atomic import atomic_file, atomic_folder, check_output, remove, write_json
from sparsepack.files.tensors import save_tensors


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what a full disk does, from the operating system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fail_in(output, write, failure) -> None:
    with output as temporary:
        write(temporary)
        raise failure


def test_a_file_appears_under_its_name_when_it_is_finished(tmp_path):
    path = tmp_path / "out.bin"
    with atomic_file(path) as temporary:
        temporary.write_bytes(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.bin"]


@pytest.mark.parametrize(
    "failure", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__
)
def test_an_interrupted_file_leaves_nothing_and_keeps_the_old_one(tmp_path, failure):
    new, old = tmp_path / "new.bin", tmp_path / "old.bin"
    old.write_bytes(b"before")
    for path, overwrite in ((new, False), (old, True)):
        with pytest.raises(type(failure)):
            _fail_in(atomic_file(path, overwrite), lambda temporary: temporary.write_bytes(b"half"), failure)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.bin"]
    assert old.read_bytes() == b"before"


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_interrupted_folder_leaves_nothing_and_keeps_the_old_one(tmp_path, failure):
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    (old / "before").write_text("kept")
    for path, overwrite in ((new, False), (old, True)):
        with pytest.raises(type(failure)):
            _fail_in(atomic_folder(path, overwrite), lambda temporary: (temporary / "half").write_text("half"), failure)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert [entry.name for entry in old.iterdir()] == ["before"]


def test_a_folder_interrupted_between_its_two_renames_keeps_the_old_one(tmp_path, monkeypatch):
    old = _without_exchange(tmp_path, monkeypatch)
    rename, calls = Path.rename, []

    def second_is_interrupted(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_is_interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(old, overwrite=True) as temporary:
        (temporary / "after").write_text("new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert [entry.name for entry in old.iterdir()] == ["before"]


def test_on_windows_what_is_synced_may_be_written_and_users_have_no_numbers(tmp_path, monkeypatch):
    old = _without_exchange(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "geteuid")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE))
    with atomic_folder(old, overwrite=True) as temporary:
        (temporary / "after").write_text("new")
    assert [entry.name for entry in old.iterdir()] == ["after"]
    assert synced == [os.O_RDWR]


def _without_exchange(tmp_path, monkeypatch) -> Path:
    """A folder to replace, on a file system that exchanges nothing."""
    monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    old = tmp_path / "old"
    old.mkdir()
    (old / "before").write_text("kept")
    return old


def test_a_folder_whose_run_was_killed_between_two_renames_is_put_back(tmp_path, monkeypatch):
    old = _without_exchange(tmp_path, monkeypatch)
    with atomic_folder(old, overwrite=True) as temporary:
        (temporary / "after").write_text("new")
    assert [entry.name for entry in old.iterdir()] == ["after"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    (tmp_path / ".old.replaced").mkdir()
    (tmp_path / ".old.replaced" / "sparsepack-replaces").touch()
    old.rename(tmp_path / ".old.replaced" / "replaced")
    check_output(old, overwrite=True, folder=True)
    assert [entry.name for entry in old.iterdir()] == ["after"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_what_was_left_aside_by_a_killed_run_is_cleared(tmp_path):
    for name in ("out", ".out.replaced/replaced"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "of").write_text(name)
    (tmp_path / ".out.replaced" / "sparsepack-replaces").touch()
    check_output(tmp_path / "out", overwrite=True, folder=True)
    assert (tmp_path / "out" / "of").read_text() == "out"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_the_users_own_that_has_the_name_of_one_aside_stays(tmp_path, monkeypatch):
    old = _without_exchange(tmp_path, monkeypatch)
    (tmp_path / ".old.replaced" / "replaced").mkdir(parents=True)
    (tmp_path / ".old.replaced" / "replaced" / "thesis").write_text("mine")
    with pytest.raises(OutputError, match=r"old\.replaced: in the way of what old holds now"), atomic_folder(old, True):
        pass
    check_output(tmp_path / "new", overwrite=False, folder=True)
    old.rename(tmp_path / "elsewhere")
    check_output(old, overwrite=False, folder=True)
    assert (tmp_path / ".old.replaced" / "replaced" / "thesis").read_text() == "mine"


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="only there")
def test_there_is_a_folder_under_the_name_at_every_moment(tmp_path, monkeypatch):
    """Neither rename nor remove ever touches the name."""
    path, renamed = tmp_path / "out", []
    with atomic_folder(path):
        pass
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, lambda self, target: renamed.append(self))
    with atomic_folder(path, overwrite=True) as temporary:
        (temporary / "after").write_text("new")
    assert [entry.name for entry in path.iterdir()] == ["after"]
    assert not renamed


def test_overwriting_a_folder_leaves_nothing_of_the_old_one(tmp_path):
    path = tmp_path / "out"
    for name in ("first", "second"):
        with atomic_folder(path, overwrite=True) as temporary:
            (temporary / name).write_text(name)
    assert [entry.name for entry in path.iterdir()] == ["second"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_overwriting_through_a_link_replaces_the_folder_it_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link", overwrite=True) as temporary:
        (temporary / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "new").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "real"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    path = tmp_path / "out.bin"
    with pytest.raises(OutputError, match="disk is full") as caught, disk_of(1000), atomic_file(path) as temporary:
        temporary.write_bytes(b"x" * 5000)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_under_safetensors_is_one_line_and_leaves_nothing(tmp_path):
    """The library reports it as an error of its own, in words."""
    path = tmp_path / "out"
    with pytest.raises(OutputError, match="disk is full"), disk_of(1000), atomic_folder(path) as temporary:
        save_tensors({"a": torch.zeros(1000)}, temporary / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_what_the_disk_refuses_is_an_output_error(tmp_path, number):
    with pytest.raises(OutputError, match=str(tmp_path / "out")), atomic_file(tmp_path / "out"):
        raise OSError(number, "refused")


def test_other_failures_of_the_system_pass_through(tmp_path):
    with pytest.raises(OSError, match="cable"), atomic_file(tmp_path / "out"):
        raise OSError(errno.ECONNRESET, "cable")


def test_an_output_that_exists_or_has_no_folder_is_refused_before_any_work(tmp_path):
    there = tmp_path / "there"
    there.write_text("x")
    with pytest.raises(OutputError, match=r"exists already.*--overwrite"):
        check_output(there, overwrite=False)
    check_output(there, overwrite=True)
    with pytest.raises(OutputError, match="does not exist"):
        check_output(tmp_path / "no" / "out", overwrite=True)
    with pytest.raises(OutputError, match="exists already"), atomic_file(there):
        pytest.fail("the body must not run")
    assert there.read_text() == "x"


def test_a_folder_is_never_replaced_by_a_file_nor_a_file_by_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="a folder; expected the name of a file"):
        check_output(tmp_path / "folder", overwrite=True)
    with pytest.raises(OutputError, match="a file; expected the name of a folder"):
        check_output(tmp_path / "file", overwrite=True, folder=True)


def test_json_is_written_over_what_is_there(tmp_path):
    for value in ({"a": 1}, {"ü": [1.5, None]}):
        write_json(tmp_path / "x.json", value)
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "ü": [\n    1.5,\n    null\n  ]\n}\n'


def test_tensors_are_readable_by_whom_the_umask_allows(tmp_path):
    save_tensors({"a": torch.arange(6).reshape(2, 3).t()}, tmp_path / "a.safetensors")
    (tmp_path / "b").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_a_killed_run_left_is_removed_and_that_of_a_running_one_is_not(tmp_path):
    path = tmp_path / "out.bin"
    with atomic_file(path) as temporary:
        temporary.write_bytes(b"whole")
        mine = temporary.name
    start = mine.removesuffix(str(os.getpid()))
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = [tmp_path / name for name in (f"{start}1", f"{start}1.old", f"{start}{ended.pid}.old", ".out.bin.partial-x")]
    for left in (*kept, tmp_path / f"{start}{ended.pid}"):
        left.write_bytes(b"half")
    with atomic_file(path, overwrite=True):
        assert {entry.name for entry in tmp_path.iterdir()} == {"out.bin", mine, *(left.name for left in kept)}


def test_a_clean_up_that_fails_does_not_hide_why(tmp_path, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OutputError, match=r"out: cannot be written \(Read-only file system\)"):
        _fail_in(atomic_file(tmp_path / "out"), lambda _: None, OSError(errno.EROFS, os.strerror(errno.EROFS)))


def test_a_device_is_not_replaced():
    with pytest.raises(OutputError, match="/dev/null: a device or the like"):
        check_output(Path("/dev/null"), overwrite=True)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="cannot be written, since the folder"):
        check_output(tmp_path / "out", overwrite=True)


def test_a_name_too_long_and_a_link_to_nothing_are_refused_before_any_work(tmp_path):
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(tmp_path / ("x" * 240), overwrite=False)  # its temporary name is longer still
    for name, target in (("nothing", "none"), ("itself", "itself")):
        (tmp_path / name).symlink_to(tmp_path / target)
        for folder in (True, False):
            with pytest.raises(OutputError, match=f"{name}: a link to what is not there"):
                check_output(tmp_path / name, overwrite=True, folder=folder)


def test_a_removal_that_the_disk_refuses_once_is_tried_again(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "kept").write_text("x")
    unlink, refused = os.unlink, []

    def fails_once(path, **settings):
        if not refused:
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **settings)

    monkeypatch.setattr(os, "unlink", fails_once)
    remove(folder)
    assert refused
    assert not folder.exists()
