"""The oracle's gated delta net: against formulas in float64, and what its states refuse."""

from typing import Any

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor
from torch.nn.functional import softplus

from sparsepack.errors import UserError
from sparsepack.models.blocks import DeltaNet, Mamba
from sparsepack.runtime.reference.delta_net import (
    DeltaNetStates,
    MambaStates,
    causal_convolution,
    delta_rule,
    state_space,
    state_space_chunks,
)

NET = DeltaNet(key_heads=2, value_heads=6, key_dim=5, value_dim=7, taps=4)
HIDDEN = 11


def weights(seed: int = 0) -> dict[str, Tensor]:
    return {
        "delta_beta": normal(NET.value_heads, HIDDEN, seed=seed),
        "delta_alpha": normal(NET.value_heads, HIDDEN, seed=seed + 1),
        "delta_conv": normal(NET.channels, NET.taps, seed=seed + 2),
        "delta_a_log": normal(NET.value_heads, seed=seed + 3),
        "delta_dt_bias": normal(NET.value_heads, seed=seed + 4),
        "delta_norm": normal(NET.value_dim, seed=seed + 5),
    }


def states(sequences: int = 1, **more: Any) -> DeltaNetStates:
    return DeltaNetStates(NET, {0: weights(), 3: weights(9)}, 1e-6, sequences, **more)


def text(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What attn_in gives, and what it is given."""
    return normal(length, NET.channels + NET.values, seed=seed), normal(length, HIDDEN, seed=seed + 1)


def test_a_convolution_sees_the_last_positions() -> None:
    x, before, weight = normal(6, 3), normal(3, 3, seed=1), normal(3, 4, seed=2)
    found, after = causal_convolution(x, before, weight)
    seen = torch.cat([before, x]).double()
    sums = torch.stack([(seen[t : t + 4] * weight.T).sum(0) for t in range(6)])
    assert (found - sums).abs().max() < 1e-5
    assert torch.equal(after, x[-3:])


def test_a_convolution_of_one_tap_keeps_nothing() -> None:
    x, weight = normal(4, 3), normal(3, 1, seed=2)
    found, after = causal_convolution(x, normal(0, 3), weight)
    assert (found - x * weight[:, 0]).abs().max() < 1e-6
    assert len(after) == 0


def test_the_state_learns_by_the_delta_rule() -> None:
    """After a token with beta 1 the state answers its key, of length 1, with its value."""
    k = torch.nn.functional.normalize(normal(3, 2, 5), dim=-1)
    v, state = normal(3, 2, 7, seed=1), normal(2, 5, 7, seed=2)
    one = torch.ones(3, 2)
    outputs = delta_rule(k, k, v, 0.5 * one, one, state)
    assert (outputs - v).abs().max() < 1e-5
    assert (torch.einsum("hk,hkv->hv", k[2], state) - v[2]).abs().max() < 1e-5


def test_without_decay_and_learning_the_state_stays() -> None:
    state = normal(2, 5, 7)
    before, zero = state.clone(), torch.zeros(3, 2)
    delta_rule(normal(3, 2, 5), normal(3, 2, 5, seed=1), normal(3, 2, 7, seed=2), zero + 1, zero, state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_text_in_pieces_is_the_text_at_once(cut: int) -> None:
    rows, x = text(9)
    expected = states().mix(3, rows, x, 0, 0)
    kept = states()
    found = [kept.mix(3, rows[:cut], x[:cut], 0, 0), kept.mix(3, rows[cut:], x[cut:], 0, cut)]
    assert (torch.cat(found) - expected).abs().max() < 1e-5


def test_sequences_and_blocks_keep_their_own() -> None:
    rows, x = text(4)
    kept = states(2)
    first = kept.mix(0, rows, x, 0, 0)
    assert torch.equal(kept.mix(0, rows, x, 1, 0), first)
    assert not torch.allclose(kept.mix(3, rows, x, 0, 0), first, atol=0.1)


def test_a_copy_goes_on_alone() -> None:
    rows, x = text(8)
    kept = states(2)
    kept.mix(0, rows[:5], x[:5], 0, 0)
    kept.copy(0, 1)
    expected = kept.mix(0, rows[5:], x[5:], 1, 5)
    assert torch.equal(kept.mix(0, rows[5:], x[5:], 0, 5), expected)


def test_a_state_of_other_tokens_is_refused_and_an_empty_sequence_begins_anew() -> None:
    rows, x = text(4)
    kept = states()
    expected = kept.mix(0, rows, x, 0, 0)
    for length in (3, 5):
        with pytest.raises(UserError, match=f"is that after 4 tokens, {length} are in the context"):
            kept.mix(0, rows, x, 0, length)
    assert torch.equal(kept.mix(0, rows, x, 0, 0), expected)


def test_a_state_space_model_adds_what_has_not_faded() -> None:
    x, b, c = normal(6, 4, 3), normal(6, 4, 5, seed=1), normal(6, 4, 5, seed=2)
    steps, rate, state = normal(6, 4, seed=3).abs(), normal(4, seed=4).abs(), torch.zeros(4, 3, 5)
    found = state_space(x, b, c, steps, rate, state)
    passed = steps.double().cumsum(0)
    for t in range(6):
        faded = (-rate * (passed[t] - passed[: t + 1])).exp() * steps[: t + 1]  # [tokens, heads]
        share = faded * (b[: t + 1].double() * c[t]).sum(-1)
        expected = (share[..., None] * x[: t + 1]).sum(0)
        assert (found[t] - expected).abs().max() < 1e-5
    in_state = ((-rate * (passed[-1] - passed)).exp() * steps)[..., None, None] * x[..., None] * b[:, :, None]
    assert (state - in_state.sum(0)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 5), (1, 2, 3, 5), (63, 4, 10, 14), (64, 1, 1, 1), (130, 6, 8, 16)], ids=str
)
def test_chunks_of_a_state_space_model_are_its_tokens(shape: tuple[int, int, int, int]) -> None:
    """Also with decays that are nearly zero, and from a state that is not."""
    count, heads, width, channels = shape
    x = normal(count, heads, width, seed=1)
    b, c = (normal(count, heads, channels, seed=seed) for seed in (2, 3))
    steps, rate = softplus(4 * normal(count, heads, seed=4)), (2 * normal(heads, seed=5)).exp()
    states = [normal(heads, width, channels, seed=6) for _ in range(2)]
    expected, found = state_space(x, b, c, steps, rate, states[0]), state_space_chunks(x, b, c, steps, rate, states[1])
    for ours, oracle in ((found, expected), (states[1], states[0])):
        assert float((ours - oracle).norm()) <= 1e-6 * float(oracle.norm())


def test_a_text_of_a_state_space_model_is_the_same_in_pieces() -> None:
    """Groups of heads share B and C, and groups of channels are normed apart."""
    net = Mamba(heads=6, head_dim=4, groups=2, state=5, taps=3, norms=2)
    of_heads = {
        name: normal(net.heads, seed=n) for n, name in enumerate(("mamba_a_log", "mamba_dt_bias", "mamba_skip"))
    }
    of_channels = {
        "mamba_conv": normal(net.channels, net.taps, seed=7),
        "mamba_conv_bias": normal(net.channels, seed=8),
    }
    layer = {**of_heads, **of_channels, "mamba_norm": normal(net.inner, seed=9)}
    rows, x = normal(7, net.rows, seed=10), normal(7, HIDDEN)
    whole = MambaStates(net, {2: layer}, 1e-6, 1).mix(2, rows, x, 0, 0)
    states = MambaStates(net, {2: layer}, 1e-6, 1)
    parts = [states.mix(2, rows[n : n + 1], x[n : n + 1], 0, n) for n in range(7)]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    with pytest.raises(UserError, match="begin the sequence anew"):
        states.mix(2, rows[:1], x[:1], 0, 3)
