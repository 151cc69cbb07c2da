"""What prefill is made of: rows in float16 with a factor each, products, heads, and attention to a cache."""

import pytest
import torch
from operations_for_tests import normal, packed
from pairwise import pairwise
from torch import Tensor

from sparsepack.formats.matrix import decode_matrix
from sparsepack.models.blocks import CLAMPED_SWIGLU
from sparsepack.runtime.cuda.attention import attention
from sparsepack.runtime.cuda.attention.attention import AttentionParameters, prefill_attention
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.gemm_fp16 import (
    Product,
    ScaledFp16,
    add,
    gated,
    multiply,
    new_scratch,
    split_heads,
    to_scaled_fp16,
)
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference

on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
anywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ACTIVATIONS = [*reference.ACTIVATION_FUNCTIONS, CLAMPED_SWIGLU]
"""In the order of their numbers."""
EPS = 1e-5
WIDTHS = [1, 63, 64, 172, 513, 2048, 4095, 14336]


def product_of(rows: int, width: int, bias: bool, device: str) -> Product:
    factor = 2.0 ** torch.arange(rows).sub(rows // 2)
    return Product(
        normal(rows, width, seed=1).to(device),
        factor.to(device),
        0.25,
        normal(width, seed=2).to(device) if bias else None,
    )


def put_together(product: Product) -> Tensor:
    y = product.sums.cpu().double() * product.factor.cpu()[:, None] * product.inverse
    return y if product.bias is None else y + product.bias.cpu()


def assert_is(scaled: ScaledFp16, expected: Tensor) -> None:
    """Every row to the rounding of float16, and scaled as promised."""
    values, factor = scaled.values.cpu(), scaled.factor.cpu()
    found, expected = values.double() * factor[:, None].double(), expected.double()
    assert ((found - expected).norm(dim=1) <= 6e-4 * expected.norm(dim=1)).all()
    largest = values.float().abs().amax(1)
    assert ((largest >= 2**14 * 0.999) & (largest <= 2**15)).all()
    assert (torch.frexp(factor).mantissa == 0.5).all()


def test_weights_scaled_to_float16_are_near_its_largest_whether_steps_or_minimums_are_larger() -> None:
    for d, dmin in ((0.0, 1.0), (1.0, 0.0), (1e-9, 3e4)):
        largest = zigzag.LARGEST_FACTOR * max(15 * d, dmin) * zigzag.fp16_scale(d, dmin)
        assert 2**13 < largest <= 2**14


@on_gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_halved_as_they_are(device: str, width: int) -> None:
    x = normal(5, width) * torch.tensor([1e-20, 1e-3, 1, 1e4, 1e20])[:, None]
    assert_is(to_scaled_fp16(x.to(device)), x)


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_added_comes_before_the_norm_and_stays(device: str, width: int, norm: bool, bias: bool) -> None:
    x, weight, update = normal(7, width), 1 + 0.1 * normal(width, seed=3), product_of(7, width, bias, device)
    expected, on_device = x + put_together(update).float(), x.clone().to(device)
    scaled = to_scaled_fp16(on_device, update, weight.to(device) if norm else None, EPS)
    assert torch.allclose(on_device.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert_is(scaled, reference.rms_norm(expected, weight, EPS) if norm else expected)
    on_device = x.clone().to(device)
    add(on_device, update)
    assert torch.allclose(on_device.cpu(), expected, rtol=1e-5, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_added_may_be_normed_first(device: str, width: int, norm: bool, bias: bool) -> None:
    x, weight, of_update = normal(7, width), 1 + 0.1 * normal(width, seed=3), 1 + 0.1 * normal(width, seed=4)
    update = product_of(7, width, bias, device)
    expected = x + reference.rms_norm(put_together(update).float(), of_update, EPS)
    on_device = x.clone().to(device)
    scaled = to_scaled_fp16(on_device, update, weight.to(device) if norm else None, EPS, of_update.to(device))
    assert torch.allclose(on_device.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert_is(scaled, reference.rms_norm(expected, weight, EPS) if norm else expected)
    on_device = x.clone().to(device)
    add(on_device, update, of_update.to(device), EPS)
    assert torch.allclose(on_device.cpu(), expected, rtol=1e-5, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 172, 513, 14336])
def test_gate_and_up_become_one(device: str, width: int, activation: str, bias: bool) -> None:
    stacked = product_of(6, 2 * width, bias, device)
    gate, up = put_together(stacked).chunk(2, dim=1)
    expected = reference.gated(activation, gate, up)
    expected[expected.abs() < 1e-30] = 0
    number = ACTIVATIONS.index(activation)
    scaled = gated(stacked.part(0, width), stacked.part(width, width), number)
    rows = expected.abs().amax(1) > 0
    assert_is(ScaledFp16(scaled.values[rows.to(device)], scaled.factor[rows.to(device)]), expected[rows])


@on_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(device: str, bad: float) -> None:
    x = normal(3, 172)
    x[1, 5] = bad
    for norm in (None, torch.ones(172, device=device)):
        values = to_scaled_fp16(x.to(device), norm=norm, eps=EPS).values.cpu()
        assert torch.isfinite(values).all(1).tolist() == [True, False, True]
    assert not to_scaled_fp16(torch.zeros(2, 172, device=device)).values.any()


@on_gpu
def test_rows_that_begin_anywhere(device: str) -> None:
    storage = normal(1 + 3 * 64).to(device)
    x = storage[1:].view(3, 64)
    assert_is(to_scaled_fp16(x), x.cpu())


@on_gpu
@pytest.mark.parametrize(("bands", "gate"), [(1, False), *((n, gate) for n in (2, 4, 8) for gate in (False, True))])
@pytest.mark.parametrize("shape", [(512, 64), (2560, 1280), (3072, 97)])
@pytest.mark.parametrize(("positions", "bound"), [(50, 6e-4), (80, 4e-4)])
def test_products_come_within_the_rounding_of_float16(
    device: str,
    positions: int,
    bound: float,
    shape: tuple[int, int],
    bands: int,
    gate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few positions scales are rounded, too."""
    stored = packed(*shape)
    x, bias = normal(positions, shape[1], seed=1), normal(shape[0], seed=2)
    expected = x.double() @ decode_matrix(stored).double().T + bias
    matrix = zigzag.load_zigzag(stored, device, CudaTileConfig(bands, 8, 8, 1), gate=gate)
    torch.cuda.synchronize()
    for room in (1 << 28, 3 * 512 * shape[1]):
        monkeypatch.setattr(zigzag, "SCRATCH_BYTES", room)
        scratch = new_scratch([matrix], matrix.blocks.device)
        assert scratch.nbytes <= room
        y = torch.zeros(len(x), shape[0], device=device)
        add(y, multiply(matrix, to_scaled_fp16(x.to(device)), scratch, bias.to(device)))
        assert (y.cpu() - expected).norm() < bound * expected.norm()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turned"),
    [(4, 2, 64, 64), (3, 3, 24, 24), (7, 1, 8, 6), (2, 1, 256, 256), (1, 1, 2, 2), (3, 1, 128, 96), (2, 2, 96, 2)],
)
def test_heads_are_rotated_and_appended(
    device: str, heads: int, kv_heads: int, head_dim: int, turned: int, normed: bool, dtype: torch.dtype, others: bool
) -> None:
    """others: neighbours turn, gates stand behind queries, and these grow."""
    first, context, rows = 4, 19, 9
    qkv = product_of(rows, ((1 + others) * heads + 2 * kv_heads) * head_dim, normed, device)
    keys, values = (torch.full((2, kv_heads, context, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    cos, sin = reference_attention.rotary_table(normal(turned // 2, seed=3), 1.3, context)
    norms = [1 + 0.1 * normal(head_dim, seed=n) for n in (4, 5)] if normed else [None, None]
    layer = LayerAttention(0, *(None if norm is None else norm.to(device) for norm in norms), gated=others)
    growth = torch.linspace(1, 2, context)
    more = {"neighbours": True, "query_scale": growth.to(device)} if others else {}
    shape = AttentionShape(heads, kv_heads, head_dim, EPS, cos.to(device), sin.to(device), (layer,), 2, **more)
    q = split_heads(AttentionParameters(shape, layer, keys, values), qkv, first, sequence=1)
    here = slice(first, first + rows)
    of_heads = put_together(qkv).float().view(rows, -1, head_dim).transpose(0, 1)
    queries, *rest = of_heads.split([(1 + others) * heads, kv_heads, kv_heads])
    parts = [queries[:: 1 + others], *rest]
    rotated = []
    for part, norm in zip(parts, norms, strict=False):
        x = part if norm is None else reference.rms_norm(part, norm, EPS)
        rotated.append(reference_attention.rotate(x, cos[here], sin[here], others))
    rotated[0] = rotated[0] * growth[here, None] if others else rotated[0]
    expected = [rotated[0].transpose(0, 1), rotated[1], parts[2]]
    for found, wanted in zip((q, keys[1, :, here], values[1, :, here]), expected, strict=True):
        bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
        assert ((found.cpu().float() - wanted).abs() <= bound * wanted.abs() + 1e-5 * wanted.abs().max()).all()
    for cached in (keys, values):
        assert (cached[0] == 7).all(), "another sequence's"
        assert (cached[1, :, :first] == 7).all()
        assert (cached[1, :, here.stop :] == 7).all()


@anywhere
@pairwise(
    {
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
        "window": [0, 1, 6, 10, 30],
        "heads, kv_heads": [(4, 4), (6, 2), (3, 1)],
        "first, length": [(0, 1), (0, 20), (13, 1), (13, 11)],
        "scale, cap": [(0.0, 0.0), (0.3, 0.0), (0.1, 0.5)],
        "sunk": [False, True],
    }
)
def test_attention_sees_what_its_positions_may_see(
    device: str,
    first: int,
    length: int,
    heads: int,
    kv_heads: int,
    window: int,
    dtype: torch.dtype,
    scale: float,
    cap: float,
    sunk: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sunk and device == "cpu" and dtype != torch.float32:
        pytest.skip("torch's kernel that gives the sums of weights is one of GPUs")
    monkeypatch.setattr(attention, "MOST_SCORES", 5 * heads * 24)
    q = normal(length, heads, 32).to(dtype)
    keys, values = (normal(kv_heads, 40, 32, seed=n).to(dtype) for n in (1, 2))
    # What is beyond the last position must not matter.
    for cached in (keys, values):
        cached[:, first + length :] = 1e4
    oldest = max(0, first + 1 - window) if window else 0
    sinks = torch.linspace(-2, 5, heads) if sunk else None
    expected = reference_attention.attention(
        q.float().transpose(0, 1),
        *(cached[:, oldest : first + length].float() for cached in (keys, values)),
        reference_attention.visible(first, length, oldest, window),
        scale,
        cap,
        sinks,
    )
    of_heads = None if sinks is None else sinks.to(device)
    found = prefill_attention(
        q.to(device), keys.to(device), values.to(device), first, window, scale=scale, cap=cap, sinks=of_heads
    )
    assert found.dtype == torch.float32
    bound = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    assert (found.cpu() - expected).abs().max() < bound
