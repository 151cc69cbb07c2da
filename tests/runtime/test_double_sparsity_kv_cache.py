"""The caches of every backend where decoded positions read some of the tokens, against the oracle's of the same type.

Most inputs are multiples of 1 / 8 that no norm or rotation changes, so that every backend caches the same keys, makes
the same labels and must read the same tokens. Queries are short: every token that is read weighs about as much, and one
that is read in another's place shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from kv_cache_backends import CASES, Backend, appended, opened, stepped
from torch import Tensor

from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.kv_cache import AttentionShape, KvCache, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference.backend import operations as reference_operations

CONTEXT = 150
POLICY = TokenPolicy(Fraction(1, 5), sinks=2, recent=5, min_context=16)


@pytest.fixture(params=CASES, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from opened(*request.param)


@dataclass
class Both:
    """A backend's cache and the oracle's, with the same made of them."""

    shape: AttentionShape
    backend: Backend
    random: torch.Generator
    key_size: float = 1.0

    def __post_init__(self) -> None:
        self.ours = self.backend.new_cache(self.shape)
        self.oracle = reference_operations.new_cache(self.shape, self.backend.type)

    def rows(self, count: int) -> Tensor:
        shape = self.shape
        q, k, v = (
            torch.randint(-24, 25, (count, heads * shape.head_dim), generator=self.random) / 8
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        return torch.cat([q / 16 / self.key_size, k * self.key_size, v], dim=1)

    def outputs(self, cache: KvCache, layer: int, qkv: Tensor, sequence: int = 0, sparse: bool = True) -> Tensor:
        device = "cpu" if cache is self.oracle else self.backend.device
        return appended(cache, layer, qkv.to(device), sequence, sparse).cpu()

    def positions(self, count: int, sequence: int = 0, sparse: bool = True) -> None:
        """Append so many positions in every layer, and compare what their queries make of the text so far."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(count)
            self.compare(*(self.outputs(cache, layer, qkv, sequence, sparse) for cache in (self.ours, self.oracle)))
        self.advance(count, sequence)

    def step(self) -> None:
        """One position of every sequence."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(self.shape.sequences)
            found = stepped(self.ours, layer, qkv.to(self.backend.device), sparse=True).cpu()
            self.compare(found, stepped(self.oracle, layer, qkv, sparse=True))
        for sequence in range(self.shape.sequences):
            self.advance(1, sequence)

    def advance(self, count: int, sequence: int = 0) -> None:
        for cache in (self.ours, self.oracle):
            cache.advance(count, sequence)
        assert list(self.ours.lengths) == list(self.oracle.lengths)

    def compare(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < self.backend.tolerance


def both(
    backend: Backend,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    channels: tuple[int | None, ...] = (8,),
    windows: tuple[int, ...] | None = None,
    policy: TokenPolicy = POLICY,
    *,
    context: int = CONTEXT,
    sequences: int = 1,
    changed: bool = False,
    key_size: float = 1.0,
) -> Both:
    """channels -- how many of each layer, None: it is dense; changed -- queries and keys, by norms and rotation"""
    random = torch.Generator()
    random.seed()  # other inputs every run

    def heavy(count: int | None) -> Tensor | None:
        if count is None:
            return None
        chosen = [torch.randperm(head_dim, generator=random)[:count].sort().values for _ in range(kv_heads)]
        return torch.stack(chosen)

    def norm() -> Tensor | None:
        return 1 + 0.2 * torch.randn(head_dim, generator=random) if changed else None

    frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    cos, sin = reference_attention.rotary_table(frequencies if changed else torch.zeros_like(frequencies), 1.0, context)
    layers = tuple(
        LayerAttention(window, norm(), norm(), heavy(count))
        for window, count in zip(windows or (0,) * len(channels), channels, strict=True)
    )
    shape = AttentionShape(heads, kv_heads, head_dim, 1e-5, cos, sin, layers, sequences, policy)
    return Both(shape, backend, random, key_size)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_queries_that_share_a_key_read_the_same_tokens(backend: Backend, kv_heads: int, ratio: int) -> None:
    pair = both(backend, heads=ratio * kv_heads, kv_heads=kv_heads)
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
    pair = both(backend, context=context)
    pair.positions(context - 3, sparse=False)
    for _ in range(3):
        pair.positions(1)


def test_more_tokens_are_read_than_are_scored_at_once(backend: Backend) -> None:
    pair = both(backend, context=900, policy=replace(POLICY, tokens=Fraction(2, 3)))
    pair.positions(896, sparse=False)
    for _ in range(3):
        pair.positions(1)


@pytest.mark.parametrize("counts", [(60, 1, 1, 1), (3, 40, 1, 20, 1, 1), (1,) * 40, (50, 30, 1)], ids=str)
@pytest.mark.parametrize("sparse", [True, False])
def test_positions_come_one_by_one_or_many_at_once(backend: Backend, counts: tuple[int, ...], sparse: bool) -> None:
    pair = both(backend)
    for count in counts:
        pair.positions(count, sparse=sparse)


@pytest.mark.parametrize("windows", [(0,), (60,), (3,), (1,), (30, 0, 7)], ids=str)
def test_a_window_limits_what_can_be_read(backend: Backend, windows: tuple[int, ...]) -> None:
    pair = both(backend, channels=(8,) * len(windows), windows=windows)
    pair.positions(30, sparse=False)
    for count in (1, 1, 40, 1, 1):
        pair.positions(count)


def test_layers_without_heavy_channels_read_every_token(backend: Backend) -> None:
    pair = both(backend, channels=(None, 8, None, 16))
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
    pair = both(backend, policy=policy)
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
    pair = both(backend, policy=policy)
    for count in (1, 1, 1, 40, 1, 1, 60, 1):
        pair.positions(count)


def test_of_tokens_that_score_alike_the_earlier_are_read(backend: Backend) -> None:
    pair = both(backend)
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
    pair = both(backend, key_size=key_size)
    pair.positions(100, sparse=False)
    for _ in range(3):
        pair.positions(1)


def test_sequences_of_ragged_lengths_take_steps_together(backend: Backend) -> None:
    pair = both(backend, channels=(8, None), windows=(0, 25), sequences=3)
    for sequence, count in enumerate((1, 120, 37)):
        pair.positions(count, sequence, sparse=False)
    for _ in range(4):
        pair.step()
    assert list(pair.ours.lengths) == [5, 124, 41]


def test_a_truncated_text_goes_on_with_another(backend: Backend) -> None:
    pair = both(backend, sequences=2)
    pair.positions(100, 0)
    pair.positions(70, 1)
    for cache in (pair.ours, pair.oracle):
        cache.truncate(50, 0)
    pair.positions(30, 0, sparse=False)
    for _ in range(3):
        pair.step()


def test_a_reset_cache_knows_nothing_of_the_text_before(backend: Backend) -> None:
    pair = both(backend, sequences=2)
    pair.positions(100, 0)
    for cache in (pair.ours, pair.oracle):
        cache.reset()
    assert list(pair.ours.lengths) == [0, 0]
    pair.positions(40, 0)
    pair.step()


def test_steps_can_be_repeated(backend: Backend) -> None:
    pair = both(backend)
    pair.positions(CONTEXT - 1)
    qkv = pair.rows(1)
    assert torch.equal(*(pair.outputs(pair.ours, 0, qkv) for _ in range(2)))


@pytest.mark.parametrize("head_dim", [16, 80])
def test_labels_are_made_of_keys_that_are_normed_and_rotated(backend: Backend, head_dim: int) -> None:
    """A number between two steps may be rounded either way, and now and then another token is read."""
    pair = both(backend, head_dim=head_dim, channels=(head_dim // 4,), changed=True)
    qkv = pair.rows(CONTEXT)
    found, expected = (pair.outputs(cache, 0, qkv).view(CONTEXT, 4, -1) for cache in (pair.ours, pair.oracle))
    wrong = (found - expected).abs().amax(-1) > pair.backend.tolerance
    assert wrong.double().mean() < 0.05
