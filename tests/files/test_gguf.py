"""Mapped bytes that were read can be let go of, and read again."""

import sys
from pathlib import Path

import numpy as np
import pytest

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import read_gguf

SIZE = 32 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "test")
    for name in ("first", "small", "last"):
        writer.add_tensor(name, np.arange(7 if name == "small" else SIZE // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def mapped_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    of_files = ("RssFile", "RssShmem")  # of a disk; of a file system in memory, as /tmp may be
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(of_files))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_forgotten_bytes_take_no_memory_and_are_still_there(path: Path) -> None:
    file, expected = read_gguf(path), np.arange(SIZE // 4, dtype=np.float32)
    before = mapped_bytes()
    held = file.bytes("first")
    assert np.array_equal(held.view(np.float32), expected)
    assert mapped_bytes() - before > 0.9 * SIZE
    file.forget("first")
    assert mapped_bytes() - before < 0.1 * SIZE
    assert np.array_equal(held.view(np.float32), expected)


def test_neighbours_and_tensors_smaller_than_a_page_are_not_touched(path: Path) -> None:
    file = read_gguf(path)
    for name in ("small", "first", "last"):
        file.forget(name)
    assert np.array_equal(file.bytes("small").view(np.float32), np.arange(7))
    assert np.array_equal(file.bytes("last").view(np.float32), np.arange(SIZE // 4))


@pytest.mark.parametrize("alignment", [12, 1 << 21])
def test_an_alignment_that_no_reader_could_map_is_refused(alignment: int, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_uint32("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match=f"general.alignment is '{alignment}'"):
        read_gguf(tmp_path / "m.gguf")
