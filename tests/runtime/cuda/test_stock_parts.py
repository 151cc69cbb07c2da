"""Parts of stock blocks by kernels are what torch's kernels give one after the other, to the last bit."""

from contextlib import nullcontext

import pytest
import torch
from emulated import needs_compiler
from torch import nn

from sparsepack.models.hf_model.fused import apply_rope_by_torch
from sparsepack.runtime.cuda import calibration
from sparsepack.runtime.cuda.calibration import apply_rope, norm_rows, silu_times

on_gpu = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def emulated_parts(emulation, monkeypatch):
    """Parts of stock blocks run by the processor, on tensors that it has."""
    for name in ("kernel", "launch"):
        monkeypatch.setattr(calibration, name, getattr(emulation, name))
    monkeypatch.setattr(calibration, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    emulation.launches = 0
    return emulation


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (3 * torch.randn(shape)).to(dtype)


def check_heads(dtype: torch.dtype, device: str, tables: int, windows: int, tokens: int, channels: int) -> None:
    query, key = (
        random(dtype, windows, tokens, heads, channels).to(device).transpose(1, 2) for heads in (6, 2)
    )  # as the model makes them
    angles = [random(dtype, tables, tokens, channels).sin().to(device) for _ in range(2)]
    found = apply_rope(query, key, *angles)
    assert found is not None
    for made, x in zip(found, (query, key), strict=True):
        expected = apply_rope_by_torch(x, *angles)
        assert strides(made) == strides(expected)
        assert torch.equal(made, expected)


def strides(x: torch.Tensor) -> list[int]:
    """Where the values lie: a dimension of one value may have any stride."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def check_silu(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> None:
    gate, up = (random(dtype, *shape).to(device) for _ in range(2))
    made = silu_times(gate, up)
    assert made is not None
    assert torch.equal(made, nn.functional.silu(gate) * up)


def normed_by_torch(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    normed = nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5)
    return normed if weight is None else weight * normed


def check_norm(dtype: torch.dtype, device: str, columns: int, weighted: bool, left_out: int) -> None:
    x = random(dtype, 2, 7, columns).to(device)[:, left_out:]
    weight = random(dtype, columns).to(device) if weighted else None
    made = norm_rows(x, 1e-5, weight)
    assert made is not None
    assert made.is_contiguous()
    torch.testing.assert_close(made, normed_by_torch(x, weight), rtol=torch.finfo(dtype).eps * (1 + weighted), atol=0)


@needs_compiler
class TestByTheProcessor:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_heads_are_turned(self, emulated_parts, dtype):
        check_heads(dtype, "cpu", 1, 2, 3, 48)
        check_heads(dtype, "cpu", 2, 2, 3, 16)
        assert emulated_parts.launches == 2

    def test_a_gate_is_multiplied(self, emulated_parts):
        dtype = torch.bfloat16
        # exp of the compilers' libraries differs in the last bit of float32, which 16 bits seldom show
        gate, up = (random(dtype, 3, 1048) for _ in range(2))
        made = silu_times(gate, up)
        exact = (nn.functional.silu(gate.double())).to(dtype) * up
        assert (made == exact).float().mean() > 0.99
        torch.testing.assert_close(made, exact, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)

    @pytest.mark.parametrize(("columns", "weighted", "left_out"), [(520, True, 0), (520, False, 5), (1000, True, 6)])
    def test_rows_are_normed(self, emulated_parts, columns, weighted, left_out):
        check_norm(torch.bfloat16, "cpu", columns, weighted, left_out)

    def test_what_kernels_do_not_take_is_left(self, emulated_parts):
        heads = random(torch.bfloat16, 1, 2, 3, 24)
        assert apply_rope(heads, heads, heads[:, 0], heads[:, 0]) is None  # halves of twelve
        heads = random(torch.bfloat16, 1, 2, 3, 32)
        assert apply_rope(heads, heads, heads[:, 0, :, :16], heads[:, 0, :, :16]) is None  # a part of each head
        assert apply_rope(heads, heads, heads[:, 0].float(), heads[:, 0].float()) is None
        assert silu_times(heads, heads[:, :1]) is None
        assert silu_times(heads[..., :4], heads[..., :4]) is None
        assert norm_rows(heads, 1e-5) is None
        assert norm_rows(heads[0].float(), 1e-5) is None
        assert emulated_parts.launches == 0


def test_without_a_gpu_all_is_left_to_stock_code():
    heads = random(torch.bfloat16, 1, 2, 3, 32)
    assert apply_rope(heads, heads, heads[:, 0], heads[:, 0]) is None
    assert silu_times(heads, heads) is None
    assert norm_rows(heads[0], 1e-5) is None


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tables", "windows", "tokens", "channels"), [(1, 2, 333, 128), (3, 3, 70, 80), (1, 1, 1, 16)])
def test_heads_are_turned_as_by_torch(dtype, tables, windows, tokens, channels):
    check_heads(dtype, "cuda", tables, windows, tokens, channels)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 511, 14336), (1, 8), (3, 1048)], ids=str)
def test_a_gate_is_multiplied_as_by_torch(dtype, shape):
    check_silu(dtype, "cuda", shape)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("columns", "weighted", "left_out"), [(4096, True, 0), (4096, False, 4), (16384, True, 1)])
def test_rows_are_normed_as_by_torch(dtype, columns, weighted, left_out):
    check_norm(dtype, "cuda", columns, weighted, left_out)


@on_gpu
def test_all_parts_are_trusted_on_a_gpu():
    parts = calibration.checked_parts(torch.device("cuda", 0))
    assert (parts.apply_rope, parts.silu_times, parts.norm_rows) == (apply_rope, silu_times, norm_rows)


def test_a_part_that_gives_something_else_is_left_to_stock_code(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "apply_rope", lambda query, key, *_: (query, key))
    monkeypatch.setattr(calibration, "silu_times", lambda gate, up: nn.functional.silu(gate) * up)
    monkeypatch.setattr(calibration, "norm_rows", lambda x, _, weight=None: normed_by_torch(x, weight))
    calibration.checked_parts.cache_clear()
    try:
        parts = calibration.checked_parts(torch.device("cpu"))
    finally:
        calibration.checked_parts.cache_clear()
    assert parts.apply_rope is calibration.OWN_CODE.apply_rope
    assert parts.silu_times is calibration.silu_times
    assert parts.norm_rows is calibration.norm_rows
    assert "rotary embeddings are computed by PyTorch's kernels" in capsys.readouterr().err
