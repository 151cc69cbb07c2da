"""Attention of a decoding step against the reference in float64, on the keys and values as they are cached."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepack.runtime.cuda.attention import attention
from sparsepack.runtime.cuda.attention.attention import (
    SPLITS,
    STAGES,
    AttentionParameters,
    attend,
)
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference

pytestmark = pytest.mark.usefixtures("workspace_is_reset")
EPS = 1e-6
KV_HEADS = 2
LONGEST = 4097
LAST = [0, 4, 62, 63, 64, 299, LONGEST - 1]
WINDOWS = [0, 5, 300]


@dataclass(frozen=True)
class Shape:
    head_dim: int
    gqa_ratio: int
    dtype: torch.dtype
    norms: bool = False

    @property
    def heads(self) -> int:
        return KV_HEADS * self.gqa_ratio


SHAPES = [
    Shape(8, 1, torch.float32),
    Shape(8, 7, torch.bfloat16, norms=True),
    Shape(24, 2, torch.float16),
    Shape(24, 4, torch.float32, norms=True),
    Shape(64, 2, torch.bfloat16),
    Shape(64, 4, torch.float32),
    Shape(64, 7, torch.bfloat16, norms=True),
    Shape(128, 1, torch.bfloat16),
    Shape(128, 4, torch.bfloat16, norms=True),
    Shape(128, 7, torch.float16),
]
UNUSUAL = [
    Shape(2, 1, torch.float16),
    Shape(10, 3, torch.bfloat16, norms=True),  # rows that are no multiple of 16 bytes
    Shape(80, 5, torch.bfloat16),
    Shape(250, 2, torch.float32, norms=True),
    Shape(256, 16, torch.bfloat16),
    Shape(512, 8, torch.bfloat16, norms=True),
    Shape(390, 3, torch.float16),
]


def name(shape: Shape) -> str:
    return f"{shape.head_dim}x{shape.gqa_ratio}-{str(shape.dtype).removeprefix('torch.')}"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Step:
    """What `attend` reads and writes, of sequences whose new positions are `last`."""

    shape: Shape
    last: list[int]
    window: int
    qkv: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    scale: float = 0.0
    cap: float = 0.0
    own_table: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None
    growth: Tensor | None = None
    neighbours: bool = False
    gated: bool = False
    k_eq_v: bool = False
    v_norm: Tensor | None = None
    shared: bool = False

    def run(self, splits: int | None = None, positions: Tensor | None = None, **options: Any) -> Tensor:
        """The result; the keys and values of the new positions are cached."""
        if positions is None:
            positions = torch.tensor(self.last, dtype=torch.int32, device=self.qkv.device)
        out = torch.full((len(self.last), self.shape.heads * self.shape.head_dim), torch.nan, device=self.qkv.device)
        of = {"sinks": self.sinks, "gated": self.gated, "k_eq_v": self.k_eq_v, "source": 0 if self.shared else None}
        layer = LayerAttention(self.window, self.q_norm, self.k_norm, **of)
        tables = (self.cos, self.sin)
        shape = AttentionShape(
            *(self.shape.heads, KV_HEADS, self.shape.head_dim, EPS, *tables, (layer,), len(self.last)),
            scale=self.scale,
            cap=self.cap,
            query_scale=self.growth,
            neighbours=self.neighbours,
        )
        parameters = AttentionParameters(shape, layer, self.keys, self.values, self.own_table, self.v_norm)
        attend(parameters, self.qkv, positions, out, splits=splits, **options)
        return out

    def rotated(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a sequence's new position, normed and rotated: float64 [heads, 1, head_dim]."""
        rows = self.qkv[b].double().view(-1, 1, self.shape.head_dim)
        rows = torch.cat([rows, rows[-KV_HEADS:]]) if self.k_eq_v else rows
        rows = torch.cat([rows, rows.new_zeros(2 * KV_HEADS, *rows.shape[1:])]) if self.shared else rows
        queries, k, v = rows.split([(1 + self.gated) * self.shape.heads, KV_HEADS, KV_HEADS])
        v = v if self.v_norm is None else reference.rms_norm(v, self.v_norm.double(), EPS)
        q = queries[:: 1 + self.gated]
        if self.q_norm is not None and self.k_norm is not None:
            q = reference.rms_norm(q, self.q_norm.double(), EPS)
            k = reference.rms_norm(k, self.k_norm.double(), EPS)
        here = slice(self.last[b], self.last[b] + 1)
        table = (self.cos, self.sin) if self.own_table is None else (of[b] for of in self.own_table)
        cos, sin = (of[here].double() for of in table)
        q, k = (reference_attention.rotate(x, cos, sin, self.neighbours) for x in (q, k))
        return q if self.growth is None else q * self.growth[self.last[b]], k, v

    def expected(self) -> Tensor:
        """The result by the reference, from what is cached after `run`: float64 [B, heads * head_dim]."""
        rows = []
        for b, last in enumerate(self.last):
            oldest = max(0, last + 1 - self.window) if self.window else 0
            keys, values = (cached[b, :, oldest : last + 1].double() for cached in (self.keys, self.values))
            seen = reference_attention.visible(last, 1, oldest, self.window, self.qkv.device)
            q, _, _ = self.rotated(b)
            sinks = None if self.sinks is None else self.sinks.double()
            row = reference_attention.attention(q, keys, values, seen, self.scale, self.cap, sinks)
            if self.gated:
                gates = self.qkv[b].double().view(-1, self.shape.head_dim)[1 : 2 * self.shape.heads : 2]
                row = row * gates.sigmoid().view(1, -1)
            rows.append(row)
        return torch.cat(rows)


@cache
def random_cache(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    bits = torch.Generator(device).manual_seed(1)
    keys, values = torch.randn(2, 3, KV_HEADS, LONGEST, shape.head_dim, generator=bits, device=device)
    return keys.to(shape.dtype), values.to(shape.dtype)


def step(
    shape: Shape,
    last: Sequence[int],
    device: torch.device,
    window: int = 0,
    size: float = 2,
    turned: int | None = None,
    **more: Any,
) -> Step:
    """A step of random numbers. What no query sees is NaN, the cached rows of the new positions too.

    turned -- channels of a head that turn; None: all
    """
    bits = torch.Generator(device).manual_seed(max(last))
    context = max(last) + 1 + max(last) % 3
    of_keys = 0 if more.get("shared") else 2 - more.get("k_eq_v", False)
    width = ((1 + more.get("gated", False)) * shape.heads + of_keys * KV_HEADS) * shape.head_dim
    qkv = size * torch.randn(len(last), width, generator=bits, device=device)
    keys, values = (cached[: len(last), :, :context].clone() for cached in random_cache(shape, device))
    for b, p in enumerate(last):
        oldest = max(0, p + 1 - window) if window else 0
        for cached in (keys, values):
            cached[b, :, :oldest] = torch.nan
            cached[b, :, p + more.get("shared", False) :] = torch.nan
    turned = turned or shape.head_dim
    inv_freq = 1e4 ** (-torch.arange(0, turned, 2, device=device) / turned)
    cos, sin = reference_attention.rotary_table(inv_freq, 1.0, context)
    q_norm, k_norm = 0.5 + torch.rand(2, shape.head_dim, generator=bits, device=device)
    norms = (q_norm, k_norm) if shape.norms else (None, None)
    return Step(shape, list(last), window, qkv, keys, values, cos, sin, *norms, **more)


def assert_close_to_reference(step: Step, out: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.double(), step.expected(), rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_a_step_is_attention_over_the_rounded_cache(shape: Shape, splits: int, device: torch.device) -> None:
    for last in LAST:
        for window in WINDOWS:
            case = step(shape, [last], device, window)
            assert_close_to_reference(case, case.run(splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize("shape", UNUSUAL, ids=name)
def test_head_dimensions_and_groups_of_any_size(shape: Shape, splits: int, device: torch.device) -> None:
    for last in LAST:
        case = step(shape, [last], device, window=last % 2 * 100)
        assert_close_to_reference(case, case.run(splits))


@pytest.mark.gpu
@pytest.mark.parametrize("k_eq_v", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[8], *UNUSUAL[1:]], ids=name)
def test_values_are_normed_or_keys(shape: Shape, k_eq_v: bool, device: torch.device) -> None:
    ones = torch.ones(shape.head_dim, device=device)
    for last in ([0, 1, 70], [300, 2000]):
        for v_norm in (ones, None):
            case = step(shape, last, device, window=100, k_eq_v=k_eq_v, v_norm=v_norm)
            assert_close_to_reference(case, case.run())
            for b, p in enumerate(last):
                value = case.values[b, :, p].double()
                torch.testing.assert_close(value, case.rotated(b)[2][:, 0], rtol=1e-2, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[8], *UNUSUAL], ids=name)
def test_queries_alone_read_what_another_layer_has_cached(
    shape: Shape, splits: int | None, device: torch.device
) -> None:
    for last in ([0, 1, 70], [300, 2000], [63, 64, 65]):
        for window in (0, 1, 100):
            case = step(shape, last, device, window, shared=True)
            before = [cached.clone() for cached in (case.keys, case.values)]
            assert_close_to_reference(case, case.run(splits))
            for cached, there in zip(before, (case.keys, case.values), strict=True):
                torch.testing.assert_close(cached, there, rtol=0, atol=0, equal_nan=True)


def test_queries_are_not_read_ahead_of_what_another_layer_caches() -> None:
    case = step(SHAPES[1], [5], torch.device("cpu"), shared=True)
    with pytest.raises(ValueError, match="qkv: in words, which may be there before another layer"):
        case.run(flag_in_data=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_sequences_of_a_batch_have_positions_of_their_own(shape: Shape, device: torch.device) -> None:
    for last in ([0, 1, 70], [300, 0, 64], [5, 2000, 129]):
        for splits in (None, 1, 4):
            case = step(shape, last, device, window=100)
            assert_close_to_reference(case, case.run(splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4], SHAPES[8], *UNUSUAL[1:]], ids=name)
def test_a_part_of_each_head_turns(shape: Shape, splits: int, device: torch.device) -> None:
    for turned in (2, shape.head_dim // 4 * 2, shape.head_dim - 2):
        for last in ([300, 0, 64], [LONGEST - 1]):
            case = step(shape, last, device, turned=turned)
            assert_close_to_reference(case, case.run(splits if len(last) == 1 else None))


@pytest.mark.gpu
@pytest.mark.parametrize(("scale", "cap"), [(0.3, 0.0), (0.0, 2.0), (0.07, 50.0), (1.0, 5.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[8], *UNUSUAL[1:]], ids=name)
def test_scores_have_a_scale_of_their_own_and_a_soft_cap(
    shape: Shape, scale: float, cap: float, device: torch.device
) -> None:
    for last in ([300, 0, 64], [LONGEST - 1]):
        for window in WINDOWS:
            case = step(shape, last, device, window, scale=scale, cap=cap)
            assert_close_to_reference(case, case.run(), 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6], SHAPES[9], *UNUSUAL], ids=name)
def test_neighbours_turn(shape: Shape, splits: int, device: torch.device) -> None:
    for turned in {2, max(2, shape.head_dim // 4 * 2), shape.head_dim}:
        for last in ([300, 0, 64], [LONGEST - 1]):
            case = step(shape, last, device, turned=turned, neighbours=True)
            assert_close_to_reference(case, case.run(splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", [*SHAPES[3:8], *UNUSUAL], ids=name)
def test_sinks_take_a_share(shape: Shape, splits: int, device: torch.device) -> None:
    for last in ([300, 0, 64], [LONGEST - 1]):
        for window in WINDOWS:
            sinks = (
                torch.randn(shape.heads, device=device)
                * torch.tensor([1.0, 30.0], device=device).repeat(shape.heads)[: shape.heads]
            )
            case = step(shape, last, device, window, sinks=sinks)
            assert_close_to_reference(case, case.run(splits))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("flag_in_data", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[8], *UNUSUAL], ids=name)
def test_gates_stand_behind_the_queries_of_each_head(
    shape: Shape, flag_in_data: bool, splits: int, device: torch.device
) -> None:
    for last in ([300, 0, 64], [LONGEST - 1]):
        case = step(shape, last, device, window=last[0] % 2 * 100, gated=True, turned=max(2, shape.head_dim // 8 * 2))
        assert_close_to_reference(case, case.run(splits, flag_in_data=flag_in_data))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[8]], ids=name)
def test_later_queries_are_scaled(shape: Shape, device: torch.device) -> None:
    for last in ([300, 0, 64], [LONGEST - 1]):
        growth = 1 + torch.linspace(0, 2, max(last) + 1 + max(last) % 3, device=device)
        case = step(shape, last, device, growth=growth)
        assert_close_to_reference(case, case.run(), 3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("flag_in_data", [False, True])
def test_each_sequence_turns_by_a_table_of_its_own(flag_in_data: bool, device: torch.device) -> None:
    shape = SHAPES[8]
    plain = step(shape, [300, 0, 64], device)
    angles = torch.arange(3, device=device)[:, None, None] + torch.rand(len(plain.cos), 64, device=device)
    case = replace(plain, own_table=(angles.cos().contiguous(), angles.sin().contiguous()))
    assert_close_to_reference(case, case.run(flag_in_data=flag_in_data))


@pytest.mark.gpu
def test_the_same_bits_come_every_run(device: torch.device) -> None:
    for splits in SPLITS[:-1]:
        case = step(SHAPES[8], [3000, 77, 500], device, window=0)
        first = case.run(splits)
        assert all(torch.equal(case.run(splits), first) for _ in range(20))


@pytest.mark.gpu
def test_a_row_that_no_number_fits_spoils_nobody_else(device: torch.device) -> None:
    """A NaN with the bits of a SENTINEL, in the sums that blocks hand off."""
    case = step(SHAPES[8], [3000, 500], device)
    expected = case.run(16)
    case.values[0, 0, 7] = torch.full((), -1, dtype=torch.int16, device=device).view(torch.bfloat16)
    out = case.run(16)
    spoilt = out.view(2, KV_HEADS, -1).isnan()
    assert bool(spoilt[0, 0].all())
    assert not bool(spoilt[0, 1].any())
    assert not bool(spoilt[1].any())
    assert torch.equal(out[1], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [20, 0.01])
def test_scores_that_keep_growing_or_hardly_differ(size: float, device: torch.device) -> None:
    """With keys in the order of their scores, the largest score grows from row to row."""
    shape = replace(SHAPES[8], norms=False)
    case = step(shape, [3000], device, size=size)
    q = case.rotated(0)[0].view(KV_HEADS, shape.gqa_ratio, shape.head_dim).sum(1)
    old = case.keys[0, :, :3000]
    order = torch.einsum("hd,htd->ht", q, old.double()).argsort(-1)
    old.copy_(torch.stack([old[h, order[h]] for h in range(KV_HEADS)]))
    for splits in SPLITS:
        assert_close_to_reference(case, case.run(splits), 5e-5 if size > 1 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_exactly_the_new_position_is_cached(shape: Shape, splits: int, device: torch.device) -> None:
    case = step(shape, [64, 0, 17], device)
    before = [cached.nan_to_num(-7) for cached in (case.keys, case.values)]
    case.run(splits)
    for b, last in enumerate(case.last):
        _, k, v = case.rotated(b)
        precision = torch.finfo(shape.dtype).eps
        torch.testing.assert_close(case.keys[b, :, last].double(), k[:, 0], rtol=precision, atol=1e-5)
        assert torch.equal(case.values[b, :, last], v[:, 0].to(shape.dtype))
    for cached, old in zip((case.keys, case.values), before, strict=True):
        cached = cached.nan_to_num(-7)
        for b, last in enumerate(case.last):
            cached[b, :, last] = old[b, :, last]
        assert torch.equal(cached, old)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 30])
def test_a_graph_replays_with_growing_positions(window: int, device: torch.device) -> None:
    shape, length = SHAPES[8], 100
    case = step(shape, [length - 1], device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    replace(case, window=window).run(8, positions)  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = replace(case, window=window).run(8, positions)
        positions.add_(1)
    positions.zero_()
    case.keys.fill_(torch.nan)
    case.values.fill_(torch.nan)
    bits = torch.Generator(device).manual_seed(3)
    for last in range(length):
        case.qkv.copy_(torch.randn(case.qkv.shape, generator=bits, device=device))
        graph.replay()
        assert_close_to_reference(replace(case, last=[last], window=window), out)
    assert int(positions) == length


@pytest.mark.gpu
def test_positions_written_just_before_are_not_mistaken(device: torch.device) -> None:
    """The kernel reads them before the kernel ahead has ended, and once more after it."""
    case = step(SHAPES[4], [LONGEST - 1], device)
    case.run(16)
    ends = torch.randint(0, LONGEST, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    before = case.keys.clone(), case.values.clone()
    outs, rows = [], []
    for last in ends:
        positions.fill_(last)
        outs.append(case.run(16, positions))
        rows.append((case.keys[:, :, last].clone(), case.values[:, :, last].clone()))
    case.keys.copy_(before[0])
    case.values.copy_(before[1])
    for last, out, (key, value) in zip(ends, outs, rows, strict=True):
        case.keys[:, :, last], case.values[:, :, last] = key, value
        assert_close_to_reference(replace(case, last=[last]), out)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", STAGES)
def test_any_number_of_stages_gives_the_same_bits(
    stages: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = step(SHAPES[8], [3000, 77], device)
    expected = case.run(8)
    monkeypatch.setattr(attention, "STAGES", (stages,))
    assert torch.equal(case.run(8), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 3, 64])
def test_splits_out_of_range_are_an_error(splits: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"splits: {splits}"):
        step(SHAPES[0], [5], device).run(splits)


@pytest.mark.gpu
def test_blocks_that_would_wait_in_vain_are_an_error(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(attention, "blocks_at_once", lambda *args: 63)
    with pytest.raises(ValueError, match="splits: 32 of 2 rows wait for each other, but only 63 blocks run at once"):
        step(SHAPES[0], [5], device).run(32)
    monkeypatch.setattr(attention, "workspace", lambda device: torch.empty(100))
    with pytest.raises(ValueError, match="2048 words of partial results, more than 100; take fewer splits"):
        step(SHAPES[0], [5], device).run(16)
