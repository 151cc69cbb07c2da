"""The C++ encoders write the oracles' bytes, Q4_K's with error feedback, too, on every instruction set here."""

import codec_cases
import pytest
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import gptq
from sparsepack.formats.blocks import cpu_encoder, q4_k_device
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.cpu import machine

try:
    SETS = machine.instruction_sets()
except UserError:
    SETS = []

BLOCKS = ("Q4_K", "Q6_K", "Q6_P")

pytestmark = pytest.mark.skipif(not SETS, reason="the CPU kernels were not built")


@pytest.fixture(params=SETS or ["none"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(machine.FORCED, request.param)
    return str(request.param)


def oracle(block: str, weight: Tensor) -> Tensor:
    """Zigzag superblocks in plain torch: float32 [rows, columns] -> uint8 [bands * columns, bytes]."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 256))
    superblocks = padded.view(-1, 256, weight.shape[1]).transpose(1, 2).reshape(-1, 256)
    return zigzag.codec_of(block).encode_chunk(superblocks, 3e38)


def normal(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_bytes_are_those_of_plain_torch(name: str, block: str, instruction_set: str) -> None:
    weight = codec_cases.synthetic()[name].t()[:512, :40]
    assert torch.equal(cpu_encoder.encode_on_cpu(block, weight, None), oracle(block, weight))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (255, 3), (256, 65), (257, 530), (700, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_of_any_shape_and_type(
    shape: tuple[int, int], dtype: torch.dtype, block: str, instruction_set: str
) -> None:
    weight = normal(shape).to(dtype)
    assert torch.equal(cpu_encoder.encode_on_cpu(block, weight, None), oracle(block, weight.float()))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_divided_first_whatever_the_strides(dtype: torch.dtype, block: str, instruction_set: str) -> None:
    weight, divisors = normal((40, 300)).to(dtype).t()[::2], normal((300, 1)).abs()[::2, 0] + 0.1
    expected = oracle(block, weight.float() / divisors[:, None])
    assert torch.equal(cpu_encoder.encode_on_cpu(block, weight, divisors), expected)


@pytest.mark.parametrize("block", ["Q4_K", "Q6_P"])
@pytest.mark.parametrize("shape", [(1, 1), (255, 3), (256, 65), (700, 130)])
def test_bands_decode_as_in_plain_torch(block: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(shape) * torch.logspace(-9, 3, shape[1])  # scales of half precision that are subnormal, too
    blocks = zigzag.pack(weight, block)
    found = zigzag.unpack(blocks, len(weight), block=block)
    monkeypatch.setattr(cpu_encoder, "kernels", lambda: None)
    assert torch.equal(found, zigzag.unpack(blocks, len(weight), block=block))


@pytest.mark.parametrize("shape", [(1, 1), (63, 5), (65, 31), (200, 33), (129, 64)])
def test_rows_and_columns_are_balanced_as_in_plain_torch(
    shape: tuple[int, int], instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(shape) * torch.logspace(-6, 6, shape[0])[:, None]
    weight[shape[0] // 2 :: 7] = 0
    weight[:, 3::11] = 0
    found = zigzag.balanced_squares(weight, 1.0)
    monkeypatch.setattr(cpu_encoder, "kernels", lambda: None)
    assert torch.allclose(found, zigzag.balanced_squares(weight, 1.0), rtol=1e-12)


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


@pytest.mark.parametrize("block", BLOCKS)
def test_threads_change_nothing(block: str, instruction_set: str) -> None:
    weight = normal((600, 700))
    threads, made, balanced = torch.get_num_threads(), [], []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(cpu_encoder.encode_on_cpu(block, weight, None))
            balanced.append(zigzag.balanced_squares(weight, 1.0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*made)
    assert torch.equal(*balanced)
