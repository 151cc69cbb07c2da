"""The hash of a checkpoint's weights: the same ever since, taken once, and never of files that change."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from artifacts_for_tests import write_plain
from models_for_tests import make_model
from releases_for_tests import RELEASES, release
from safetensors.torch import load_file

from sparsepack.errors import CheckpointError
from sparsepack.files import hashing
from sparsepack.files.hashing import combine_digests
from sparsepack.formats.open import open_artifact
from sparsepack.models.checkpoint import source_hash
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.packing import PackRequest, pack


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("b", "a")]
    for path in paths:
        path.write_bytes(path.name.encode() * 3_000_000)
    return paths


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_it_is_over_the_files_digests_in_their_order(files: list[Path]) -> None:
    expected = digest("".join(digest(file.read_bytes()) for file in files).encode())
    assert SourceHash(files, combine_digests).sha256() == expected
    with SourceHash(files, combine_digests).meanwhile() as sha256:
        assert sha256() == expected


def test_that_of_a_gguf_is_the_files_own(tmp_path: Path) -> None:
    write_plain(open_checkpoint("shipped:tiny"), tmp_path / "m.gguf", "f16")
    assert open_checkpoint(tmp_path / "m.gguf").sha256 == digest((tmp_path / "m.gguf").read_bytes())


def test_what_is_known_is_not_taken_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceHash(files, combine_digests)
    with source.meanwhile() as sha256:
        known = sha256()
    monkeypatch.setattr("sparsepack.files.hashing._sha256_file", lambda *_: pytest.fail("hashed again"))
    assert source.sha256() == known
    with source.meanwhile() as sha256:
        assert sha256() == known


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("change", ["written", "touched", "replaced", "removed"])
def test_a_file_that_changes_meanwhile_is_named(files: list[Path], change: str, known: bool) -> None:
    source = SourceHash(files, combine_digests)
    if known:
        source.sha256()
    with source.meanwhile() as sha256, pytest.raises(CheckpointError, match=r"a: changed since it was opened"):
        if change == "written":
            files[1].write_bytes(b"other")
        elif change == "touched":
            os.utime(files[1], ns=(0, 0))
        elif change == "removed":
            sha256()  # or the hash would not find it
            files[1].unlink()
        else:
            before = files[1].stat()
            new = files[1].with_name("new")
            new.write_bytes(files[1].read_bytes())
            os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
            new.replace(files[1])
        sha256()


@pytest.mark.parametrize("known", [False, True])
def test_a_file_that_changed_before_is_named_whether_or_not_the_hash_was_known(files: list[Path], known: bool) -> None:
    source = SourceHash(files, combine_digests)
    if known:
        source.sha256()
    files[1].write_bytes(b"other")
    with source.meanwhile() as sha256, pytest.raises(CheckpointError, match=r"a: changed since it was opened"):
        sha256()
    with pytest.raises(CheckpointError, match=r"a: changed since it was opened"):
        source.sha256()


def test_work_that_fails_over_a_changed_file_names_it_and_otherwise_fails_as_it_does(files: list[Path]) -> None:
    source = SourceHash(files, combine_digests)
    with pytest.raises(RuntimeError, match="other shapes"), source.meanwhile():
        raise RuntimeError("other shapes")
    with pytest.raises(CheckpointError, match=r"a: changed since it was opened"), source.meanwhile():
        files[1].unlink()
        raise RuntimeError("other shapes")


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^the weights cannot be read \(.*none.*\); are they whole\?$"):
        SourceHash([tmp_path / "none"], combine_digests).sha256()


def test_an_interrupt_of_the_other_work_ends_the_hashing(tmp_path: Path) -> None:
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 42)  # a hole: hours to hash
    source = SourceHash([tmp_path / "endless"], combine_digests)
    with pytest.raises(KeyboardInterrupt), source.meanwhile():
        raise KeyboardInterrupt


def test_what_was_begun_is_not_begun_again(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []
    take = hashing._sha256_file

    def counted(path: Path, *how: Any) -> str:
        taken.append(path)
        return take(path, *how)

    monkeypatch.setattr(hashing, "_sha256_file", counted)
    source = SourceHash(files, combine_digests)
    source.begin()
    source.begin()
    with source.meanwhile() as sha256:
        known = sha256()
    source.begin()
    assert source.sha256() == known == SourceHash(files, combine_digests).sha256()
    assert sorted(taken) == sorted([*files, *files])  # once each by either


def test_what_was_begun_says_what_is_wrong_when_it_is_asked_for(files: list[Path]) -> None:
    changed, gone = SourceHash(files, combine_digests), SourceHash([files[0].with_name("gone")], combine_digests)
    changed.begin()
    files[1].write_bytes(b"other")
    with pytest.raises(CheckpointError, match="a: changed since it was opened"):
        changed.sha256()
    gone.begin()
    with pytest.raises(CheckpointError, match=r"cannot be read .*gone"):
        gone.sha256()


def test_the_first_worker_of_a_machine_alone_begins(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    monkeypatch.setattr(source_hash, "Hashing", lambda paths, pace: began.append(len(list(paths))))
    monkeypatch.setenv("LOCAL_RANK", "1")
    SourceHash(files, combine_digests).begin()
    assert began == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    SourceHash(files, combine_digests).begin()
    assert began == [2]


def test_packing_a_large_release_reads_a_weight_once_and_hashes_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the hash: all tensors, and embedding and output once more, whose types are chosen by their values."""
    model = make_model(tmp_path / "m")
    release(model, RELEASES["fp8, blocks"])
    file = model / "model.safetensors"
    for module in (hashing, source_hash):
        monkeypatch.setattr(module, "AHEAD", 0)
    counted: list[int] = []
    count = hashing.Pace.count

    def recorded(pace: hashing.Pace, number: int, nbytes: int) -> None:
        counted.append(nbytes)
        count(pace, number, nbytes)

    monkeypatch.setattr(hashing.Pace, "count", recorded)
    pack(PackRequest(str(model), tmp_path / "m.gguf"))
    sizes = {name: tensor.nbytes for name, tensor in load_file(file).items() if not name.endswith(".input_scale")}
    assert sum(counted) == sum(sizes.values()) + sizes["model.embed_tokens.weight"] + sizes["lm_head.weight"]
    assert open_artifact(tmp_path / "m.gguf").manifest["model"]["sha256"] == digest(digest(file.read_bytes()).encode())
