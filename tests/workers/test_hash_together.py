"""The hash of a model is taken by one worker of a machine, while all do other work."""

from pathlib import Path

import pytest
from linked import together

from sparsepack.files.hashing import combined
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.workers.workers import Workers


@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_takes_the_hash_while_all_do_other_work(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some")
    known = SourceHash([file], combined).sha256()
    taken: list[SourceHash] = []
    meanwhile = SourceHash.meanwhile
    monkeypatch.setattr(SourceHash, "meanwhile", lambda self: taken.append(self) or meanwhile(self))

    def work(workers: Workers) -> tuple[list[int], str]:
        source = SourceHash([file], combined)
        return source.share_beside(workers, lambda: workers.told(workers.number)), source.so_far

    assert together(count, work) == [([*range(count)], known)] * count
    assert len(taken) == 1
