"""The caches of every backend where decoded positions read some of the tokens, against the oracle's"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from kv_cache_backends import CONTEXT, POLICY, SPARSE_CASES, Backend, both, load_backend_module

from sparsepack.models.sparse_attention import TokenPolicy


@pytest.fixture(params=SPARSE_CASES, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from load_backend_module(*request.param)


@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 7), (3, 2), (3, 4)])
def test_queries_that_share_a_key_read_the_same_tokens(backend: Backend, kv_heads: int, ratio: int) -> None:
    pair = both(backend, (ratio * kv_heads, kv_heads), channels=(8,))
    pair.positions(90, sparse=False)
    for _ in range(5):
        pair.positions(1)


@pytest.mark.parametrize(
    ("head_dim", "channels"),
    [(16, 4), (16, 16), (64, 8), (64, 12), (64, 16), (80, 20), (80, 37), (128, 4), (128, 32), (128, 40), (128, 64)],
)
def test_any_number_of_channels_finds_the_tokens(backend: Backend, head_dim: int, channels: int) -> None:
    pair = both(backend, head_dim=head_dim, channels=(channels,))
    pair.positions(100, sparse=False)
    for _ in range(3):
        pair.positions(1)


@pytest.mark.parametrize("context", [17, 33, 40, 65, 131, 333, 1000])
def test_contexts_of_any_length(backend: Backend, context: int) -> None:
    pair = both(backend, channels=(8,), context=context)
    pair.positions(context - 3, sparse=False)
    for _ in range(3):
        pair.positions(1)


def test_more_tokens_are_read_than_are_scored_at_once(backend: Backend) -> None:
    pair = both(backend, channels=(8,), context=900, policy=replace(POLICY, tokens=Fraction(2, 3)))
    pair.positions(896, sparse=False)
    for _ in range(3):
        pair.positions(1)


@pytest.mark.parametrize("counts", [(60, 1, 1, 1), (3, 40, 1, 20, 1, 1), (1,) * 40, (50, 30, 1)], ids=str)
@pytest.mark.parametrize("sparse", [True, False])
def test_positions_come_one_by_one_or_many_at_once(backend: Backend, counts: tuple[int, ...], sparse: bool) -> None:
    pair = both(backend, channels=(8,))
    for count in counts:
        pair.positions(count, sparse=sparse)


@pytest.mark.parametrize("windows", [(0,), (60,), (3,), (1,), (30, 0, 7)], ids=str)
def test_a_window_limits_what_can_be_read(backend: Backend, windows: tuple[int, ...]) -> None:
    pair = both(backend, channels=(8,) * len(windows), windows=windows)
    pair.positions(30, sparse=False)
    for count in (1, 1, 40, 1, 1):
        pair.positions(count)


def test_layers_without_heavy_channels_read_every_token(backend: Backend) -> None:
    pair = both(backend, windows=(0,) * 4, channels=(None, 8, None, 16))
    dense = backend.new_cache(replace(pair.shape, policy=None))
    for count in (70, 1, 1):
        for layer in range(4):
            qkv = pair.rows(count)
            found, expected = (pair.outputs(cache, layer, qkv) for cache in (pair.ours, dense))
            alike = (found - expected).abs().max() < backend.tolerance
            assert alike == (layer in (0, 2))
        for cache in (pair.ours, dense):
            cache.advance(count)


@pytest.mark.parametrize(
    "policy",
    [
        replace(POLICY, tokens=Fraction(1)),
        replace(POLICY, min_context=CONTEXT),
        replace(POLICY, recent=CONTEXT),
        replace(POLICY, sinks=10 * CONTEXT),
    ],
    ids=["the share", "the minimum", "recent ones", "sinks"],
)
def test_where_the_budget_is_what_is_seen_the_cache_is_dense(backend: Backend, policy: TokenPolicy) -> None:
    pair = both(backend, channels=(8,), policy=policy)
    dense = backend.new_cache(replace(pair.shape, policy=None))
    for count in (CONTEXT - 10, 1, 1):
        qkv = pair.rows(count)
        pair.compare(*(pair.outputs(cache, 0, qkv) for cache in (pair.ours, dense)))
        for cache in (pair.ours, dense):
            cache.advance(count)


@pytest.mark.parametrize(
    "policy",
    [
        TokenPolicy(Fraction(1, 100), sinks=0, recent=1, min_context=0),
        TokenPolicy(Fraction(1, 100), sinks=3, recent=4, min_context=0),
        TokenPolicy(Fraction(1, 2), sinks=0, recent=1, min_context=0),
        TokenPolicy(Fraction(9, 10), sinks=7, recent=30, min_context=50),
    ],
    ids=str,
)
def test_every_policy(backend: Backend, policy: TokenPolicy) -> None:
    pair = both(backend, channels=(8,), policy=policy)
    for count in (1, 1, 1, 40, 1, 1, 60, 1):
        pair.positions(count)


def test_of_tokens_that_score_alike_the_earlier_are_read(backend: Backend) -> None:
    pair = both(backend, channels=(8,))
    rows = pair.rows(100)
    width = pair.shape.kv_heads * pair.shape.head_dim
    rows[:, -2 * width : -width] = 0  # keys
    pair.compare(*(pair.outputs(cache, 0, rows, sparse=False) for cache in (pair.ours, pair.oracle)))
    pair.advance(100)
    qkv = pair.rows(1)
    qkv[:, -2 * width : -width] = 0
    found = pair.outputs(pair.ours, 0, qkv)
    # 21 of 101: 16 from the start, 5 from the end
    read = torch.cat([rows[:16, -width:], rows[-4:, -width:], qkv[:, -width:]]).mean(0).view(2, 1, -1)
    assert (found.view(2, 2, -1) - read).abs().max() < pair.backend.tolerance


@pytest.mark.parametrize("key_size", [2.0**-22, 2.0**-12, 2.0**12])
def test_keys_of_any_size(backend: Backend, key_size: float) -> None:
    pair = both(backend, channels=(8,), key_size=key_size)
    pair.positions(100, sparse=False)
    for _ in range(3):
        pair.positions(1)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_labels_are_made_of_keys_that_are_normed_and_rotated(backend: Backend, head_dim: int) -> None:
    """A number between two steps may be rounded either way, and now and then another token is read."""
    pair = both(backend, head_dim=head_dim, channels=(head_dim // 4,), changed=True)
    qkv = pair.rows(CONTEXT)
    found, expected = (pair.outputs(cache, 0, qkv).view(CONTEXT, 4, -1) for cache in (pair.ours, pair.oracle))
    wrong = (found - expected).abs().amax(-1) > pair.backend.tolerance
    assert wrong.double().mean() < 0.05
