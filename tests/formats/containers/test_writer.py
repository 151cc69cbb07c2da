"""The writer: tensor by tensor, sealed, whole or not at all, and the same however many tensors it works on at once."""

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sparsepack.errors import OutputError, PackingError
from sparsepack.files.gguf import read_gguf
from sparsepack.files.hashing import combine_digests
from sparsepack.formats.containers import write_tensors as placing
from sparsepack.formats.containers.gguf import KeyValue, check_header, check_tensors, f32, string, u32
from sparsepack.formats.containers.gguf_writer import GgufPlan
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, alone
from sparsepack.models.checkpoint.source_hash import SourceHash

ROWS = 1000
AT_ONCE = [1, 2, 5]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())  # torch's compiler, for one, keeps threads
    yield
    # The progress bar's own does not end at once.
    assert not [thread for thread in threading.enumerate() if "Pool" in thread.name and thread not in before]


def planned(
    count: int, made: list[int] | None = None, slow: int | None = None, slow_from: int | None = None
) -> list[PlannedGroup]:
    """Float32 tensors of 1000, 1001, ... numbers, each its own index; `made` notes them, `slow` takes its time, and so
    do all after `slow_from`, of which not many are made while whoever waits for them is without a core."""
    last = count if slow_from is None else slow_from

    def produce(index: int) -> torch.Tensor:
        if made is not None:
            made.append(index)
        time.sleep(0.1 if index == slow or index > last else 0)
        return torch.full((ROWS + index,), float(index)).view(torch.uint8)

    return [alone(PlannedTensor(f"t{i}", (ROWS + i,), "F32"), lambda i=i: produce(i)) for i in range(count)]


def write_gguf(path: Path, values: dict[str, KeyValue], groups: list[PlannedGroup], **options: Any) -> None:
    source = SourceHash([], combine_digests)
    plan = GgufPlan(format="test", source=source, architecture="test", values=values, groups=tuple(groups), **options)
    plan.write(path)
    assert path.stat().st_size == plan.total_bytes


def test_values_and_tensors_are_read_back_by_us_and_by_gguf_py(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {"x.name": string("ä"), "x.count": u32(7), "x.rate": f32(0.5)}
    write_gguf(path, values, planned(5), alignment=64)
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

    tensors[2] = alone(PlannedTensor("t2", (4,), "F32"), fails)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", {}, tensors)
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


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("size", [100, 5000, 200_000])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, size: int, at_once: int) -> None:
    with largest_file(size), pytest.raises(OutputError, match="the disk is full"):
        write_gguf(tmp_path / "m.gguf", {}, planned(100), at_once=at_once)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_a_disk_that_fills_up_under_a_tensor_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    pieces, made = placing.host_pieces, list[int]()

    def full(data: torch.Tensor) -> Iterator[memoryview]:
        if data.nbytes == 4 * (ROWS + 7):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield from pieces(data)

    monkeypatch.setattr(placing, "host_pieces", full)
    with pytest.raises(OutputError, match="the disk is full"):
        write_gguf(tmp_path / "m.gguf", {}, planned(1000, made, slow_from=7), at_once=at_once)
    assert len(made) < 1000
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_size_than_planned_is_a_bug(tmp_path: Path) -> None:
    wrong = alone(PlannedTensor("t", (4,), "F32"), lambda: torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="t: 3 bytes were made, 16 planned"):
        write_gguf(tmp_path / "m.gguf", {}, [wrong])


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("slow", [0, 10, 29])
def test_the_file_is_the_same_however_many_tensors_are_in_work(tmp_path: Path, at_once: int, slow: int) -> None:
    write_gguf(tmp_path / "1.gguf", {"x": u32(1)}, planned(30), alignment=64)
    write_gguf(tmp_path / "n.gguf", {"x": u32(1)}, planned(30, slow=slow), alignment=64, at_once=at_once)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()
    file = read_gguf(tmp_path / "n.gguf")
    assert list(file.tensors) == [f"t{i}" for i in range(30)]
    check_tensors(file)


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_a_tensor_that_cannot_be_encoded_is_named_and_nothing_left(tmp_path: Path, at_once: int) -> None:
    def fails() -> torch.Tensor:
        raise PackingError("no")

    made: list[int] = []
    tensors = planned(1000, made, slow=1, slow_from=4)
    for index in (3, 4):
        tensors[index] = alone(PlannedTensor(f"t{index}", (4,), "F32"), fails)
    with pytest.raises(PackingError, match=r"^t3: no$"):
        write_gguf(tmp_path / "m.gguf", {}, tensors, at_once=at_once)
    assert len(made) < 999
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_ctrl_c_leaves_nothing(tmp_path: Path, at_once: int) -> None:
    def interrupted() -> torch.Tensor:
        time.sleep(0.2)  # let it find the writer waiting
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # it waits, as a terminal's finds it
        time.sleep(0.1)
        return torch.zeros(16, dtype=torch.uint8)

    tensors = planned(1000)
    tensors[2] = alone(PlannedTensor("t2", (4,), "F32"), interrupted)
    # Tried again, as a user presses again: Python drops the exception where a weak reference's callback runs.
    for _ in range(3):
        (tmp_path / "m.gguf").unlink(missing_ok=True)
        try:
            write_gguf(tmp_path / "m.gguf", {}, tensors, at_once=at_once)
        except KeyboardInterrupt:
            break
    assert list(tmp_path.iterdir()) == []
