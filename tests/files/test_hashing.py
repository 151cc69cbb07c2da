"""Hashes of files and values."""

import hashlib

from sparsepack.files.hashing import fingerprint, sha256_bytes, sha256_file, sha256_files


def test_a_file_hashes_as_its_bytes(tmp_path):
    data = bytes(range(256)) * 10_000
    path = tmp_path / "a"
    path.write_bytes(data)
    assert sha256_file(path) == sha256_bytes(data) == hashlib.sha256(data).hexdigest()


def test_files_hash_by_content_and_order_not_by_name(tmp_path):
    for name, data in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(data)
    a, b, c = (tmp_path / name for name in "abc")
    assert sha256_files([a, b]) == sha256_files([c, b])
    assert sha256_files([a, b]) != sha256_files([b, a])
    (tmp_path / "d").write_bytes(b"12")
    assert sha256_files([a, b]) != sha256_files([tmp_path / "d"])


def test_a_fingerprint_ignores_the_order_of_keys_only():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
