"""Hashes of files and values."""

import gc
import hashlib
import os
import signal
import threading
import time

import pytest

from sparsepack.files import hashing as module
from sparsepack.files.hashing import (
    Hashing,
    Pace,
    combine_digests,
    fingerprint,
    sha256_bytes,
    sha256_file,
    sha256_of_pieces,
)


def digests_of(*paths):
    taking = Hashing(paths)
    try:
        return taking.sha256()
    finally:
        taking.abandon()


def test_a_file_hashes_as_its_bytes(tmp_path):
    data = bytes(range(256)) * 10_000
    path = tmp_path / "a"
    path.write_bytes(data)
    assert sha256_file(path) == sha256_bytes(data) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 300])
def test_pieces_of_a_file_are_hashed_as_their_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(module, "_LARGE", 100)
    monkeypatch.setattr(module, "_PIECE", 64)
    data = os.urandom(size)
    path = tmp_path / "a"
    path.write_bytes(data)
    pieces = [data[at : at + 100] for at in range(0, size, 100)] or [b""]
    assert sha256_of_pieces(path) == combine_digests(map(sha256_bytes, pieces))


def test_files_hash_by_content_and_order_not_by_name(tmp_path):
    for name, data in (("a", b"1"), ("b", b"2"), ("c", b"1"), ("d", b"12")):
        (tmp_path / name).write_bytes(data)
    a, b, c, d = (tmp_path / name for name in "abcd")
    assert digests_of(a, b) == digests_of(c, b) == [sha256_bytes(b"1"), sha256_bytes(b"2")]
    assert combine_digests(digests_of(a, b)) != combine_digests(digests_of(b, a))
    assert combine_digests(digests_of(a, b)) != combine_digests(digests_of(d))


def test_a_fingerprint_ignores_the_order_of_keys_only():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_a_file_that_cannot_be_read_ends_the_hashing_of_the_others(tmp_path):
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 42)  # a hole: hours to hash
    before = set(threading.enumerate())
    with pytest.raises(FileNotFoundError):
        digests_of(tmp_path / "none", tmp_path / "endless")
    assert set(threading.enumerate()) <= before


def test_hashing_ends_when_nobody_wants_it_any_more(tmp_path):
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 42)
    before = set(threading.enumerate())
    taking = Hashing([tmp_path / "endless"])
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon  # and so the end of the process does not wait for it
    del taking
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_ctrl_c_ends_hashing(tmp_path, monkeypatch):
    for name in "ab":
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 42)
    take, ended = module._sha256_file, []

    def interrupts(path, *how):
        if path.name == "a":
            time.sleep(0.1)  # let it find the test waiting
            os.kill(os.getpid(), signal.SIGINT)
        digest = take(path, *how)
        ended.append(path.name)
        return digest

    monkeypatch.setattr(module, "_sha256_file", interrupts)
    with pytest.raises(KeyboardInterrupt):
        digests_of(tmp_path / "a", tmp_path / "b")
    assert "a" in ended


def test_hashing_stays_near_what_others_have_read(tmp_path, monkeypatch):
    """Each file up to so many bytes behind what others have read of it, the first from the beginning."""
    monkeypatch.setattr(module, "AHEAD", 200)
    monkeypatch.setattr(module, "_PIECE", 64)
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(os.urandom(1000))
    pace, most = Pace(3), {}
    update = hashlib.sha256

    class Counted:
        def __init__(self):
            self.digest, self.size = update(), 0

        def update(self, data):
            self.digest.update(data)
            self.size += len(data)
            most[id(self)] = self.size

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(module.hashlib, "sha256", Counted)
    taking = Hashing(files, pace)
    time.sleep(0.1)
    assert sorted(most.values()) == [192]  # whole pieces, of the first file alone
    pace.count(2, 300)
    if (child := os.fork()) == 0:
        pace.count(0, 100)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
    assert sorted(most.values()) == [256, 448]
    monkeypatch.undo()
    assert taking.sha256() == [sha256_file(file) for file in files]


def test_hashing_that_waits_for_others_can_be_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AHEAD", 0)
    (tmp_path / "a").write_bytes(b"weights")
    before = set(threading.enumerate())
    Hashing([tmp_path / "a"], Pace(1)).abandon()
    assert set(threading.enumerate()) <= before
