"""Two names that change places in one step."""

import errno
import sys
from pathlib import Path

import pytest

from sparsepack.files import atomic as module
from sparsepack.files.atomic import exchange

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="only there")


def _folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    return tmp_path / "one", tmp_path / "other"


def test_two_folders_change_places(tmp_path: Path) -> None:
    one, other = _folders(tmp_path)
    assert exchange(one, other)
    assert (one / "other").read_text() == "other"
    assert (other / "one").read_text() == "one"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_the_disk_refuses_is_raised(tmp_path: Path) -> None:
    one, _ = _folders(tmp_path)
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "none")
    assert (one / "one").is_file()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_file_system_that_cannot_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: object) -> int:
        module.ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(module, "_function", lambda: refuses)
    assert not exchange(*_folders(tmp_path))
    monkeypatch.setattr(module, "_function", lambda: None)
    assert not exchange(tmp_path / "one", tmp_path / "other")
