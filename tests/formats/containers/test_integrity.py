"""Every byte of an artifact is covered, and no file, whatever its bytes, gives another error than ours."""

import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import process_time

import gguf
import numpy as np
import pytest
from artifacts_for_tests import write_plain, write_zigzag
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import make_model

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.containers.gguf import BYTES_AT, HASH_AT, check_header
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

Read = Callable[[Path], object]


def read_plain(path: Path) -> None:
    open_artifact(path).check_bytes()


READERS: dict[str, Read] = {"zigzag": read_packed, "plain": read_plain}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The smallest artifacts of both kinds. Biases of 20 numbers leave padding between tensors."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 20, "intermediate_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1}
    checkpoint = open_checkpoint(make_model(folder / "model", "qwen2", **sizes))
    write_zigzag(checkpoint, {}, folder / "zigzag.gguf")
    write_plain(checkpoint, folder / "plain.gguf", type="f16")
    return {kind: (folder / f"{kind}.gguf").read_bytes() for kind in READERS}


def refuses(read: Read, data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        path.write_bytes(data)
        assert not verify(path).passed
        with pytest.raises(ArtifactError) as caught:
            read(path)
        return "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_flipped_bit_anywhere_is_refused(small: dict[str, bytes], kind: str, data: st.DataObject) -> None:
    changed = bytearray(small[kind])
    # Half of the examples hit the header, which is a small part of a file.
    end = data.draw(st.sampled_from([600, len(changed)]))
    at = data.draw(st.integers(0, end - 1))
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert refuses(READERS[kind], bytes(changed))


@pytest.mark.parametrize("kind", READERS)
def test_a_flip_in_the_hashes_or_in_padding_is_refused(small: dict[str, bytes], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small[kind])
    file = read_gguf(path)
    infos = list(file.tensors.values())
    gaps = [
        (before.start + before.nbytes, after.start)
        for before, after in pairwise(infos)
        if after.start > before.start + before.nbytes
    ]
    assert gaps
    ends = [at for gap in gaps for at in (gap[0], gap[1] - 1)]
    for at in (0, 4, 8, 16, 30, HASH_AT, HASH_AT + 63, BYTES_AT, BYTES_AT + 7, 300, file.data_start - 1, *ends):
        changed = bytearray(small[kind])
        changed[at] ^= 1
        assert refuses(READERS[kind], bytes(changed)), at


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_truncated_and_extended_files_are_refused(small: dict[str, bytes], kind: str, data: st.DataObject) -> None:
    whole = small[kind]
    length = data.draw(st.integers(0, len(whole) - 1))
    assert refuses(READERS[kind], whole[:length])
    assert refuses(READERS[kind], whole + data.draw(st.sampled_from([b"\0", b"\0" * 64, b"x", b"GGUF" * 1000])))


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_overwritten_stretches_are_refused(small: dict[str, bytes], kind: str, data: st.DataObject) -> None:
    whole = small[kind]
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=64))
    changed = (whole[:at] + new + whole[at + len(new) :])[: len(whole)]
    if changed != whole:
        assert refuses(READERS[kind], changed)


def test_intact_files_pass(small: dict[str, bytes], tmp_path: Path) -> None:
    for kind, data in small.items():
        (tmp_path / kind).write_bytes(data)
        READERS[kind](tmp_path / kind)
        assert verify(tmp_path / kind).passed


def test_unverified_reading_checks_the_header_only(small: dict[str, bytes], tmp_path: Path) -> None:
    damaged = bytearray(small["zigzag"])
    damaged[-100] ^= 1
    (tmp_path / "m.gguf").write_bytes(damaged)
    read_packed(tmp_path / "m.gguf", verify=False)
    with pytest.raises(ArtifactError, match="not match the SHA-256"):
        read_packed(tmp_path / "m.gguf")


def test_a_file_that_ends_within_its_header_is_told_from_one_that_was_changed(
    small: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small["zigzag"][: BYTES_AT + 100])
    with pytest.raises(ArtifactError, match=f"truncated .* claims [0-9,]+ bytes, the file has {BYTES_AT + 100}"):
        check_header(path)


def test_damage_is_named_with_its_tensor(small: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small["zigzag"])
    start = read_gguf(path).tensors["blk.0.mlp_in.tail.weight"].start  # 18 rows are no band
    damaged = bytearray(small["zigzag"])
    damaged[start + 100] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(ArtifactError, match=r"damaged: blk.0.mlp_in.tail.weight does not match the SHA-256; copy"):
        read_packed(path)


def test_plain_and_foreign_files_are_refused_with_the_way_out(small: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small["plain"])
    with pytest.raises(ArtifactError, match=r"a plain F16 GGUF, expected a zigzag one: run it with llama.cpp"):
        read_packed(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="another program's GGUF"):
        check_header(path)
    with pytest.raises(ArtifactError, match="No such file"):
        check_header(tmp_path / "none.gguf")
    with pytest.raises(ArtifactError, match="cannot be read"):
        check_header(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "x" * 1000])
def test_tensor_names_that_would_spoil_messages_are_refused(tmp_path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="is no tensor's name") as caught:
        read_gguf(tmp_path / "m.gguf")
    assert len(str(caught.value).splitlines()) == 1


@given(
    body=st.binary(max_size=300),
    counts=st.tuples(st.sampled_from([0, 1, 3, 2**20, 2**63]), st.sampled_from([0, 1, 2, 2**20, 2**63])),
)
@settings(deadline=None, max_examples=200)
def test_reading_arbitrary_bytes_raises_only_artifact_errors(body: bytes, counts: tuple[int, int]) -> None:
    head = b"GGUF" + (3).to_bytes(4, "little") + b"".join(count.to_bytes(8, "little") for count in counts)
    for data in (body, head + body):
        read_or_refuse(data)


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_reading_mutated_headers_is_bounded(small: dict[str, bytes], data: st.DataObject) -> None:
    whole = bytearray(small["plain"])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 2**14))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from([0, 1, 8, 9, 2**31, 2**40, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
        whole[at : at + width] = (value % 256**width).to_bytes(width, "little")
    read_or_refuse(bytes(whole))


def read_or_refuse(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        path.write_bytes(data)
        started = process_time()
        tracemalloc.start()
        message = ""
        try:
            read_gguf(path)
        except ArtifactError as error:
            message = str(error)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert "\n" not in message
        assert len(message) < 1000
        assert peak < 4_000_000 + 60 * len(data)
        assert process_time() - started < 5
