"""The hash of a model is taken by one worker of a machine, while all do other work."""

from pathlib import Path
from typing import Any

import pytest
from linked import together

from sparsepack.files import hashing
from sparsepack.files.hashing import combine_digests, sha256_bytes
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.workers.shard import Shard

KNOWN = combine_digests([sha256_bytes(b"some")])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"some")
    return path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed."""
    found: list[Path] = []
    take = hashing._sha256_file

    def record(path: Path, *how: Any) -> str:
        found.append(path)
        return take(path, *how)

    monkeypatch.setattr(hashing, "_sha256_file", record)
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_takes_the_hash_while_all_do_other_work(count: int, file: Path, taken: list[Path]) -> None:
    def work(shard: Shard) -> tuple[list[int], str]:
        source = SourceHash([file], combine_digests)
        return source.share_beside(shard.all_gather, lambda: shard.all_gather(shard.rank)), source.so_far

    assert together(count, work) == [([*range(count)], KNOWN)] * count
    assert taken == [file]


def test_the_one_that_takes_it_may_ask_for_it_before_the_others(file: Path, taken: list[Path]) -> None:
    def work(shard: Shard) -> tuple[str, str]:
        source = SourceHash([file], combine_digests)
        with source.meanwhile(shard.all_gather) as sha256:
            early = source.sha256() if shard.first else source.so_far
            shard.all_gather(None)
            return early, sha256()

    first, other = together(2, work)
    assert first == (KNOWN, KNOWN)
    assert other == ("?" * 64, KNOWN)
    assert taken == [file]
