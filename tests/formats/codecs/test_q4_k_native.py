"""The C++ encoder writes the oracle's bytes, with error feedback or without, on every instruction set here."""

import codec_cases
import pytest
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import gptq
from sparsepack.formats.blocks import q4_k_device
from sparsepack.formats.blocks.q4_k import encode_columns
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.cpu import machine

try:
    SETS = machine.instruction_sets()
except UserError:
    SETS = []

pytestmark = pytest.mark.skipif(not SETS, reason="the CPU kernels were not built")


@pytest.fixture(params=SETS or ["none"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(machine.FORCED, request.param)
    return str(request.param)


def oracle(weight: Tensor) -> Tensor:
    """Zigzag superblocks in plain torch: float32 [rows, columns] -> uint8 [bands * columns, 144]."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 256))
    columns = padded.view(-1, 256, weight.shape[1]).transpose(0, 1).reshape(256, -1)
    return encode_columns(columns.contiguous(), beyond=True).t()


@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_bytes_are_those_of_plain_torch(name: str, instruction_set: str) -> None:
    weight = codec_cases.synthetic()[name].t()[:512, :40]
    assert torch.equal(q4_k_device.encode(weight), oracle(weight))


@pytest.mark.parametrize("shape", [(1, 1), (255, 3), (256, 65), (257, 130), (700, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_of_any_shape_and_type(shape: tuple[int, int], dtype: torch.dtype, instruction_set: str) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    assert torch.equal(q4_k_device.encode(weight), oracle(weight.float()))


@pytest.mark.parametrize(("columns", "rows"), [(1, 5), (31, 256), (64, 300)])
def test_errors_are_fed_back_as_column_by_column(columns: int, rows: int, instruction_set: str) -> None:
    """Beside the plain loop: the same bytes, since both subtract each error at once; first > 0 within a larger U."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, rows, generator=generator)
    first, whole = 7, columns + 20
    factor = torch.randn(whole, whole, generator=generator).mul_(0.1).triu_()
    factor.diagonal().abs_().add_(0.5)
    block, blocks = weight.clone(), torch.zeros(columns, zigzag.bands(rows), 144, dtype=torch.uint8)
    errors = q4_k_device.quantise_block(block, factor, first, blocks)
    assert errors is not None
    left, here = weight.clone(), factor[first : first + columns, first : first + columns]
    for number in range(columns):
        packed = gptq.pack_column(left[number])
        after = gptq.unpack_column(packed, rows)
        assert torch.equal(blocks[number], packed)
        assert torch.equal(block[number], after)
        error = (left[number] - after) / here[number, number]
        assert torch.equal(errors[number], error)
        left[number + 1 :] -= here[number, number + 1 :, None] * error


def test_threads_change_nothing(instruction_set: str) -> None:
    weight = torch.randn(600, 200, generator=torch.Generator().manual_seed(3))
    threads, made = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(q4_k_device.encode(weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*made)
