"""A decoding step's attention to selected tokens on the GPU, against the oracle's cache of the same type."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from attention_shapes import shape_of
from kv_cache_backends import as_product, moved, stepped
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.cuda.attention.double_sparsity import CLUSTERS, attend
from sparsepack.runtime.cuda.attention.kv_cache import CudaDoubleSparsityKvCache
from sparsepack.runtime.cuda.driver.kernel import architecture
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.reference import double_sparsity as reference

pytestmark = pytest.mark.gpu

TYPES = {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}
"""Largest error of an output, of values about 1. Queries and keys that both round alike are selected alike."""


class Both:
    def __init__(self, shape: AttentionShape, type: str = "f32") -> None:
        self.shape, self.random = shape, torch.Generator().manual_seed(7)
        self.ours = CudaDoubleSparsityKvCache(moved(shape, "cuda"), type, torch.device("cuda"))
        self.oracle = reference.DoubleSparsityKvCache(shape, type, "cpu")
        self.gated = shape.layers[0].gated

    def rows(self, count: int) -> Tensor:
        width = (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
        return torch.randn(count, width, generator=self.random)

    def with_gates(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that our cache takes, and what its results are multiplied by."""
        if not self.gated:
            return rows, torch.ones(())
        queries = self.shape.heads * self.shape.head_dim
        gates = torch.randn(len(rows), self.shape.heads, self.shape.head_dim, generator=self.random)
        of_heads = rows[:, :queries].view(gates.shape)
        both = torch.stack([of_heads, gates], 2).flatten(1)
        return torch.cat([both, rows[:, queries:]], 1), gates.sigmoid().flatten(1)

    def prefill(self, count: int, sequence: int = 0) -> None:
        """The same keys and values in both, without what the order of sums changes."""
        rows = self.rows(count)
        self.oracle.append(0, rows, sequence)
        self.ours.append(0, as_product(self.with_gates(rows)[0].cuda()), sequence)
        first = self.oracle.lengths[sequence]
        new = slice(first, first + count)
        of = self.ours._double_sparsity[0]
        assert of is not None
        for ours, theirs in ((of.dense.keys, self.oracle._keys), (of.dense.values, self.oracle._values)):
            ours[sequence, :, new] = theirs[0][sequence, :, new].cuda()
        double_sparsity.label_append(of, first, count, sequence)
        self.ours.advance(count, sequence)
        self.oracle.advance(count, sequence)

    def step(self, cluster: int | None = None) -> tuple[Tensor, Tensor]:
        rows = self.rows(self.shape.sequences)
        expected = stepped(self.oracle, 0, rows, True)
        rows, gates = self.with_gates(rows)
        expected = expected * gates
        if cluster is None:
            found = stepped(self.ours, 0, rows.cuda(), True)
        else:
            of = self.ours._double_sparsity[0]
            assert of is not None
            found = torch.empty(len(rows), self.shape.heads * self.shape.head_dim, device="cuda")
            self.ours.positions.write(self.ours.lengths)
            attend(of, rows.cuda(), self.ours.positions.there, found, cluster=cluster)
        for sequence in range(self.shape.sequences):
            self.ours.advance(1, sequence)
            self.oracle.advance(1, sequence)
        return found.cpu(), expected

    def labels_agree(self) -> bool:
        of, labels = self.ours._double_sparsity[0], self.oracle._labels[0]
        assert of is not None
        assert labels is not None
        return all(
            torch.equal(ours[n, :, :length].cpu(), theirs[n, :, :length])
            for ours, theirs in zip((of.codes, of.scales), labels, strict=True)
            for n, length in enumerate(self.oracle.lengths)
        )


def clusters() -> list[int]:
    if not torch.cuda.is_available() or architecture(0) < double_sparsity.HOPPER:
        return [1]
    return list(CLUSTERS)


@pytest.mark.parametrize("cluster", clusters())
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "channels"),
    [(4, 4, 128, 32), (8, 2, 128, 32), (4, 2, 64, 16), (6, 2, 80, 20), (7, 1, 16, 4), (16, 1, 256, 64), (2, 1, 24, 24)],
)
def test_steps_are_those_of_the_oracle(
    heads: int, kv_heads: int, head_dim: int, channels: int, type: str, cluster: int
) -> None:
    both = Both(shape_of(heads, kv_heads, head_dim, 3000, channels=channels), type)
    for length in (1, 6, 9, 57, 300, 2100):
        both.prefill(length)
        for _ in range(3):
            found, expected = both.step(cluster)
            assert (found - expected).abs().max() <= TYPES[type]
    assert both.labels_agree()


@pytest.mark.parametrize("cluster", clusters())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 16), (4, 4, 128)])
@pytest.mark.parametrize("what", ["neighbours", "sinks", "gates", "growing queries"])
def test_steps_compute_what_families_have_of_their_own(
    what: str, heads: int, kv_heads: int, head_dim: int, cluster: int
) -> None:
    shape = shape_of(heads, kv_heads, head_dim, 600, turned=True)
    (layer,) = shape.layers
    of_layer = {"sinks": {"sinks": torch.linspace(-3, 3, heads)}, "gates": {"gated": True}}.get(what, {})
    of_shape = {"neighbours": {"neighbours": True}, "growing queries": {"query_scale": torch.linspace(1, 2, 600)}}
    both = Both(replace(shape, layers=(replace(layer, **of_layer),), **of_shape.get(what, {})))
    for length in (1, 57, 500):
        both.prefill(length)
        for _ in range(3):
            found, expected = both.step(cluster)
            assert (found - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("cluster", clusters())
@pytest.mark.parametrize("window", [1, 8, 50, 333])
def test_windows_limit_the_candidates(window: int, cluster: int) -> None:
    both = Both(shape_of(4, 2, 64, 1500, window=window))
    for length in (3, 40, 600, 700):
        both.prefill(length)
        found, expected = both.step(cluster)
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("cluster", clusters())
@pytest.mark.parametrize(
    "policy",
    [
        TokenPolicy(Fraction(1), 4, 64, 0),
        TokenPolicy(Fraction(1, 1000), 0, 1, 0),
        TokenPolicy(Fraction(1, 3), 4, 64, 500),
        TokenPolicy(Fraction(3, 4), 0, 1, 2),
    ],
    ids=str,
)
def test_budgets(policy: TokenPolicy, cluster: int) -> None:
    both = Both(replace(shape_of(4, 2, 64, 1500), policy=policy))
    for length in (1, 100, 397, 2, 800):
        both.prefill(length)
        found, expected = both.step(cluster)
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("cluster", clusters())
def test_texts_of_different_length(cluster: int) -> None:
    both = Both(replace(shape_of(4, 2, 64, 1500), sequences=5))
    for sequence, length in enumerate((0, 1, 70, 1200, 611)):
        if length:
            both.prefill(length, sequence)
    for _ in range(4):
        found, expected = both.step(cluster)
        assert (found - expected).abs().max() <= 1e-5
    assert both.labels_agree()


@pytest.mark.parametrize("cluster", clusters())
def test_of_equal_scores_the_earliest_are_read(cluster: int) -> None:
    both = Both(shape_of(2, 1, 64, 5000))
    both.prefill(4500)
    for labels in (both.ours._double_sparsity[0].scales, both.oracle._labels[0][1]):
        labels.zero_()
    found, expected = both.step(cluster)
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("cluster", clusters())
def test_turned_and_normed_heads_select_nearly_alike(cluster: int) -> None:
    """The last bits of a rotated query may decide which of two tokens of nearly the same score is read."""
    both = Both(shape_of(8, 2, 128, 4000, turned=True, norms=True))
    both.prefill(3900)
    errors = []
    for _ in range(20):
        found, expected = both.step(cluster)
        errors.append(float((found - expected).abs().max()))
    assert sorted(errors)[len(errors) // 2] <= 1e-4
    assert max(errors) <= 0.2


def test_the_same_bits_every_run() -> None:
    both = Both(shape_of(8, 2, 128, 9000))
    both.prefill(8800)
    of, rows = both.ours._double_sparsity[0], both.rows(1).cuda()
    both.ours.positions.write(both.ours.lengths)
    outputs = []
    for _ in range(10):
        outputs.append(torch.empty(1, 8 * 128, device="cuda"))
        attend(of, rows, both.ours.positions.there, outputs[-1])
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_dense_steps_label_their_keys() -> None:
    both = Both(replace(shape_of(4, 2, 64, 300), sequences=2))
    both.prefill(40, 0)
    both.prefill(90, 1)
    for _ in range(3):
        rows = both.rows(2)
        stepped(both.ours, 0, rows.cuda())
        stepped(both.oracle, 0, rows)
        for sequence in range(2):
            both.ours.advance(1, sequence)
            both.oracle.advance(1, sequence)
    assert both.labels_agree()


def test_long_contexts_take_more_blocks_and_longer_ones_are_refused() -> None:
    few = TokenPolicy(Fraction(1, 64))

    def longest(context: int) -> double_sparsity.DoubleSparsityParameters:
        shape = replace(shape_of(1, 1, 16, context), policy=few)
        cache = CudaDoubleSparsityKvCache(moved(shape, "cuda"), "bf16", torch.device("cuda"))
        (of,) = cache._double_sparsity
        assert of is not None
        return of

    most = 65_000 * clusters()[-1]
    assert double_sparsity.cluster_for(longest(most)) == clusters()[-1]
    with pytest.raises(UserError, match="no room"):
        longest(most + 9000)
