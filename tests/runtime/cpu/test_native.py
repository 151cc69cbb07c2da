"""The compiled module itself: layouts, parameters that the backend leaves at their defaults, memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import instruction_set_params
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS, stored_bytes
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.cpu.machine import native
from sparsepack.runtime.cpu.operations import PLANES_NUMBER
from sparsepack.runtime.tuning import random_blocks

ROW_TYPES = ("F32", "F16", "BF16", "Q4_K", "Q6_K")


@pytest.fixture(params=instruction_set_params(), scope="module")
def instruction_set(request: pytest.FixtureRequest) -> str:
    return request.param


def random_bytes(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def active(x: Tensor) -> Tensor:
    return x.nonzero()[:, 0].int()


# layouts


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6000),
    columns=st.integers(1, 200),
    span=st.integers(1, 16),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_a_zigzag_matrix_comes_back_byte_for_byte(
    instruction_set: str, rows: int, columns: int, span: int, threads: int, seed: int
) -> None:
    operations = native().Operations(instruction_set, threads)
    blocks = random_bytes(zigzag.bands(rows), columns, 144, seed=seed)
    loaded, back = operations.load_zigzag(blocks, rows, span, 64), torch.empty_like(blocks)
    operations.unpack_zigzag(loaded, back)
    assert torch.equal(back, blocks)
    # 64 bytes of header for up to four bands instead of 16 for each, and a bound of 2 bytes for each quad and column
    bands = blocks.shape[0]
    quads = -(-bands // 4)
    assert loaded.bytes == columns * (quads * 64 + bands * 128) + 2 * (quads * columns + 8)


@pytest.mark.parametrize("count", [1, 31, 33, 300])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5, 20])
def test_neurons_come_back_byte_for_byte(instruction_set: str, count: int, bands: int) -> None:
    operations = native().Operations(instruction_set, 2)
    records = random_bytes(count, 2 * 144 * bands, seed=count)
    loaded, back = operations.load_neurons(records), torch.empty_like(records)
    operations.unpack_neurons(loaded, back)
    assert torch.equal(back, records)
    record = -(-bands // 4) * 64 + bands * (128 + 144)  # the header of a quad of the down column may be of few bands
    assert (loaded.neurons, loaded.hidden, loaded.bytes) == (count, 256 * bands, count * (record + -record % 64))


def test_neurons_of_other_sizes_are_refused(instruction_set: str) -> None:
    operations = native().Operations(instruction_set, 1)
    for width in (144, 2 * 144 * 65, 0):
        with pytest.raises(ValueError, match="records"):
            operations.load_neurons(torch.zeros(3, width, dtype=torch.uint8))
    loaded = operations.load_neurons(torch.zeros(3, 288, dtype=torch.uint8))
    x, gate, indices = torch.zeros(256), torch.zeros(3), torch.tensor([0, 2, 3], dtype=torch.int32)
    for wrong in ((x[:-1].clone(), gate, indices, 2), (x, gate[:2].clone(), indices, 2), (x, gate, indices, 3)):
        with pytest.raises(ValueError, match="expected"):
            operations.neuron_ffn(loaded, *wrong, torch.empty(256))
    with pytest.raises(ValueError, match="expected"):
        operations.neuron_matmul(loaded, torch.zeros(2, 256), torch.zeros(2, 3), torch.empty(1, 256))


@pytest.mark.parametrize("type", ROW_TYPES)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 300])
def test_rows_come_back_byte_for_byte(instruction_set: str, type: str, rows: int) -> None:
    operations = native().Operations(instruction_set, 2)
    data = random_bytes(rows, stored_bytes(type, 512), seed=rows)
    loaded, back = operations.load_rows(data, 512, BLOCKS[type].gguf), torch.empty_like(data)
    operations.unpack_rows(loaded, back)
    assert torch.equal(back, data)
    assert (loaded.rows, loaded.columns) == (rows, 512)


@pytest.mark.parametrize("tile", [8, 24, 64, 256])
@pytest.mark.parametrize("span", [1, 2, 3, 16])
def test_products_are_the_same_in_every_tile_config(instruction_set: str, span: int, tile: int) -> None:
    rows, columns = 3400, 150
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    x[:, ::3] = 0
    blocks = zigzag.pack(weight)
    expected = x.double() @ zigzag.unpack(blocks, rows).double().T
    for threads in (1, 3):
        operations = native().Operations(instruction_set, threads)
        loaded = operations.load_zigzag(blocks, rows, span, tile)
        assert (loaded.span, loaded.tile) == (min(span, 4), tile)
        y = torch.empty(5, rows)
        operations.zigzag_matmul(loaded, x, y)
        assert (y - expected).norm() <= 1e-4 * expected.norm()
        operations.zigzag_gemv(loaded, x[0], active(x[0]), int(x[0].count_nonzero()), y[1])
        assert (y[1] - expected[0]).norm() <= 1e-4 * expected[0].norm()


# collect with what the engine gives it, beyond the backend's operation


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("columns", [1, 16, 33, 1000])
def test_collect_subtracts_the_offset(instruction_set: str, columns: int, per_channel: bool) -> None:
    x, offset = (torch.randn(columns, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    threshold = torch.full((columns if per_channel else 1,), 0.5)
    d, indices = torch.empty(columns), torch.empty(columns + 16, dtype=torch.int32)
    count = native().Operations(instruction_set, 1).collect(x, offset, threshold, 100, d, indices)
    assert torch.equal(d, x - offset)
    assert indices[:count].tolist() == (((x - offset).abs() > 0.5).nonzero()[:, 0] + 100).tolist()


def test_collect_may_write_over_its_input(instruction_set: str) -> None:
    x, offset = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0])
    indices = torch.empty(19, dtype=torch.int32)
    count = native().Operations(instruction_set, 1).collect(x, offset, torch.tensor([0.5]), 0, x, indices)
    assert x.tolist() == [0, 2, 3]
    assert indices[:count].tolist() == [1, 2]


# what does not fit is refused before anything is read


def loaded_matrix(operations: Any) -> Any:
    return operations.load_zigzag(random_bytes(2, 40, 144, seed=0), 300, 1, 64)


@pytest.mark.parametrize(
    ("rows", "span", "tile", "said"),
    [
        (513, 1, 64, "bands"),
        (256, 1, 64, "bands"),
        (0, 1, 64, "without rows"),
        (300, 0, 64, "span"),
        (300, 17, 64, "span"),
        (300, 1, 12, "tile"),
        (300, 1, 264, "tile"),
    ],
)
def test_a_matrix_of_other_sizes_is_refused(instruction_set: str, rows: int, span: int, tile: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        native().Operations(instruction_set, 1).load_zigzag(random_bytes(2, 40, 144, seed=0), rows, span, tile)


@pytest.mark.parametrize(
    ("x", "y", "indices", "count", "said"),
    [
        (39, 300, [0, 1], 2, "x:"),
        (40, 299, [0, 1], 2, "y:"),
        (40, 300, [0, 1], 3, "count"),
        (40, 300, [0, 1], -1, "count"),
        (40, 300, [0, 40], 2, "ascending"),
        (40, 300, [-1, 4], 2, "ascending"),
        (40, 300, [4, 4], 2, "ascending"),
    ],
)
def test_a_product_of_other_sizes_is_refused(
    instruction_set: str, x: int, y: int, indices: list[int], count: int, said: str
) -> None:
    operations = native().Operations(instruction_set, 1)
    at = torch.tensor(indices, dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        operations.zigzag_gemv(loaded_matrix(operations), torch.ones(x), at, count, torch.empty(y))


def test_batches_of_other_sizes_are_refused(instruction_set: str) -> None:
    operations = native().Operations(instruction_set, 1)
    for x, y in ((torch.ones(2, 39), torch.empty(2, 300)), (torch.ones(2, 40), torch.empty(3, 300))):
        with pytest.raises(ValueError, match="expected"):
            operations.zigzag_matmul(loaded_matrix(operations), x, y)


@pytest.mark.parametrize("ahead", [0, 2, 8, 32])
@pytest.mark.parametrize("block", ["Q4_K", "Q6_P"])
def test_a_loop_that_only_reads_is_timed_like_a_product(block: str, ahead: int) -> None:
    blocks, x = random_blocks((1280, 24), block).numpy(), torch.randn(1, 24)
    limit = torch.cat([torch.ones(24), torch.arange(5.0)]) if block == "Q6_P" else torch.zeros(1)
    number = PLANES_NUMBER if block == "Q6_P" else BLOCKS[block].gguf
    matrix = native().Operations("scalar", 1).load_zigzag(blocks, 1280, 2, 8, block=number)
    inputs = [matrix], x.numpy(), limit.numpy()
    assert all(time > 0 for time in native().time_gemv(*inputs, 2, 3, "scalar", ahead))
    with pytest.raises(ValueError, match="ahead: expected 0, 2, 8 or 32"):
        native().time_gemv(*inputs, 2, 3, "scalar", ahead + 1)


def test_an_unknown_instruction_set_or_no_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="altivec"):
        native().Operations("altivec", 1)
    with pytest.raises(ValueError, match="threads"):
        native().Operations("scalar", 0)


# memory


def test_pages_of_a_file_mapped_for_reading_are_given_back_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    expected = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    expected.tofile(file)
    mapped = np.memmap(file, dtype=np.uint8, mode="r")
    assert mapped.sum() == expected.sum()
    assert native().give_back(mapped[100:-100])
    assert np.array_equal(mapped, expected)


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_pages_that_may_have_been_written_stay(tmp_path: Path, mode: str) -> None:
    (tmp_path / "bytes").write_bytes(bytes(1 << 16))
    mapped = np.memmap(tmp_path / "bytes", dtype=np.uint8, mode=mode)
    mapped[:] = 7
    assert not native().give_back(mapped)
    assert (mapped == 7).all()


def test_memory_of_no_file_stays() -> None:
    x = torch.full((1 << 20,), 7, dtype=torch.uint8)
    assert not native().give_back(x)
    assert (x == 7).all()
