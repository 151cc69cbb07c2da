"""Keys and values in the host's memory, the kernels: results have the bits of the same cache on the GPU."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from attention_shapes import shape_of
from kv_cache_backends import appended, as_product, moved, stepped
from simulated_slots import assign_slots
from torch import Tensor

from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention.double_sparsity import TokenSlots
from sparsepack.runtime.cuda.attention.kv_cache import CudaDoubleSparsityKvCache, OffloadedKvCache
from sparsepack.runtime.cuda.driver.memory import host_tensors
from sparsepack.runtime.kv_cache import AttentionShape

turned_shape = partial(shape_of, turned=True, norms=True)


class Pair:
    """A cache in the host's memory, and the same on the card."""

    def __init__(self, shape: AttentionShape, type: str, slots: float) -> None:
        self.shape, self.random = shape, torch.Generator(device="cuda")
        print("seed", self.random.seed())  # other inputs every run
        device, there = torch.device("cuda"), moved(shape, "cuda")
        self.ours = OffloadedKvCache(there, type, device, slots=slots)
        self.theirs = CudaDoubleSparsityKvCache(there, type, device)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.drift = torch.zeros(shape.sequences, width, device="cuda")

    @property
    def slots(self) -> TokenSlots:
        (slots,) = self.ours._slots
        assert slots is not None
        return slots

    def rows(self, count: int) -> Tensor:
        """Queries like those of the row before, as in texts."""
        new = torch.randn(count, self.drift.shape[1], device="cuda", generator=self.random)
        if count == len(self.drift):
            self.drift = 0.9 * self.drift + 0.4 * new
            width = self.shape.heads * self.shape.head_dim
            new[:, :width] = self.drift[:, :width]
        return new

    def prefill(self, count: int, sequence: int = 0) -> None:
        rows = self.rows(count)
        for cache in (self.ours, self.theirs):
            cache.append(0, as_product(rows), sequence)
            cache.advance(count, sequence)

    def truncate(self, length: int, sequence: int = 0) -> None:
        for cache in (self.ours, self.theirs):
            cache.truncate(length, sequence)

    def step(self) -> None:
        rows = self.rows(self.shape.sequences)
        before = TokenSlots(*(getattr(self.slots, name).clone() for name in TokenSlots.__dataclass_fields__))
        found, expected = (stepped(cache, 0, rows, True) for cache in (self.ours, self.theirs))
        if self.theirs.selecting(True) is not None:
            assert torch.equal(found, expected)
        else:  # another kernel, which adds in another order
            assert (found - expected).abs().max() <= 1e-5
        self.check(before)
        for cache in (self.ours, self.theirs):
            for sequence in range(self.shape.sequences):
                cache.advance(1, sequence)

    def check(self, before: TokenSlots) -> None:
        """That slots hold what they say, and were given as the simulated kernel gives them."""
        before = TokenSlots(*(getattr(before, name).cpu() for name in TokenSlots.__dataclass_fields__))
        after = TokenSlots(*(getattr(self.slots, name).cpu() for name in TokenSlots.__dataclass_fields__))
        keys, values = (x.cpu() for x in (self.ours._layers[0].keys, self.ours._layers[0].values))
        for n, position in enumerate(self.ours.lengths):
            for head in range(self.shape.kv_heads):
                slots = after.listed[n, head, : after.counts[n, head]].long()
                tokens = after.token_of[n, head, slots].long()
                assert tokens.unique().numel() == len(tokens)
                assert torch.equal(after.keys[n, head, slots], keys[n, head, tokens])
                assert torch.equal(after.values[n, head, slots], values[n, head, tokens])
                assign_slots(before, (n, head), tokens.tolist(), position)
        for name in ("slot_of", "token_of", "last_read", "missed_counts"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("slots", [1.0, 1.5, 2.0, 100.0])
    @pytest.mark.parametrize("type", ["bf16", "f16", "f32"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"), [(4, 4, 128), (8, 2, 64), (6, 2, 80), (7, 1, 18), (16, 1, 256)]
    )
    def test_steps_have_the_bits_of_a_cache_on_the_card(
        self, heads: int, kv_heads: int, head_dim: int, type: str, slots: float
    ) -> None:
        pair = Pair(turned_shape(heads, kv_heads, head_dim, 3000), type, slots)
        for length in (1, 6, 300, 1100, 1200):
            pair.prefill(length)
            for _ in range(6):
                pair.step()

    @pytest.mark.parametrize(
        "policy",
        [
            TokenPolicy(Fraction(1), 4, 64, 0),
            TokenPolicy(Fraction(1, 1000), 0, 1, 0),
            TokenPolicy(Fraction(1, 3), 4, 64, 500),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("window", [0, 333])
    def test_budgets_and_windows(self, policy: TokenPolicy, window: int) -> None:
        pair = Pair(replace(turned_shape(4, 2, 64, 1500, window=window), policy=policy), "bf16", 1.0)
        if pair.ours._slots[0] is None:  # a window that is always read whole
            assert 0 < window < policy.min_context
            return
        for length in (1, 100, 397, 2, 800):
            pair.prefill(length)
            for _ in range(3):
                pair.step()

    def test_long_texts_take_several_rounds(self) -> None:
        policy = TokenPolicy(Fraction(1, 6), 4, 64, 0)
        pair = Pair(replace(turned_shape(8, 2, 64, 40_000), policy=policy), "bf16", 1.4)
        pair.prefill(38_000)
        for _ in range(8):
            pair.step()

    def test_texts_of_different_length_end_and_begin_again(self) -> None:
        pair = Pair(replace(turned_shape(4, 2, 64, 900), sequences=5), "bf16", 2.0)
        for sequence, length in enumerate((0, 1, 70, 600, 411)):
            if length:
                pair.prefill(length, sequence)
        for _ in range(12):
            pair.step()
        for sequence, length in ((3, 100), (4, 0), (2, 75)):
            pair.truncate(length, sequence)
        pair.prefill(150, 3)
        for _ in range(12):
            pair.step()

    @pytest.mark.parametrize("window", [0, 30, 70])
    @pytest.mark.parametrize("sequence", [0, 1])
    def test_many_queries_read_what_lies_with_the_host(self, sequence: int, window: int) -> None:
        shape = replace(turned_shape(4, 2, 64, 300, window=window), sequences=2)
        pair, random = Pair(shape, "bf16", 1.0), torch.randn(90, 8 * 64, device="cuda")
        for first in (0, 50):
            rows = random[first : first + 50]
            caches = (pair.ours, pair.theirs)
            found, expected = (appended(cache, 0, rows, sequence) for cache in caches)
            assert torch.equal(found, expected)
            for cache in caches:
                cache.advance(len(rows), sequence)

    def test_what_a_step_brings_falls_once_it_has_been_read(self) -> None:
        pair = Pair(shape_of(8, 2, 64, 3000, norms=True), "bf16", 2.0)
        pair.prefill(2800)
        brought = []
        for _ in range(20):
            pair.step()
            brought.append(pair.ours.fetched()[0])
        assert brought[0] >= 2 * 350
        assert sum(brought[10:]) / 10 < brought[0] / 2

    def test_the_host_s_memory_is_zero_and_keeps_what_is_written(self) -> None:
        first, second = host_tensors(2, (3, 5, 7), torch.bfloat16, torch.device("cuda"))
        assert not first.any()
        first.fill_(2)
        assert not second.any()
        assert float(first.float().sum()) == 2 * 105
