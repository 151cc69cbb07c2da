"""The Triton kernel writes what the CPU writes, whatever the order, the strides and the size of the matrix.

Without a CUDA device, TRITON_INTERPRET=1 runs the kernel on CPU tensors, slowly.
"""

import os

import codec_cases
import pytest
import torch
from codec_cases import relative_error
from devices import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack import triton_kernels
from sparsepack.formats.blocks import q4_k, q4_k_device
from sparsepack.formats.orders import zigzag

pytest.importorskip("triton")

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CUDA and not os.environ.get("TRITON_INTERPRET"), reason="no CUDA device"),
]
types = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Zigzag superblocks of a matrix on the device, by the kernel."""
    from sparsepack.formats.blocks import q4_k_triton

    blocks = q4_k_triton.encode(weight)
    assert blocks.device == weight.device
    return blocks.cpu()


def encoded(weights: torch.Tensor) -> torch.Tensor:
    """Superblocks along rows: [..., K] -> [..., K / 256 * 144]."""
    return packed(weights.to(DEVICE).reshape(-1, 256).t()).view(*weights.shape[:-1], -1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_bytes_are_those_of_the_cpu(name: str) -> None:
    weights = codec_cases.synthetic()[name]
    expected = q4_k.encode(weights)
    assert torch.equal(encoded(weights), expected)
    in_columns = weights.view(-1, 256).t().contiguous().to(DEVICE)
    assert torch.equal(packed(in_columns), expected.view(-1, 144))


@given(st.integers(1, 700), st.integers(1, 100), types, st.booleans())
@settings(deadline=None, max_examples=40)
def test_zigzag_of_any_shape(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> None:
    weight = normal(columns, rows).t() if transposed else normal(rows, columns)
    weight = weight.to(dtype)
    assert torch.equal(packed(weight.to(DEVICE)), q4_k.encode(codec_cases.zigzag_order(weight)))


def test_strided_matrices_need_no_copy() -> None:
    whole = normal(1200, 96).bfloat16().to(DEVICE)
    for weight in (whole[::2, 1::3], whole[5:700, 3:50], whole[:1].expand(300, 96), whole[:, :1], whole.t()[::5]):
        assert torch.equal(packed(weight), q4_k.encode(codec_cases.zigzag_order(weight.cpu())))


def test_nothing_packs_to_nothing() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert packed(torch.zeros(shape, device=DEVICE)).numel() == 0


def test_zeros_become_zero_bytes_and_so_do_weights_too_small_for_the_format() -> None:
    weights = normal(3, 1024, seed=3)
    weights[1] = 0
    weights[2, 256:512] = 1e-12
    blocks = encoded(weights).view(3, 4, 144)
    assert not blocks[1].any()
    assert not blocks[2, 1].any()
    assert blocks[0].any(1).all()


def test_weights_beyond_the_format_become_its_largest() -> None:
    decoded = q4_k.decode(encoded(torch.tensor([3e38, -3e38]).repeat_interleave(256)))
    assert decoded[0] == pytest.approx(q4_k.HIGHEST, rel=1e-3)
    assert decoded[-1] == pytest.approx(q4_k.LOWEST, rel=1e-3)


@given(st.integers(0, 2**32 - 1), st.floats(-44, 38), st.floats(-10, 10))
@settings(deadline=None, max_examples=60)
def test_finite_weights_of_any_size_are_encoded_as_well_as_by_the_cpu(
    seed: int, exponent: float, offset: float
) -> None:
    weights = ((normal(2, 256, seed=seed) + offset).double() * 10.0**exponent).clamp(-3.4e38, 3.4e38).float()
    decoded = q4_k.decode(encoded(weights)).double()
    assert decoded.isfinite().all()
    error = (q4_k.decode(q4_k.encode(weights)).double() - weights).norm()
    assert (decoded - weights).norm() <= error * 1.0005


@needs_cuda
def test_encode_and_pack_use_the_kernel_on_cuda() -> None:
    weight = normal(600, 512).bfloat16()
    assert torch.equal(q4_k.encode(weight.cuda()).cpu(), q4_k.encode(weight))
    assert torch.equal(zigzag.pack(weight.cuda()).cpu(), zigzag.pack(weight))


@needs_cuda
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_cuda_without_the_kernel_encodes_nearly_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = codec_cases.synthetic()[name]
    monkeypatch.setattr(q4_k_device, "encode", lambda weight: None)
    found = relative_error(q4_k.decode(q4_k.encode(weights.cuda())).cpu(), weights)
    # CUDA's argmax takes any of several equally good grids: 1.3 % on outlier columns, where ggml is 12 % worse. Ternary
    # weights are all but exact, their error is one rounding of d.
    assert found <= max(relative_error(q4_k.decode(q4_k.encode(weights)), weights) * 1.02, 1e-3)


@needs_cuda
def test_a_kernel_that_does_not_compile_is_reported_once_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsepack.formats.blocks import q4_k_triton

    def fail(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(q4_k_triton, "encode", fail)
    monkeypatch.setattr(triton_kernels, "FAILED", set())
    weight = normal(256, 256).cuda()
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        blocks = zigzag.pack(weight)
    assert relative_error(zigzag.unpack(blocks, 256), weight) < 0.09
    assert torch.equal(zigzag.pack(weight), blocks)


@needs_cuda
def test_matrices_of_more_than_two_to_the_31_weights() -> None:
    rows, columns = 2**16 + 300, 2**15 + 256
    weight = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    in_columns, in_rows = zigzag.pack(weight), q4_k.encode(weight)
    corner = weight[-300:, -256:].cpu()
    assert torch.equal(in_columns[-2:, -256:].cpu(), zigzag.pack(corner))
    assert torch.equal(in_rows[-300:, -144:].cpu(), q4_k.encode(corner))
