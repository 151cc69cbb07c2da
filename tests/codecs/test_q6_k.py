"""Q6_K: the decoder is gguf-py's bit for bit, the encoder never worse than ggml's."""

from pathlib import Path

import codec_cases
import ggml
import pytest
import torch
from codec_cases import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepack.codecs import q6_k, superblock
from sparsepack.errors import PackingError

needs_ggml = pytest.mark.skipif(ggml.library() is None, reason="llama-cpp-python is absent: no ggml to compare with")
seeds = st.integers(0, 2**32 - 1)


def error(weights: torch.Tensor) -> float:
    return relative_error(q6_k.decode(q6_k.encode(weights)), weights)


def ggml_error(weights: torch.Tensor) -> float:
    return relative_error(ggml.dequantize("q6_k", ggml.quantize("q6_k", weights)), weights)


def test_decoding_random_bytes_equals_gguf_py_bit_for_bit() -> None:
    blocks = torch.randint(0, 256, (64, 8 * 210), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    ours, theirs = q6_k.decode(blocks), ggml.dequantize("q6_k", blocks)
    finite = theirs.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours[finite].view(torch.int32), theirs[finite].view(torch.int32))


@given(st.binary(min_size=210, max_size=210))
@settings(deadline=None)
def test_any_bytes_decode(data: bytes) -> None:
    assert q6_k.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)).shape == (256,)


def test_decoding_to_a_narrower_type_rounds_the_float32_result() -> None:
    blocks = q6_k.encode(torch.randn(4, 512, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(q6_k.decode(blocks, torch.bfloat16), q6_k.decode(blocks).bfloat16())


@needs_ggml
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_error_is_never_above_ggml(name: str) -> None:
    weights = codec_cases.synthetic()[name]
    assert error(weights) <= ggml_error(weights) * (1 + 1e-6)


@needs_ggml
@pytest.mark.parametrize("model", ["books-26m-silu", "books-26m-relu", "stories-260k"])
def test_error_is_never_above_ggml_on_a_real_model(model: str, shared: Path) -> None:
    # benchmarks/codecs.py goes through all of them; the first and the last block keep this short.
    for name, weights in codec_cases.model_matrices(shared / "models" / model, skip=r"layers\.[1-6]\.|embed"):
        for order, matrix in (("rows", codec_cases.padded(weights)), ("zigzag", codec_cases.zigzag_order(weights))):
            assert error(matrix) <= ggml_error(matrix), f"{name}, {order}"


@given(
    seeds,
    st.lists(st.integers(1, 3), min_size=0, max_size=2),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None, max_examples=30)
def test_shapes_round_trip_and_normal_weights_lose_less_than_three_percent(
    seed: int, leading: list[int], blocks: int, dtype: torch.dtype
) -> None:
    weights = torch.randn(*leading, 256 * blocks, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed = q6_k.encode(weights)
    assert packed.shape == (*leading, 210 * blocks)
    assert packed.dtype == torch.uint8
    assert relative_error(q6_k.decode(packed), weights) < 0.03


@given(seeds, st.floats(-44, 38), st.floats(-10, 10))
@settings(deadline=None, max_examples=60)
def test_finite_weights_of_any_size_stay_finite(seed: int, exponent: float, offset: float) -> None:
    noise = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed)) + offset
    weights = (noise.double() * 10.0**exponent).clamp(-3.4e38, 3.4e38).float()
    decoded = q6_k.decode(q6_k.encode(weights))
    assert decoded.isfinite().all()
    # Never worse than leaving the superblock at zero, but for the rounding of a float16 d.
    assert (decoded.double() - weights).norm() <= weights.double().norm() * 1.001


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12), seeds)
@settings(deadline=None, max_examples=60)
def test_hand_made_weights_stay_finite(values: list[float], seed: int) -> None:
    order = torch.randint(len(values), (256,), generator=torch.Generator().manual_seed(seed))
    assert q6_k.decode(q6_k.encode(torch.tensor(values)[order])).isfinite().all()


def test_zeros_become_the_zero_of_the_format() -> None:
    blocks = q6_k.encode(torch.zeros(3, 512))
    assert not q6_k.decode(blocks).any()
    assert not blocks.view(-1, 210)[:, 192:].any(), "scales and d"


def test_weights_beyond_the_format_become_its_largest() -> None:
    decoded = q6_k.decode(q6_k.encode(torch.tensor([3e38, -3e38]).repeat_interleave(256)))
    assert decoded[0] == pytest.approx(q6_k.HIGHEST, rel=1e-3)
    assert decoded[-1] == pytest.approx(-q6_k.HIGHEST, rel=1e-3)


def test_bytes_depend_neither_on_chunks_nor_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(37, 1024, generator=torch.Generator().manual_seed(4))
    expected = torch.cat([q6_k.encode(row) for row in weights.view(-1, 256)])
    threads = torch.get_num_threads()
    for chunk in (256, 7 * 256, 1 << 18):
        monkeypatch.setattr(superblock, "CPU_CHUNK", chunk)
        assert torch.equal(q6_k.encode(weights).flatten(), expected)
    assert torch.get_num_threads() == threads


def test_input_is_left_as_it_was() -> None:
    weights = torch.randn(1, 256, generator=torch.Generator().manual_seed(5))
    before = weights.clone()
    q6_k.encode(weights)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weights = torch.zeros(2, 256)
    weights[1, 17] = value
    with pytest.raises(PackingError, match="1 of 512 are infinite or NaN"):
        q6_k.encode(weights)


def test_wrong_shapes_and_types_are_refused() -> None:
    with pytest.raises(PackingError, match="multiple of 256"):
        q6_k.encode(torch.zeros(4, 255))
    with pytest.raises(PackingError, match=r"torch\.int32"):
        q6_k.encode(torch.zeros(4, 256, dtype=torch.int32))
    with pytest.raises(PackingError, match="multiple of 210"):
        q6_k.decode(torch.zeros(145, dtype=torch.uint8))
    with pytest.raises(PackingError, match="uint8"):
        q6_k.decode(torch.zeros(210))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_cuda_decodes_the_same_and_encodes_as_well(name: str) -> None:
    weights = codec_cases.synthetic()[name]
    blocks = q6_k.encode(weights)
    assert torch.equal(q6_k.decode(blocks.cuda()).cpu(), q6_k.decode(blocks))
    on_cuda = q6_k.encode(weights.cuda())
    assert torch.equal(on_cuda, q6_k.encode(weights.cuda()))
    assert relative_error(q6_k.decode(on_cuda).cpu(), weights) <= error(weights) * 1.001
