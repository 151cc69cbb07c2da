"""Q4_K, Q5_0, Q6_K and Q8_0: the decoders are gguf-py's bit for bit, the encoders never worse than ggml's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import codec_cases
import ggml
import pytest
import torch
from codec_cases import relative_error
from devices import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q4_k, q5_0, q6_k, q8_0, superblock

needs_ggml = pytest.mark.skipif(ggml.library() is None, reason="llama-cpp-python is absent: no ggml to compare with")
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Codec:
    """One of them, with what its tests expect of it."""

    type: str
    encode: Callable[[Tensor], Tensor]
    decode: Callable[..., Tensor]
    block: int
    block_bytes: int
    normal_error: float  # more than normally distributed weights lose
    lowest: float
    highest: float

    def error(self, weights: Tensor) -> float:
        return relative_error(self.decode(self.encode(weights)), weights)

    def ggml_error(self, weights: Tensor) -> float:
        return relative_error(ggml.dequantize(self.type, ggml.quantize(self.type, weights)), weights)


CODECS = (
    Codec("q4_k", q4_k.encode, q4_k.decode, 256, 144, 0.09, q4_k.LOWEST, q4_k.HIGHEST),
    Codec("q6_k", q6_k.encode, q6_k.decode, 256, 210, 0.03, -q6_k.HIGHEST, q6_k.HIGHEST),
    Codec("q5_0", q5_0.encode, q5_0.decode, 32, 22, 0.06, q5_0.LOWEST, q5_0.HIGHEST),
    Codec("q8_0", q8_0.encode, q8_0.decode, 32, 34, 0.01, -q8_0.HIGHEST, q8_0.HIGHEST),
)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=[codec.type for codec in CODECS])


@every_codec
def test_decoding_random_bytes_equals_gguf_py_bit_for_bit(codec: Codec) -> None:
    blocks = torch.randint(
        0, 256, (64, 8 * codec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    ours, theirs = codec.decode(blocks), ggml.dequantize(codec.type, blocks)
    finite = theirs.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours[finite].view(torch.int32), theirs[finite].view(torch.int32))


@every_codec
@given(st.data())
@settings(deadline=None)
def test_any_bytes_decode(codec: Codec, given_bytes: st.DataObject) -> None:
    data = given_bytes.draw(st.binary(min_size=codec.block_bytes, max_size=codec.block_bytes))
    assert codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)).shape == (codec.block,)


def test_six_bit_numbers_of_q4_k_go_in_and_out() -> None:
    numbers = torch.randint(0, 64, (2, 32, 8), dtype=torch.uint8)
    blocks = torch.full((32, 144), 255, dtype=torch.uint8)
    q4_k.set_scales_and_mins(blocks, *numbers)
    assert torch.equal(torch.stack(q4_k.scales_and_mins(blocks)), numbers)
    assert bool((blocks[:, [*range(4), *range(16, 144)]] == 255).all())


@every_codec
def test_decoding_to_a_narrower_type_rounds_the_float32_result(codec: Codec) -> None:
    blocks = codec.encode(torch.randn(4, 512, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(codec.decode(blocks, torch.bfloat16), codec.decode(blocks).bfloat16())


@every_codec
@needs_ggml
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_error_is_never_above_ggml(codec: Codec, name: str) -> None:
    weights = codec_cases.synthetic()[name]
    theirs = codec.ggml_error(weights)
    assert codec.error(weights) <= theirs * (1 + 1e-6) or not math.isfinite(theirs)  # ggml makes d infinite


@every_codec
@needs_ggml
@pytest.mark.parametrize(
    "model",
    ["stories-260k", *(pytest.param(name, marks=pytest.mark.long) for name in ("books-26m-silu", "books-26m-relu"))],
)
def test_error_is_never_above_ggml_on_a_real_model(codec: Codec, model: str, shared: Path) -> None:
    # benchmarks/codecs.py goes through all of them; the first and the last block keep this short.
    for name, weights in codec_cases.model_matrices(shared / "models" / model, skip=r"layers\.[1-6]\.|embed"):
        for order, matrix in (("rows", codec_cases.padded(weights)), ("zigzag", codec_cases.zigzag_order(weights))):
            assert codec.error(matrix) <= codec.ggml_error(matrix), f"{name}, {order}"


@every_codec
@given(
    seeds,
    st.lists(st.integers(1, 3), min_size=0, max_size=2),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None, max_examples=30)
def test_shapes_round_trip_and_normal_weights_lose_little(
    codec: Codec, seed: int, leading: list[int], blocks: int, dtype: torch.dtype
) -> None:
    weights = torch.randn(*leading, 256 * blocks, generator=torch.Generator().manual_seed(seed)).to(dtype)
    packed = codec.encode(weights)
    assert packed.shape == (*leading, 256 * blocks // codec.block * codec.block_bytes)
    assert packed.dtype == torch.uint8
    assert relative_error(codec.decode(packed), weights) < codec.normal_error


@every_codec
@given(seeds, st.floats(-44, 38), st.floats(-10, 10))
@settings(deadline=None, max_examples=60)
def test_finite_weights_of_any_size_stay_finite(codec: Codec, seed: int, exponent: float, offset: float) -> None:
    noise = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed)) + offset
    weights = (noise.double() * 10.0**exponent).clamp(-3.4e38, 3.4e38).float()
    decoded = codec.decode(codec.encode(weights))
    assert decoded.isfinite().all()
    # Never worse than leaving the superblock at zero, but for the rounding of a float16 d.
    assert (decoded.double() - weights).norm() <= weights.double().norm() * 1.001


@every_codec
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12), seeds)
@settings(deadline=None, max_examples=60)
def test_hand_made_weights_stay_finite(codec: Codec, values: list[float], seed: int) -> None:
    order = torch.randint(len(values), (256,), generator=torch.Generator().manual_seed(seed))
    assert codec.decode(codec.encode(torch.tensor(values)[order])).isfinite().all()


def test_zeros_become_zero_bytes_in_q4_k() -> None:
    assert not q4_k.encode(torch.zeros(3, 512)).any()


def test_zeros_become_the_only_zero_of_q6_k() -> None:
    blocks = q6_k.encode(torch.zeros(3, 512))
    assert not q6_k.decode(blocks).any()
    assert not blocks.view(-1, 210)[:, 192:].any(), "scales and d"


def test_a_dead_superblock_beside_a_live_one_is_zero_bytes_in_q4_k() -> None:
    weights = torch.randn(1, 512, generator=torch.Generator().manual_seed(3))
    weights[:, 256:] = 1e-12
    assert not q4_k.encode(weights)[:, 144:].any()


@every_codec
def test_weights_beyond_the_format_become_its_largest(codec: Codec) -> None:
    decoded = codec.decode(codec.encode(torch.tensor([3e38, -3e38]).repeat_interleave(256)))
    assert decoded[0] == pytest.approx(codec.highest, rel=1e-3)
    assert decoded[-1] == pytest.approx(codec.lowest, rel=1e-3)


@every_codec
def test_bytes_depend_neither_on_chunks_nor_on_threads(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(15, 1024, generator=torch.Generator().manual_seed(4))
    expected = torch.cat([codec.encode(row) for row in weights.view(-1, codec.block)])
    for threads, chunk in product((1, 2), (256, 7 * 256, 1 << 18)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(superblock, "CPU_WEIGHTS_AT_ONCE", chunk)
        assert torch.equal(codec.encode(weights).flatten(), expected)
        assert torch.get_num_threads() == threads


@every_codec
def test_input_is_left_as_it_was(codec: Codec) -> None:
    weights = torch.randn(1, 256, generator=torch.Generator().manual_seed(5))
    before = weights.clone()
    codec.encode(weights)
    assert torch.equal(weights, before)


@every_codec
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(codec: Codec, value: float) -> None:
    weights = torch.zeros(2, 256)
    weights[1, 17] = value
    with pytest.raises(PackingError, match="1 of 512 are infinite or NaN"):
        codec.encode(weights)


@every_codec
def test_wrong_shapes_and_types_are_refused(codec: Codec) -> None:
    with pytest.raises(PackingError, match=f"multiple of {codec.block}"):
        codec.encode(torch.zeros(4, 255))
    with pytest.raises(PackingError, match=r"torch\.int32"):
        codec.encode(torch.zeros(4, 256, dtype=torch.int32))
    with pytest.raises(PackingError, match=f"multiple of {codec.block_bytes}"):
        codec.decode(torch.zeros(145, dtype=torch.uint8))
    with pytest.raises(PackingError, match="uint8"):
        codec.decode(torch.zeros(codec.block_bytes))


@every_codec
@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", codec_cases.synthetic())
def test_cuda_decodes_the_same_and_encodes_as_well(codec: Codec, name: str) -> None:
    weights = codec_cases.synthetic()[name]
    blocks = codec.encode(weights)
    assert torch.equal(codec.decode(blocks.cuda()).cpu(), codec.decode(blocks))
    on_cuda = codec.encode(weights.cuda())
    assert torch.equal(on_cuda, codec.encode(weights.cuda()))
    assert relative_error(codec.decode(on_cuda).cpu(), weights) <= codec.error(weights) * 1.001
