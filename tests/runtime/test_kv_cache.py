"""The caches of every backend, and the attention over them, against the reference's of the same type."""

from collections.abc import Iterator

import pytest
import torch
from kv_cache_backends import CASES, CONTEXT, Backend, both, load_backend_module

from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.backend import operations as reference_operations


@pytest.fixture(params=CASES, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from load_backend_module(*request.param)


every_kind = pytest.mark.parametrize("channels", [None, (8, None)], ids=["dense", "sparse"])


def test_the_cache_says_its_type_and_is_empty(backend: Backend) -> None:
    pair = both(backend, sequences=2)
    assert pair.ours.type == backend.type
    assert list(pair.ours.lengths) == [0, 0]


@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 8), (3, 2), (3, 4)])
def test_queries_share_keys(backend: Backend, kv_heads: int, ratio: int) -> None:
    pair = both(backend, (ratio * kv_heads, kv_heads))
    for count in (5, 1, 1):
        pair.positions(count)


@pytest.mark.parametrize(
    ("head_dim", "norms"),
    [(2, True), (6, False), (18, True), (24, False), (40, True), (66, False), (80, True), (128, False), (128, True)],
)
def test_heads_of_any_even_width(backend: Backend, head_dim: int, norms: bool) -> None:
    pair = both(backend, head_dim=head_dim, changed=norms)
    for count in (1, 7, 1):
        pair.positions(count)


@pytest.mark.parametrize(
    ("windows", "counts"),
    [
        ((0,), (17,)),
        ((1,), (1,) * 5),
        ((0,), (3, 16, 1, 33, 2, 1)),
        ((4, 0, 19), (3, 16, 1, 33, 2, 1)),
        ((4, 0, 19), (17,)),
    ],
    ids=str,
)
def test_positions_come_one_by_one_or_many_at_once(
    backend: Backend, windows: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    pair = both(backend, windows=windows)
    for count in counts:
        pair.positions(count)


@every_kind
def test_layers_and_appending_do_not_count_and_a_step_can_be_repeated(
    backend: Backend, channels: tuple[int | None, ...] | None
) -> None:
    pair = both(backend, windows=(0, 0), channels=channels)
    pair.positions(CONTEXT - 1)
    qkv = pair.rows(1)
    assert torch.equal(*(pair.outputs(pair.ours, 0, qkv) for _ in range(2)))
    assert list(pair.ours.lengths) == [CONTEXT - 1]


@every_kind
@pytest.mark.parametrize("windows", [(0, 0), (0, 25)], ids=str)
def test_sequences_of_ragged_lengths_take_steps_together(
    backend: Backend, windows: tuple[int, ...], channels: tuple[int | None, ...] | None
) -> None:
    pair = both(backend, windows=windows, channels=channels, sequences=3)
    for sequence, count in enumerate((1, 120, 37)):
        pair.positions(count, sequence, sparse=False)
    for _ in range(4):
        pair.step()
    assert list(pair.ours.lengths) == [5, 124, 41]


@every_kind
def test_a_truncated_text_goes_on_with_another(backend: Backend, channels: tuple[int | None, ...] | None) -> None:
    pair = both(backend, windows=(0, 0), channels=channels, sequences=2)
    pair.positions(100, 0)
    pair.positions(70, 1)
    for cache in (pair.ours, pair.oracle):
        cache.truncate(50, 0)
    assert list(pair.ours.lengths) == [50, 70]
    pair.positions(30, 0, sparse=False)
    for _ in range(3):
        pair.step()


@every_kind
@pytest.mark.parametrize("windows", [(0, 0), (0, 25)], ids=str)
def test_a_text_that_is_the_beginning_of_another_goes_on_as_that(
    backend: Backend, windows: tuple[int, ...], channels: tuple[int | None, ...] | None
) -> None:
    pair = both(backend, windows=windows, channels=channels, sequences=3)
    pair.positions(100, 0, sparse=False)
    pair.positions(120, 1, sparse=False)
    pair.positions(30, 2, sparse=False)
    for cache in (pair.ours, pair.oracle):
        cache.copy(1, 2, 110)
    assert list(pair.ours.lengths) == [100, 120, 110]
    for _ in range(3):
        pair.step()
    rows = [pair.rows(1) for _ in windows]
    for cache in (pair.ours, pair.oracle):
        cache.copy(0, 1, 90)
        cache.truncate(90, 0)
    for layer, qkv in enumerate(rows):
        assert torch.equal(*(pair.outputs(pair.ours, layer, qkv, sequence) for sequence in (0, 1)))
    pair.step()


@every_kind
def test_a_reset_cache_knows_nothing_of_the_text_before(
    backend: Backend, channels: tuple[int | None, ...] | None
) -> None:
    pair = both(backend, windows=(0, 3), channels=channels, sequences=2)
    pair.positions(100, 0)
    pair.step()
    for cache in (pair.ours, pair.oracle):
        cache.reset()
    assert list(pair.ours.lengths) == [0, 0]
    pair.positions(40, 1)
    pair.step()


def test_every_position_of_the_context_can_be_used(backend: Backend) -> None:
    pair = both(backend, windows=(0, 70))
    pair.positions(CONTEXT - 1)
    pair.positions(1)
    assert list(pair.ours.lengths) == [CONTEXT]


def test_the_reference_s_cache_is_softmax_over_what_was_appended() -> None:
    """In float64, from rows that are rotated by position 0 alone: not at all."""
    cos, sin = torch.ones(CONTEXT, 4), torch.zeros(CONTEXT, 4)
    cache = reference_operations.new_cache(AttentionShape(4, 2, 8, 1e-5, cos, sin, (LayerAttention(3),)))
    qkv = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    found = cache.attend(0, cache.append(0, qkv))
    q, k, v = (x.view(6, -1, 8).double() for x in qkv.split([32, 16, 16], dim=1))
    for position in range(6):
        seen = slice(max(0, position - 2), position + 1)
        for head in range(4):
            weights = (k[seen, head // 2] @ q[position, head] / 8**0.5).softmax(0)
            expected = weights @ v[seen, head // 2]
            assert (found[position, head * 8 : head * 8 + 8] - expected).abs().max() < 1e-6
