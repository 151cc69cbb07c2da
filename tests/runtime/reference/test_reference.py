"""What the reference has beyond the operations of every backend, against formulas in float64."""

import pytest
import torch
from operations_for_tests import normal, packed

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.models.sites import SiteRule, active_channels
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q4_K", "Q6_K", "Q8_0"])
def test_embed_looks_up_rows(type: str) -> None:
    matrix = PackedMatrix(BLOCKS[type].encode(normal(77, 512)), MatrixFormat(type), 77, 512)
    ids = torch.tensor([76, 0, 3, 3])
    assert torch.equal(reference.embed(matrix, ids), decode_matrix(matrix)[ids])


def test_rms_norm() -> None:
    x, weight = normal(3, 40), normal(40, seed=1)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (reference.rms_norm(x, weight, 1e-5) - expected).abs().max() < 1e-5


def test_rotary_rotates_pairs_of_halves() -> None:
    inv_freq, x = torch.tensor([1.0, 0.25, 0.01]), normal(2, 4, 6)  # [heads, S, head_dim]
    cos, sin = reference_attention.rotary_table(inv_freq, 1.5, 10)
    found = reference_attention.rotate(x, cos[3:7], sin[3:7])
    positions = torch.arange(3, 7).double()
    pairs = torch.complex(x[..., :3].double(), x[..., 3:].double())
    rotated = 1.5 * pairs * torch.polar(torch.ones(4, 3).double(), positions[:, None] * inv_freq.double())
    assert (found - torch.cat([rotated.real, rotated.imag], -1)).abs().max() < 1e-5


def test_a_query_sees_its_own_and_earlier_positions_within_its_window() -> None:
    assert reference_attention.visible(2, 2, 0, 0).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert reference_attention.visible(2, 2, 0, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert reference_attention.visible(2, 2, 1, 2).int().tolist() == [[1, 1, 0], [0, 1, 1]]
    assert reference_attention.visible(5, 1, 5, 1).int().tolist() == [[1]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 1), (10, 2)])
@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_attention_with_grouped_queries(heads: int, kv_heads: int, window: int) -> None:
    length, past, width = 4, 5, 7
    q, k, v = (normal(n, s, width, seed=n) for n, s in ((heads, length), (kv_heads, 9), (kv_heads, 9)))
    found = reference_attention.attention(q, k, v, reference_attention.visible(past, length, 0, window))
    for head in range(heads):
        keys, values = (t[head * kv_heads // heads].double() for t in (k, v))
        for row in range(length):
            last = past + row + 1
            first = max(0, last - window) if window else 0
            scores = keys[first:last] @ q[head, row].double() / width**0.5
            expected = scores.softmax(0) @ values[first:last]
            assert (found[row, head * width : (head + 1) * width] - expected).abs().max() < 1e-5


@pytest.mark.gpu
def test_collect_and_gemv_never_wait_for_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    loaded = reference.load_zigzag(packed(300, 128), "cuda")
    x, threshold = normal(128).to("cuda"), torch.tensor(0.5, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        reference.zigzag_gemv(loaded, x, *reference.collect(x, threshold))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("threshold", [torch.tensor(0.5), torch.tensor([0.5, 0.5, 0.5])])
def test_an_input_at_its_threshold_is_not_active(threshold: torch.Tensor) -> None:
    x = torch.tensor([0.5, -0.5, 0.50001])
    assert active_channels(x, SiteRule(threshold)).tolist() == [False, False, True]
    assert active_channels(x + 0.25, SiteRule(threshold, torch.full((3,), 0.25))).tolist() == [False, False, True]
