"""The attention weight that the best tokens miss, against a plain computation of one position after the other."""

import math

import pytest
import torch

from sparsepack.calibrate.collectors import MISSED, POSITIONS, SHARES


def _plain(query: torch.Tensor, key: torch.Tensor, window: int) -> tuple[list[float], int]:
    """Sums of the missed weight, mean over heads, at every position of the second half of short windows."""
    (windows, heads, length, channels), kv_heads = query.shape, key.shape[1]
    sums, positions = [0.0] * len(SHARES), 0
    for w in range(windows):
        for at in range(length // 2, length):
            first = max(0, at + 1 - window) if window else 0
            positions += 1
            for kv in range(kv_heads):
                group = query[w, kv * heads // kv_heads : (kv + 1) * heads // kv_heads, at].double()
                seen = key[w, kv, first : at + 1].double()
                weights = (group @ seen.T / math.sqrt(channels)).softmax(-1)
                order = (group.mean(0) @ seen.T).argsort(descending=True)
                for n, share in enumerate(SHARES):
                    read = order[: math.ceil(len(seen) / share)]
                    sums[n] += float(1 - weights[:, read].sum(-1).mean()) / kv_heads
    return sums, positions


@pytest.mark.parametrize("window", [0, 1, 9, 40, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_it_is_what_the_best_tokens_of_each_position_do_not_have(heads, kv_heads, window):
    generator = torch.Generator().manual_seed(heads)
    query = 2 * torch.randn(2, heads, 40, 8, generator=generator)
    key = torch.randn(2, kv_heads, 40, 8, generator=generator)
    sums, positions = MISSED.count(query, key, window)
    expected, count = _plain(query, key, window)
    assert positions.tolist() == [count] * len(SHARES)
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_even_attention_misses_all_but_the_share_and_pointed_attention_nothing():
    query, key = torch.zeros(1, 2, 512, 4), torch.randn(1, 1, 512, 4, generator=torch.Generator().manual_seed(0))
    sums, positions = MISSED.count(query, key, 0)
    assert positions.tolist() == [POSITIONS] * len(SHARES)
    even = [1 - 1 / share for share in SHARES]
    assert (sums / positions).tolist() == pytest.approx(even, abs=0.003), "rounded up"
    key[0, 0, 100], query[:] = 100, 100
    sums, _ = MISSED.count(query, key, 0)
    assert sums.tolist() == [0] * len(SHARES)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_windows_have_the_positions_that_there_are(length):
    query, key = torch.randn(3, 2, length, 4), torch.randn(3, 2, length, 4)
    sums, positions = MISSED.count(query, key, 0)
    assert positions.tolist() == [3 * (length - length // 2)] * len(SHARES)
    assert ((sums >= 0) & (sums <= positions)).all()
