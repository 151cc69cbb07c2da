"""The writer: streamed, sealed, whole or not at all."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sparsepack.errors import OutputError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.integrity import check_header, check_tensors
from sparsepack.formats.writer import PlannedTensor, f32, string, u32, write_gguf

ROWS = 1000


def planned(count: int, alive: list[int] | None = None) -> list[PlannedTensor]:
    """Float32 tensors of 1000, 1001, ... numbers, each its own index."""

    def produce(index: int) -> torch.Tensor:
        if alive is not None:
            alive.append(index)
        return torch.full((ROWS + index,), float(index)).view(torch.uint8)

    return [PlannedTensor(f"t{i}", (ROWS + i,), "F32", lambda i=i: produce(i)) for i in range(count)]


def test_values_and_tensors_are_read_back_by_us_and_by_gguf_py(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {"x.name": string("ä"), "x.count": u32(7), "x.rate": f32(0.5)}
    write_gguf(path, "test", values, planned(5), alignment=64)
    file = read_gguf(path)
    assert {key: file.metadata[key] for key in values} == {"x.name": "ä", "x.count": 7, "x.rate": 0.5}
    assert file.metadata["general.architecture"] == "test"
    assert check_header(path) == file.data_start
    check_tensors(file)
    for index, tensor in enumerate(gguf.GGUFReader(path).tensors):
        assert tensor.data_offset % 64 == 0
        assert np.array_equal(tensor.data, np.full(ROWS + index, index, dtype=np.float32))


def test_tensors_are_made_when_their_turn_comes(tmp_path: Path) -> None:
    made: list[int] = []
    tensors = planned(4, made)

    def fails() -> torch.Tensor:
        raise KeyboardInterrupt

    tensors[2] = PlannedTensor("t2", (4,), "F32", fails)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", "test", {}, tensors)
    assert made == [0, 1]
    assert list(tmp_path.iterdir()) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the context, files of this process end at `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [100, 5000, 200_000])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, size: int) -> None:
    with largest_file(size), pytest.raises(OutputError, match="the disk is full"):
        write_gguf(tmp_path / "m.gguf", "test", {}, planned(100))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_size_than_planned_is_a_bug(tmp_path: Path) -> None:
    wrong = PlannedTensor("t", (4,), "F32", lambda: torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="t: 3 bytes were made, 16 planned"):
        write_gguf(tmp_path / "m.gguf", "test", {}, [wrong])
