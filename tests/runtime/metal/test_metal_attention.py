"""The Metal kernels of attention: their own sources, compiled for this processor (metal_emulation.py), are compared
with plain torch."""

import pytest
import torch
from metal_emulation import Library
from metal_launches import (
    BIAS,
    K_NORM,
    OFFSET,
    PER_CHANNEL,
    Q_NORM,
    SEGMENT,
    THRESHOLD,
    assert_near,
    from_list,
    launched,
    random,
    room,
)
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.attention import DenseKvCache, rotary_table

HEADS = [(1, 1), (4, 2), (6, 2), (8, 1), (7, 1), (16, 1), (18, 2), (9, 3)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("head_dim", "window", "chunk"), [(64, 0, 256), (2, 0, 3), (96, 3, 2)])
def test_attention_of_steps_is_the_references(
    library: Library, heads: int, kv_heads: int, head_dim: int, window: int, chunk: int
) -> None:
    check_attention(library, heads, kv_heads, head_dim, window, chunk, positions=5, normed=heads % 2 == 0)


@pytest.mark.parametrize("normed", [False, True])
def test_attention_over_many_positions(library: Library, normed: bool) -> None:
    check_attention(library, 4, 2, 32, window=0, chunk=16, positions=70, normed=normed, only_last=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (9, 3)])
def test_attention_of_the_widest_heads(library: Library, heads: int, kv_heads: int) -> None:
    check_attention(library, heads, kv_heads, 256, window=0, chunk=2, positions=3, normed=True)


def check_attention(
    library: Library,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    chunk: int,
    positions: int,
    normed: bool,
    only_last: bool = False,
) -> None:
    """Steps from an empty cache on, each of which leaves the oracle's keys and values, too."""
    context, splits, eps = positions + 3, 3, 1e-5
    cos, sin = rotary_table(10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)), 1.0, context)
    norms = [1 + 0.2 * random(head_dim) if normed else None for _ in range(2)]
    layer = LayerAttention(window, *norms)
    oracle = DenseKvCache(AttentionShape(heads, kv_heads, head_dim, eps, cos, sin, (layer,)), "f16", "cpu")
    keys, values = (torch.zeros(kv_heads, context, head_dim, dtype=torch.float16) for _ in range(2))
    rows = (heads + 2 * kv_heads) * head_dim
    stride = -(-rows // BAND_ROWS) * BAND_ROWS
    bits = BIAS | (Q_NORM | K_NORM if normed else 0)
    for position in range(positions):
        parts, bias = random(splits, stride), random(rows)
        qkv = (parts.sum(0)[:rows] + bias)[None]
        expected = oracle.attend(0, oracle.append(0, qkv))
        oracle.advance(1)
        if only_last and position < positions - 1:
            keys[:, position], values[:, position] = oracle._keys[0][0, :, position], oracle._values[0][0, :, position]
            continue
        first = max(0, position + 1 - window) if window else 0
        chunks = -(-(position + 1 - first) // chunk)

        def out(keys: Tensor = keys, values: Tensor = values, chunks: int = chunks) -> list[Tensor]:
            attended, softmax = torch.empty(chunks, heads * head_dim), torch.empty(chunks, heads, 2)
            return [keys.clone(), values.clone(), attended.fill_(float("nan")), softmax.fill_(float("nan"))]

        numbers = (splits, stride, heads, kv_heads, head_dim, context, position, first, chunk, bits, eps)
        keys, values, attended, softmax = launched(
            library,
            "attend",
            [parts, bias, *(bias if norm is None else norm for norm in norms), cos, sin, *[None] * 4, *numbers],
            out,
            (chunks, kv_heads),
            256,
        )
        for ours, of_oracle in ((keys, oracle._keys), (values, oracle._values)):
            assert ((ours - of_oracle[0][0]).abs() <= 2e-3 * of_oracle[0][0].abs() + 1e-6).all()
        y = put_together(library, attended, softmax, head_dim)
        assert (y - expected[0]).abs().max() < 1e-2


def put_together(library: Library, attended: Tensor, softmax: Tensor, head_dim: int) -> Tensor:
    chunks, columns = attended.shape
    numbers = (columns, head_dim, chunks, 0)
    given = [attended, softmax, attended, attended, None, None, None, *numbers]
    groups = -(-columns // SEGMENT)
    found = launched(library, "collect_attended", given, lambda: room(columns), groups, SEGMENT)
    indices, values = from_list(*found)
    assert torch.equal(indices, torch.arange(columns))
    return values


@pytest.mark.parametrize("chunks", [1, 2, 9])
def test_chunks_of_attention_become_one_softmax(library: Library, chunks: int) -> None:
    heads, head_dim, positions = 5, 6, 4 * chunks
    scores, rows = 30 * random(heads, positions), random(heads, positions, head_dim)
    expected = (scores.double().softmax(1)[:, :, None] * rows).sum(1).flatten()
    largest = scores.view(heads, chunks, 4).amax(2)  # [heads, chunks]
    shares = (scores.view(heads, chunks, 4) - largest[:, :, None]).exp()
    attended = (shares[..., None] * rows.view(heads, chunks, 4, head_dim)).sum(2).transpose(0, 1)
    softmax = torch.stack([largest, shares.sum(2)], dim=2).transpose(0, 1).contiguous()
    y = put_together(library, attended.reshape(chunks, -1).contiguous(), softmax, head_dim)
    assert_near(y, expected, 10)


@pytest.mark.parametrize("bits", [0, THRESHOLD, THRESHOLD | OFFSET, THRESHOLD | PER_CHANNEL])
@pytest.mark.parametrize("columns", [4, 1036])
def test_attended_columns_are_listed_as_others_are(library: Library, columns: int, bits: int) -> None:
    x, offset = random(columns), 0.1 * random(columns)
    limit = random(columns).abs() if bits & PER_CHANNEL else torch.tensor([0.6])
    softmax = torch.ones(1, columns // 4, 2)
    given = [x[None], softmax, offset, limit, None, None, None, columns, 4, 1, bits]
    groups = -(-columns // SEGMENT)
    found = launched(library, "collect_attended", given, lambda: room(columns), groups, SEGMENT)
    indices, values = from_list(*found)
    shifted = x - offset if bits & OFFSET else x
    expected = (shifted.abs() > limit).nonzero()[:, 0] if bits & THRESHOLD else torch.arange(columns)
    assert torch.equal(indices, expected)
    assert torch.equal(values, shifted[indices])
