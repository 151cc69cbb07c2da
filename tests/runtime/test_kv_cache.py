"""The caches of every backend, and the attention over them, against the reference's of the same type."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from kv_cache_backends import CASES, Backend, appended, opened, stepped
from torch import Tensor

from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference.backend import operations as reference_operations

CONTEXT = 80


@pytest.fixture(params=CASES, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from opened(*request.param)


@dataclass
class Both:
    """A backend's cache and the reference's, with the same made of them."""

    shape: AttentionShape
    backend: Backend
    random: torch.Generator

    def __post_init__(self) -> None:
        self.ours = self.backend.new_cache(self.shape)
        self.oracle = reference_operations.new_cache(self.shape, self.backend.type)

    def rows(self, count: int) -> Tensor:
        width = (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
        return torch.randn(count, width, generator=self.random)

    def positions(self, count: int, sequence: int = 0) -> None:
        """Append so many positions in every layer, and compare what their queries make of the text so far."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(count)
            before = qkv.clone()
            found = appended(self.ours, layer, qkv.to(self.backend.device), sequence).cpu()
            assert torch.equal(qkv, before)
            self.compare(found, appended(self.oracle, layer, qkv, sequence))
        for cache in (self.ours, self.oracle):
            cache.advance(count, sequence)
        assert list(self.ours.lengths) == list(self.oracle.lengths)

    def step(self) -> None:
        """One position of every sequence."""
        for layer in range(len(self.shape.layers)):
            qkv = self.rows(self.shape.sequences)
            found = stepped(self.ours, layer, qkv.to(self.backend.device)).cpu()
            self.compare(found, stepped(self.oracle, layer, qkv))
        for cache in (self.ours, self.oracle):
            for sequence in range(self.shape.sequences):
                cache.advance(1, sequence)

    def compare(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < self.backend.tolerance


def both(
    backend: Backend,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    windows: tuple[int, ...] = (0,),
    *,
    norms: bool = False,
    sequences: int = 1,
) -> Both:
    random = torch.Generator()
    random.seed()  # other inputs every run

    def norm() -> Tensor | None:
        return 1 + 0.2 * torch.randn(head_dim, generator=random) if norms else None

    cos, sin = reference_attention.rotary_table(
        10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)), 1.0, CONTEXT
    )
    layers = tuple(LayerAttention(window, norm(), norm()) for window in windows)
    return Both(AttentionShape(heads, kv_heads, head_dim, 1e-5, cos, sin, layers, sequences), backend, random)


def test_the_cache_says_its_type_and_is_empty(backend: Backend) -> None:
    pair = both(backend, sequences=2)
    assert pair.ours.type == backend.type
    assert list(pair.ours.lengths) == [0, 0]


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_queries_share_keys(backend: Backend, kv_heads: int, ratio: int) -> None:
    pair = both(backend, heads=ratio * kv_heads, kv_heads=kv_heads)
    for count in (5, 1, 1):
        pair.positions(count)


@pytest.mark.parametrize("head_dim", [2, 6, 18, 24, 40, 66, 80, 128])
@pytest.mark.parametrize("norms", [False, True])
def test_heads_of_any_even_width(backend: Backend, head_dim: int, norms: bool) -> None:
    pair = both(backend, head_dim=head_dim, norms=norms)
    for count in (1, 7, 1):
        pair.positions(count)


@pytest.mark.parametrize("counts", [(1,) * 5, (17,), (3, 16, 1, 33, 2, 1)], ids=str)
@pytest.mark.parametrize("windows", [(0,), (1,), (4, 0, 19)], ids=str)
def test_positions_come_one_by_one_or_many_at_once(
    backend: Backend, windows: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    pair = both(backend, windows=windows)
    for count in counts:
        pair.positions(count)


def test_layers_and_appending_do_not_count_and_a_step_can_be_repeated(backend: Backend) -> None:
    pair = both(backend)
    pair.positions(4)
    qkv = pair.rows(1).to(backend.device)
    first, again = (appended(pair.ours, 0, qkv) for _ in range(2))
    assert torch.equal(first, again)
    assert list(pair.ours.lengths) == [4]


@pytest.mark.parametrize("windows", [(0, 0), (0, 5)], ids=str)
def test_sequences_of_ragged_lengths_take_steps_together(backend: Backend, windows: tuple[int, ...]) -> None:
    pair = both(backend, windows=windows, sequences=3)
    for sequence, count in enumerate((1, 20, 7)):
        pair.positions(count, sequence)
    for _ in range(3):
        pair.step()
    assert list(pair.ours.lengths) == [4, 23, 10]


def test_a_truncated_text_goes_on_with_another(backend: Backend) -> None:
    pair = both(backend, sequences=2)
    pair.positions(20, 0)
    pair.positions(9, 1)
    for cache in (pair.ours, pair.oracle):
        cache.truncate(6, 0)
    assert list(pair.ours.lengths) == [6, 9]
    pair.positions(3, 0)
    pair.step()


def test_a_reset_cache_knows_nothing_of_the_text_before(backend: Backend) -> None:
    pair = both(backend, windows=(0, 3), sequences=2)
    pair.positions(20, 0)
    pair.step()
    for cache in (pair.ours, pair.oracle):
        cache.reset()
    assert list(pair.ours.lengths) == [0, 0]
    pair.positions(2, 1)
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
