"""The writer of folders: the same bytes however many groups it works on at once, each made once, and nothing left of a
folder that cannot be made."""

import json
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsepack.errors import PackingError
from sparsepack.files import hashing
from sparsepack.files.hashing import combine_digests, sha256_bytes
from sparsepack.files.tensors import WEIGHTS
from sparsepack.formats import slide as slid_folder
from sparsepack.formats.containers.safetensors import MANIFEST, unsealed
from sparsepack.formats.containers.safetensors_writer import FolderPlan
from sparsepack.formats.orders import slide as slid_matrix
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, alone
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.source_hash import SourceHash
from sparsepack.packing import PackRequest, pack

AT_ONCE = [1, 2, 5]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def groups(count: int, live: Counter[str] | None = None, bad: tuple[int, ...] = ()) -> tuple[PlannedGroup, ...]:
    """Groups of a matrix and two vectors each; `live` notes how many are in memory, `now` and at `most`."""
    lock = threading.Lock()

    def note(change: int) -> None:
        if live is not None:
            with lock:
                live["now"] += change
                live["most"] = max(live["most"], live["now"])

    def produce(number: int) -> list[torch.Tensor]:
        if number in bad:
            raise PackingError("no")
        note(1)
        matrix = torch.full((8, 100 + number), number, dtype=torch.uint8)
        weakref.finalize(matrix, note, -1)
        time.sleep(0.002 * (number % 3))
        return [matrix, torch.full((number,), 7, dtype=torch.uint8), torch.arange(4.0).view(torch.uint8)]

    def tensors(number: int) -> tuple[PlannedTensor, ...]:
        shapes = {"U8": (8, 100 + number), "I8": (number,), "F32": (4,)}
        return tuple(PlannedTensor(f"{number}.{kind}", shape, kind) for kind, shape in shapes.items())

    return tuple(PlannedGroup(tensors(n), lambda n=n: produce(n)) for n in range(count))


def plan(planned: tuple[PlannedGroup, ...], at_once: int, source: Path | None = None) -> FolderPlan:
    return FolderPlan(
        format="test",
        groups=planned,
        at_once=at_once,
        source=SourceHash([source] if source else [], combine_digests),
        manifest=lambda sha256: {"schema": 1, "source": sha256},
        texts={"config.json": "{}"},
    )


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_tensors_of_a_group_stand_in_their_places_with_their_hashes(tmp_path: Path, at_once: int) -> None:
    made = plan(groups(30), at_once)
    made.write(tmp_path / "m")
    raw, inside = (tmp_path / "m" / WEIGHTS).read_bytes(), unsealed(tmp_path / "m" / MANIFEST)
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert [name for name in header if name != "__metadata__"] == [tensor.name for tensor in made.tensors]
    for number in range(30):
        first, last = header[f"{number}.U8"]["data_offsets"]
        assert raw[start + first : start + last] == bytes([number]) * (8 * (100 + number))
    for name, digest in inside["tensors"].items():
        first, last = header[name]["data_offsets"]
        assert sha256_bytes(raw[start + first : start + last]) == digest
    assert inside["files"][WEIGHTS] == {"bytes": len(raw), "header_sha256": sha256_bytes(raw[:start])}
    assert made.total_bytes == sum(len(data) for data in content(tmp_path / "m").values())
    plan(groups(30), 1).write(tmp_path / "one")
    assert content(tmp_path / "m") == content(tmp_path / "one")


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_no_more_groups_are_in_memory_than_in_work(tmp_path: Path, at_once: int) -> None:
    live: Counter[str] = Counter()
    plan(groups(40, live), at_once).write(tmp_path / "m")
    assert live["most"] <= max(at_once, 2)  # of one at a time the one before it is written meanwhile
    assert live["now"] == 0


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_the_first_group_that_cannot_be_made_is_named_and_nothing_left(tmp_path: Path, at_once: int) -> None:
    with pytest.raises(PackingError, match=r"^5\.U8: no$"):
        plan(groups(1000, bad=(5, 6, 7)), at_once).write(tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["slide-int8", "slide-bf16"])
def test_threads_write_the_slid_folder_that_one_writes_and_slide_each_matrix_once(
    format: str, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, slid = slid_matrix.encode, list[int]()

    def counted(weight: torch.Tensor, *how: object) -> object:
        slid.append(weight.data_ptr())
        return encode(weight, *how)

    monkeypatch.setattr(slid_matrix, "encode", counted)
    for at_once in (1, 3):
        monkeypatch.setattr(slid_folder, "tensors_at_once", lambda device, most, at_once=at_once: at_once)
        (tmp_path / str(at_once)).mkdir()  # the card says what the folder is called
        pack(PackRequest(str(pruned), tmp_path / str(at_once) / "m", format=format))
    assert len(slid) == 2 * 14
    assert content(tmp_path / "1" / "m") == content(tmp_path / "3" / "m")
    assert verify(tmp_path / "3" / "m", str(pruned)).passed


def test_threads_name_the_first_matrix_without_its_pattern(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for at_once in AT_ONCE:
        monkeypatch.setattr(slid_folder, "tensors_at_once", lambda device, most, at_once=at_once: at_once)
        with pytest.raises(PackingError) as caught:
            pack(PackRequest(str(pruned), tmp_path / "m", format="slide-int8", keep=4, of=6))
        said.append(str(caught.value))
        assert not list(tmp_path.iterdir())
    assert said == said[:1] * len(AT_ONCE)


def test_the_source_is_hashed_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, together = tmp_path / "source", threading.Barrier(2)
    source.write_bytes(b"weights")
    read = hashing._sha256_file

    def hashed(*given: Any) -> str:
        together.wait(10)  # breaks unless both are at it
        return read(*given)

    def produce() -> torch.Tensor:
        together.wait(10)
        return torch.zeros(4, dtype=torch.uint8)

    monkeypatch.setattr(hashing, "_sha256_file", hashed)
    plan((alone(PlannedTensor("t", (4,), "U8"), produce),), 1, source).write(tmp_path / "m")
    assert unsealed(tmp_path / "m" / MANIFEST)["manifest"]["source"] == combine_digests([sha256_bytes(b"weights")])


def test_a_group_that_cannot_be_made_ends_the_hashing_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    os.truncate(tmp_path / "source", 1 << 42)  # a hole: hours to hash
    with pytest.raises(PackingError, match=r"^5\.U8: no$"):
        plan(groups(10, bad=(5,)), 2, tmp_path / "source").write(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
