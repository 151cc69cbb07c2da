"""The Metal kernels, from their own sources on this processor, against plain torch. Every launch is made in several
orders of threads and threadgroups, which must give the same bits, and every access is checked (metal_emulation.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from metal_emulation import Library, order
from torch import Tensor

from sparsepack.formats.codecs import q4_k, zigzag
from sparsepack.formats.codecs.matrices import decode_rows, encode_rows
from sparsepack.models.architecture import ACTIVATIONS
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.attention import DenseKvCache, rotary_table
from sparsepack.runtime.reference.products import ACTIVATION_FUNCTIONS, rms_norm

SEGMENT, BAND_ROWS = 1024, 256
NORM, BIAS, OFFSET, THRESHOLD, PER_CHANNEL, SUM, Q_NORM, K_NORM, CANDIDATES = (1 << i for i in range(9))
TYPES = ["F32", "F16", "BF16", "Q4_K", "Q6_K", "Q8_0"]
UNSET = 1 << 30
SEEDS = (0, 1, 2)
"""Of the orders in which each launch is made; 0 is that of numbers."""


def random(*shape: int) -> Tensor:
    """Other numbers every run."""
    return torch.randn(shape)


def launched(
    library: Library,
    name: str,
    given: Sequence[Any],
    out: Callable[[], Sequence[Tensor]],
    groups: tuple[int, int] | int,
    threads: int,
) -> list[Tensor]:
    """What a kernel writes, the same in every order.

    given -- arguments in order, of which each None is one of the outputs
    out   -- makes the outputs anew
    """
    across, *down = (groups,) if isinstance(groups, int) else groups
    found = []
    for seed in SEEDS:
        outputs = list(out())
        left = iter(outputs)
        arguments = [next(left) if value is None else value for value in given]
        casts = {i: "int32" for i, value in enumerate(arguments) if isinstance(value, int)}
        with order(seed):
            getattr(library, name)(
                *arguments,
                threads=[across * threads, *down],
                group_size=[threads, *(1 for _ in down)],
                arg_casts=casts,
            )
        found.append(outputs)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(bits(one), bits(same))
    return found[0]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def room(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a list, with what no kernel reads."""
    segments = -(-columns // SEGMENT)
    indices = torch.full((segments * SEGMENT,), UNSET, dtype=torch.int32)
    return torch.full((segments * SEGMENT,), float("nan")), indices, torch.full((segments,), -1, dtype=torch.int32)


def listed(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The list of some columns of x, as `collect` makes it."""
    values, indices, counts = room(len(x))
    for segment in range(len(counts)):
        here = active[active // SEGMENT == segment]
        counts[segment] = len(here)
        places = segment * SEGMENT + torch.arange(len(here))
        values[places], indices[places] = x[here], here.int()
    return values, indices, counts


def from_list(values: Tensor, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a list and their values; beyond them it is untouched."""
    inside = (torch.arange(SEGMENT) < counts[:, None]).flatten()
    assert (indices[~inside] == UNSET).all()
    assert values[~inside].isnan().all()
    return indices[inside].long(), values[inside]


def assert_near(found: Tensor, expected: Tensor, size: Tensor | float = 1.0) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert ((found.double() - expected).abs() <= 2e-6 * (1 + expected.abs()) * size).all()


# products with zigzag matrices


@pytest.mark.parametrize(("splits", "simdgroups"), [(1, 1), (1, 2), (5, 2), (32, 2), (3, 8), (7, 3)])
@pytest.mark.parametrize(("rows", "columns", "share"), [(300, 70, 0.5), (1, 1, 1), (513, 2100, 0.1), (256, 1025, 1)])
def test_gemv_sums_the_active_columns(
    library: Library, rows: int, columns: int, share: float, splits: int, simdgroups: int
) -> None:
    check_gemv(library, rows, columns, torch.rand(columns) < share, splits, simdgroups)


@pytest.mark.parametrize("active", [0, 1, 2, 3, 63, 64, 65, 127, 300])
def test_gemv_divides_any_number_of_columns(library: Library, active: int) -> None:
    mask = torch.zeros(300, dtype=torch.bool)
    mask[torch.randperm(300)[:active]] = True
    check_gemv(library, 257, 300, mask, splits=16, simdgroups=4)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_gemv_steps_over_segments_without_active_columns(library: Library, empty: int) -> None:
    mask = torch.rand(3 * SEGMENT) < 0.05
    mask[empty * SEGMENT : (empty + 1) * SEGMENT] = False
    check_gemv(library, 20, 3 * SEGMENT, mask, splits=3, simdgroups=2)


def check_gemv(library: Library, rows: int, columns: int, mask: Tensor, splits: int, simdgroups: int) -> None:
    blocks = zigzag.pack(random(rows, columns))
    bands, active, x = len(blocks), mask.nonzero()[:, 0], random(columns)
    parts, counted = launched(
        library,
        "zigzag_gemv",
        [blocks, *listed(x, active), None, None, columns],
        lambda: [torch.full((splits, bands * BAND_ROWS), float("nan")), torch.full((1,), 7, dtype=torch.int32)],
        (splits, bands),
        32 * simdgroups,
    )
    assert int(counted) == 7 + len(active)
    assert torch.isfinite(parts).all()
    # Minima are taken off in the end, so that an error is one of the largest weights.
    weights, of_x = zigzag.unpack(blocks, rows).double()[:, active], x[active].double()
    size = 4 * zigzag.unpack(blocks, rows).abs().max() * (of_x.abs().sum() + 1)
    assert_near(parts.double().sum(0)[:rows], weights @ of_x, size)
    # The columns are divided evenly, and in order: the first splits have those that are left over.
    ends = [0]
    for number in range(splits * simdgroups):
        each, rest = divmod(len(active), splits * simdgroups)
        ends.append(ends[-1] + each + (number < rest))
    for split in range(splits):
        part = slice(ends[split * simdgroups], ends[(split + 1) * simdgroups])
        assert_near(parts[split, :rows], weights[:, part] @ of_x[part], size)


@pytest.mark.parametrize(
    ("rows", "columns", "first", "bands"), [(300, 5, 0, 2), (700, 17, 1, 2), (1, 1, 0, 1), (513, 8, 2, 1)]
)
def test_decoded_bands_are_the_codecs_weights(
    library: Library, rows: int, columns: int, first: int, bands: int
) -> None:
    blocks = zigzag.pack(random(rows, columns))
    (out,) = launched(
        library,
        "zigzag_decode",
        [blocks, None, columns, first],
        lambda: [torch.full((columns, bands * BAND_ROWS), float("nan"))],
        (-(-columns // 8), bands),
        256,
    )
    expected = q4_k.decode(blocks[first : first + bands]).permute(1, 0, 2).reshape(columns, -1)
    assert torch.equal(out, expected)


# lists of active columns

COLUMNS = [1, 31, 32, 33, 1024, 1025, 2500]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["one threshold", "a threshold each", "none", "nothing above", "everything above"])
def test_collect_lists_active_columns_in_order(library: Library, columns: int, kind: str) -> None:
    x = random(columns)
    limits = {"a threshold each": random(columns).abs(), "nothing above": torch.tensor([1e9])}
    limit = limits.get(kind, torch.tensor([-1.0 if kind == "everything above" else 0.7]))
    bits = 0 if kind == "none" else THRESHOLD | (PER_CHANNEL if len(limit) > 1 else 0)
    if columns == 1:
        bits |= PER_CHANNEL if kind == "a threshold each" else 0
    indices, values = collected(library, x, threshold=limit, bits=bits)[:2]
    expected = torch.arange(columns) if kind == "none" else (x.abs() > limit).nonzero()[:, 0]
    assert torch.equal(indices, expected)
    assert torch.equal(values, x[expected])


def test_ties_and_nan_are_not_active(library: Library) -> None:
    x = torch.tensor([0.5, -0.5, float("nan"), 0.50001, -7.0, 0.0])
    assert collected(library, x, threshold=torch.tensor([0.5]), bits=THRESHOLD)[0].tolist() == [3, 4]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("splits", [0, 1, 5])
@pytest.mark.parametrize(
    "bits", [0, NORM, NORM | OFFSET | THRESHOLD, NORM | BIAS | SUM, BIAS | OFFSET | SUM | THRESHOLD]
)
def test_collect_takes_sums_norms_and_offsets(library: Library, columns: int, splits: int, bits: int) -> None:
    x, stride = 4 * random(columns), -(-columns // BAND_ROWS) * BAND_ROWS
    parts = random(max(splits, 1), stride)
    bias, norm, offset = random(columns), 1 + 0.1 * random(columns), 0.1 * random(columns)
    indices, values, total = collected(
        library, x, parts, bias, norm, offset, torch.tensor([0.3]), bits=bits, splits=splits
    )
    expected = x.double() + parts[:splits, :columns].double().sum(0)
    if bits & BIAS:
        expected = expected + bias
    if bits & SUM:
        assert_near(total, expected, 10)
    else:
        assert total.isnan().all()
    if bits & NORM:
        expected = rms_norm(expected, norm.double(), 1e-5)
    if bits & OFFSET:
        expected = expected - offset
    assert_near(values, expected[indices], 10)
    left = torch.ones(columns, dtype=torch.bool)
    left[indices] = False
    if bits & THRESHOLD:
        assert (expected[left].abs() <= 0.3 + 1e-4).all()
        assert (values.abs() > torch.tensor(0.3)).all()
    else:
        assert not left.any()


def collected(
    library: Library,
    x: Tensor,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    offset: Tensor | None = None,
    threshold: Tensor | None = None,
    *,
    bits: int,
    splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = len(x)
    given = [x if each is None else each for each in (parts, bias, norm, offset, threshold)]
    total, values, indices, counts = launched(
        library,
        "collect",
        [x, *given, None, None, None, None, columns, splits, given[0].shape[-1], bits, 1e-5],
        lambda: [torch.full((columns,), float("nan")), *room(columns)],
        -(-columns // SEGMENT),
        SEGMENT,
    )
    return *from_list(values, indices, counts), total


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("columns", "splits", "bits"), [(1, 1, 0), (172, 3, BIAS), (1280, 4, THRESHOLD | OFFSET), (1024, 1, THRESHOLD)]
)
def test_gated_columns_are_activation_of_gate_times_up(
    library: Library, activation: str, columns: int, splits: int, bits: int
) -> None:
    stride = -(-2 * columns // BAND_ROWS) * BAND_ROWS
    parts, bias, offset = 2 * random(splits, stride), random(2 * columns), 0.1 * random(columns)
    numbers = (columns, splits, stride, bits, ACTIVATIONS.index(activation))
    indices, values = from_list(
        *launched(
            library,
            "collect_gated",
            [parts, bias, offset, torch.tensor([0.4]), None, None, None, *numbers],
            lambda: room(columns),
            -(-columns // SEGMENT),
            SEGMENT,
        )
    )
    both = parts.double().sum(0)[: 2 * columns] + (bias if bits & BIAS else 0)
    expected = ACTIVATION_FUNCTIONS[activation](both[:columns]) * both[columns:]
    if bits & OFFSET:
        expected = expected - offset
    assert_near(values, expected[indices], 10)
    left = torch.ones(columns, dtype=torch.bool)
    left[indices] = False
    assert (expected[left].abs() <= 0.4 + 1e-4).all()
    assert bits & THRESHOLD or not left.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_numbers_stay_finite(library: Library, activation: str) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4, 1e30])
    parts = torch.zeros(1, BAND_ROWS)
    parts[0, :10], parts[0, 10:20] = gate, 1.0
    _, values = from_list(
        *launched(
            library,
            "collect_gated",
            [parts, parts, parts, parts, None, None, None, 10, 1, BAND_ROWS, 0, ACTIVATIONS.index(activation)],
            lambda: room(10),
            1,
            SEGMENT,
        )
    )
    assert_near(values, ACTIVATION_FUNCTIONS[activation](gate.double()))


# attention

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
            keys[:, position], values[:, position] = oracle._keys[0, 0, :, position], oracle._values[0, 0, :, position]
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
            assert ((ours - of_oracle[0, 0]).abs() <= 2e-3 * of_oracle[0, 0].abs() + 1e-6).all()
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


# matrices stored by rows


@pytest.mark.parametrize("type", TYPES)
def test_embedded_rows_are_the_codecs(library: Library, type: str) -> None:
    rows, columns = 9, 1280
    blocks = encode_rows(random(rows, columns), type)
    ids = torch.tensor([3, 0, 8, 3], dtype=torch.int32)
    assert torch.equal(embedded(library, blocks, type, rows, columns, ids), decode_rows(blocks[ids], type))


@pytest.mark.parametrize(("type", "columns"), [("F32", 1), ("F16", 5), ("BF16", 1027), ("Q8_0", 32), ("Q8_0", 1056)])
def test_embedded_rows_of_odd_widths(library: Library, type: str, columns: int) -> None:
    blocks = encode_rows(random(4, columns), type)
    ids = torch.tensor([2, 1], dtype=torch.int32)
    assert torch.equal(embedded(library, blocks, type, 4, columns, ids), decode_rows(blocks[ids], type))


def test_an_id_that_is_no_row_gives_nan(library: Library) -> None:
    blocks = encode_rows(random(4, 8), "F16")
    out = embedded(library, blocks, "F16", 4, 8, torch.tensor([-1, 3, 4], dtype=torch.int32))
    assert out.isnan().all(1).tolist() == [True, False, True]


def embedded(library: Library, blocks: Tensor, type: str, rows: int, columns: int, ids: Tensor) -> Tensor:
    given = [ids, blocks, None, TYPES.index(type), rows, columns, blocks.shape[1]]
    groups = (-(-columns // 1024), len(ids))
    return launched(library, "embed", given, lambda: [torch.empty(len(ids), columns)], groups, 256)[0]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 77])
def test_products_with_rows(library: Library, type: str, rows: int) -> None:
    columns = {"F16": 37, "Q8_0": 96}.get(type, 512)
    blocks, x = encode_rows(random(rows, columns), type), random(columns)
    groups = -(-rows // 16)
    y, best, best_rows = launched(
        library,
        "rows_product",
        [blocks, x, None, None, None, TYPES.index(type), rows, columns, blocks.shape[1], CANDIDATES],
        lambda: [torch.empty(rows), torch.empty(groups), torch.empty(groups, dtype=torch.int32)],
        groups,
        128,
    )
    weights = decode_rows(blocks, type).double()
    assert_near(y, weights @ x.double(), 3 * (weights.abs() @ x.double().abs()))
    for group in range(groups):
        part = y[16 * group : 16 * (group + 1)]
        assert best[group] == part.max()
        assert best_rows[group] == 16 * group + int((part == part.max()).nonzero()[0])


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-3.0, -1.0, -2.0], 1),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([1.0, float("inf"), float("nan")], 2),
        ([float("-inf")], 0),
        ([float("-inf")] * 40, 0),
        ([0.0] * 50 + [1.0] * 50, 50),
    ],
)
def test_the_likeliest_is_the_lowest_of_equals(library: Library, logits: list[float], expected: int) -> None:
    """By a product with a matrix of one column, whose candidates are picked from."""
    rows = len(logits)
    blocks, groups = torch.tensor(logits)[:, None].view(torch.uint8), -(-rows // 16)
    picked, top = picked_from(library, blocks, rows, groups)
    assert picked == expected
    assert bits(top).item() & 0x7FFFFFFF == bits(torch.tensor([logits[expected]])).item() & 0x7FFFFFFF


def test_the_likeliest_of_many(library: Library) -> None:
    logits = random(20000)
    logits[[7, 12345, 19999]] = 9.0
    assert picked_from(library, encode_rows(logits[:, None], "F32"), 20000, 1250)[0] == 7


def picked_from(library: Library, blocks: Tensor, rows: int, groups: int) -> tuple[int, Tensor]:
    _, best, best_rows = launched(
        library,
        "rows_product",
        [blocks, torch.ones(1), None, None, None, 0, rows, 1, 4, CANDIDATES],
        lambda: [torch.empty(rows), torch.empty(groups), torch.empty(groups, dtype=torch.int32)],
        groups,
        128,
    )
    id, top = launched(
        library,
        "pick_likeliest",
        [best, best_rows, None, None, groups],
        lambda: [torch.full((1,), -1, dtype=torch.int32), torch.empty(1)],
        1,
        1024,
    )
    return int(id), top
