"""Sparse positions of a stock model: which they are, what they skip, and what padding does not change."""

import pytest
import torch
from models_for_tests import VOCABULARY, make_model

from sparsepack.eval.scorer import SparseScorer
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.sites import SiteRule

IDS = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=["llama", "mistral"])
def sparse_model(request, tmp_path_factory):
    """A random model (the second with a sliding window), and a rule of each kind at its sites; one stays dense."""
    changes = {"sliding_window": 6} if request.param == "mistral" else {}
    checkpoint = open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", request.param, **changes))
    model, generator = load_model(checkpoint), torch.Generator().manual_seed(1)
    rules = {}
    for layer in range(2):
        for number, site in enumerate(SITES):
            columns = checkpoint.stacked_shape(site)[1]
            threshold = torch.tensor(0.4) if number % 2 else torch.rand(columns, generator=generator)
            offset = 0.1 * torch.randn(columns, generator=generator) if number == 3 else None
            rules[layer, site] = SiteRule(threshold, offset)
    rules[1, "attn_out"] = SiteRule()
    return model, checkpoint.family, rules


@pytest.fixture
def scorer(sparse_model):
    return SparseScorer(*sparse_model, context=64)


def starts(*values):
    return torch.tensor(values)


def deployed(sparse_model, ids, sparse_from):
    """Logits [S, V] and inactive shares as deployment makes them: dense prefill into a cache, then sparse steps."""
    model, family, rules = sparse_model
    counts = {key: [0, 0] for key, rule in rules.items() if not rule.dense}

    def by_hand(layer, site, x):
        rule = rules[layer, site]
        if rule.dense:
            return None
        offset = torch.zeros_like(x) if rule.offset is None else rule.offset.expand_as(x)
        active = (x - offset).abs() > rule.limits
        counts[layer, site][0] += int((~active).sum())
        counts[layer, site][1] += x.numel()
        return active * x + ~active * offset

    logits, cache = [], None
    with torch.inference_mode():
        if sparse_from:
            out = model(ids[None, :sparse_from], use_cache=True)
            logits, cache = [out.logits[0]], out.past_key_values
        with site_hooks(list(enumerate(model.model.layers)), family, by_hand):
            for token in ids[sparse_from:]:
                out = model(token.view(1, 1), use_cache=True, past_key_values=cache)
                logits.append(out.logits[0])
                cache = out.past_key_values
    return torch.cat(logits), {key: inactive / max(seen, 1) for key, (inactive, seen) in counts.items()}


@pytest.mark.parametrize("sparse_from", [0, 7, 19, 20])
def test_one_pass_is_dense_prefill_and_sparse_steps_with_a_cache(sparse_model, scorer, sparse_from):
    found = scorer.logits(IDS[:1], starts(20), starts(sparse_from))[0]
    expected, shares = deployed(sparse_model, IDS[0], sparse_from)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
    if sparse_from < 20:
        assert scorer.realised() == pytest.approx(shares, abs=2e-3)
        assert all(0.05 < share < 0.95 for share in shares.values())
    else:
        assert scorer.realised() == {}


def test_rows_of_different_lengths_give_what_each_gives_alone(sparse_model, scorer):
    lengths, sparse_from = starts(20, 9, 14), starts(10, 3, 14)
    ids = IDS.clone()
    for row, length in enumerate(lengths.tolist()):
        ids[row, length:] = 0
    together = scorer.logits(ids, lengths, sparse_from)
    pooled = scorer.realised()
    alone = SparseScorer(*sparse_model, context=64)
    for row, length in enumerate(lengths.tolist()):
        single = alone.logits(IDS[row : row + 1, :length], starts(length), sparse_from[row : row + 1])
        torch.testing.assert_close(together[row, :length], single[0], rtol=1e-3, atol=2e-3)
    assert pooled == pytest.approx(alone.realised(), abs=2e-3)


def test_padding_is_never_counted(scorer):
    """Sparse positions: 10 of 20, 6 of 9, none of 14."""
    scorer.logits(IDS, starts(20, 9, 14), starts(10, 3, 14))
    assert {key: int(seen) for key, seen in scorer._positions._seen.items()} == {
        (layer, site): 16 * (512 if site == "mlp_mid" else 256)
        for layer in range(2)
        for site in SITES
        if (layer, site) != (1, "attn_out")
    }


def test_what_stands_in_the_padding_changes_nothing(scorer):
    lengths, sparse_from = starts(20, 9, 14), starts(0, 0, 0)
    one = scorer.logits(IDS, lengths, sparse_from)
    before = scorer.realised()
    scorer.reset()
    ids = IDS.clone()
    ids[1, 9:], ids[2, 14:] = 3, 4
    other = scorer.logits(ids, lengths, sparse_from)
    assert torch.equal(one[1, :9], other[1, :9])
    assert torch.equal(one[2, :14], other[2, :14])
    assert scorer.realised() == before


def test_counts_add_up_until_they_are_reset(scorer):
    scorer.logits(IDS, starts(20, 20, 20), starts(0, 0, 0))
    once, seen = scorer.realised(), int(scorer._positions._seen[0, "attn_in"])
    scorer.logits(IDS, starts(20, 20, 20), starts(0, 0, 0))
    assert scorer.realised() == once
    assert int(scorer._positions._seen[0, "attn_in"]) == 2 * seen
    scorer.reset()
    assert scorer.realised() == {}


def test_without_rules_it_is_the_stock_model(sparse_model):
    model, family, _ = sparse_model
    plain = SparseScorer(model, family, {}, context=64)
    with torch.inference_mode():
        assert torch.equal(plain.logits(IDS, starts(20, 20, 20), starts(0, 0, 0)), model(IDS).logits)
    assert plain.realised() == {}
