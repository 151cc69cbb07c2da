"""Rolling perplexity and divergence against plain computations, for each protocol."""

import math
import os

import pytest
import torch

from sparsepack.calibrate.threshold_table import Thresholds
from sparsepack.eval.perplexity import WindowScores, score_windows, summarise
from sparsepack.eval.protocols import scored_from
from sparsepack.eval.subject import open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.sites import SiteRule
from sparsepack.models.tokenizer.windows import rolling_windows


@pytest.fixture(scope="module")
def tiny():
    return open_checkpoint("shipped:tiny")


@pytest.fixture(scope="module")
def windows(tiny):
    inputs, targets = rolling_windows(tiny.tokenizer, read_text("shipped:heldout"), 64)
    return inputs[:5], targets[:5]


@pytest.fixture(scope="module")
def dense(tiny):
    return open_subject(tiny.name)


@pytest.fixture(scope="module")
def sparse(tiny):
    rule = SiteRule(0.2, sparsity=0.4, realised=0.4)
    rows = {(layer, site): rule for layer in range(tiny.layers) for site in SITES}
    return open_subject(tiny.name, Thresholds(tiny.sha256, "", "uniform", "magnitude", 0.4, "sparse", rows))


def plain_nll(subject, inputs, targets, sparse_from):
    """Mean over rows of NLL [S], positions from `sparse_from` masked by hand."""

    def by_hand(layer, site, x):
        rule = subject.rules.get((layer, site))
        if rule is None:
            return None
        x = x.clone()
        x[:, sparse_from:][x[:, sparse_from:].abs() <= rule.limits] = 0
        return x

    with torch.inference_mode(), site_hooks(list(enumerate(subject.model.model.layers)), subject.family, by_hand):
        log_q = subject.model(inputs).logits.double().log_softmax(-1)
    return -log_q.gather(-1, targets[..., None])[..., 0], log_q


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("protocol", "sparse_from", "scored"), [("dense", 64, 0), ("all", 0, 0), ("decode", 32, 32)])
def test_each_protocol_scores_what_it_says(sparse, dense, windows, protocol, sparse_from, scored, batch):
    """decode: the first half is dense context and not scored; the second half runs sparse and is."""
    inputs, targets = windows
    scores = score_windows(sparse.scorer(), inputs, targets, protocol, dense.scorer(), batch)
    nll, log_q = plain_nll(sparse, inputs, targets, sparse_from)
    reference, log_p = plain_nll(dense, inputs, targets, 64)
    assert scores.targets == 64 - scored
    torch.testing.assert_close(scores.nll, nll[:, scored:].sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(scores.reference_nll, reference[:, scored:].sum(1), rtol=1e-5, atol=0)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[:, scored:].sum(1)
    torch.testing.assert_close(scores.kl, kl, rtol=1e-3, atol=1e-4)
    same = (log_p.argmax(-1) == log_q.argmax(-1))[:, scored:].sum(1)
    assert (scores.same_top - same).abs().max() <= 1  # a tie may fall either way
    half = score_windows(sparse.scorer(), inputs, targets, protocol, dense.scorer(), batch, second_half=True)
    assert half.targets == 32
    torch.testing.assert_close(half.nll, nll[:, 32:].sum(1), rtol=1e-5, atol=0)
    if protocol != "dense":
        assert scores.kl.min() > 0


def test_the_second_half_of_a_window_without_bos_is_that_of_its_tokens():
    assert [scored_from("decode", width) for width in (2048, 2047, 2)] == [1024, 1023, 1]
    assert [scored_from(protocol, 2048) for protocol in ("dense", "all")] == [0, 0]


def test_a_model_does_not_diverge_from_itself(dense, windows):
    result = summarise(score_windows(dense.scorer(), *windows, "decode", dense.scorer()), 1)
    assert result["kl_divergence"] == {"value": 0.0, "stderr": 0.0}
    assert result["top_token_agreement"] == {"value": 1.0, "stderr": 0.0}
    assert result["perplexity_ratio"] == {"value": 1.0, "stderr": 0.0}
    assert result["source_perplexity"] == result["perplexity"]["value"]


def test_figures_and_their_errors_follow_their_definitions():
    nll = torch.tensor([20.0, 30.0, 40.0], dtype=torch.float64)
    reference = torch.tensor([19.0, 28.0, 37.0], dtype=torch.float64)
    kl, same = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([9.0, 8.0, 7.0]).double()
    result = summarise(WindowScores(nll, 10, kl, same, reference), 123)
    assert (result["windows"], result["targets"]) == (3, 30)
    assert result["perplexity"]["value"] == pytest.approx(math.exp(3))
    assert result["perplexity"]["stderr"] == pytest.approx(math.exp(3) / math.sqrt(3))
    assert result["bits_per_byte"] == pytest.approx(90 / math.log(2) / 123)
    assert result["kl_divergence"] == pytest.approx({"value": 0.2, "stderr": 0.1 / math.sqrt(3)})
    assert result["top_token_agreement"]["value"] == pytest.approx(0.8)
    assert result["source_perplexity"] == pytest.approx(math.exp(2.8))
    assert result["perplexity_ratio"]["value"] == pytest.approx(math.exp(0.2))
    assert result["perplexity_ratio"]["stderr"] == pytest.approx(math.exp(0.2) * 0.1 / math.sqrt(3))
    single = summarise(WindowScores(nll[:1], 10, None, None, None), 123)
    assert single["perplexity"] == {"value": pytest.approx(math.exp(2)), "stderr": None}
    assert "kl_divergence" not in single


def test_perplexity_of_a_real_model_is_that_of_a_plain_loop(shared):
    """transformers' own loading, whole logits, cross entropy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(shared / "models" / "books-26m-silu")
    text = read_text(str(shared / "text" / "wikitext2.test.txt.xz"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.joined[:60_000], add_special_tokens=False)["input_ids"][:1024]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    means = []
    for window in torch.tensor(ids).view(2, 512):
        inputs = torch.cat([torch.tensor([tokenizer.bos_token_id]), window[:-1]])
        with torch.inference_mode():
            means.append(torch.nn.functional.cross_entropy(model(inputs[None]).logits[0], window))
    subject = open_subject(folder)
    inputs, targets = rolling_windows(subject.tokenizer, text, 512)
    result = summarise(score_windows(subject.scorer(), inputs[:2], targets[:2], "dense"), 1)
    assert result["perplexity"]["value"] == pytest.approx(float(torch.stack(means).mean().exp()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("SPARSEPACK_SLOW") != "1", reason="takes minutes; set SPARSEPACK_SLOW=1")
def test_dense_perplexity_of_wikitext_is_what_an_independent_reference_found(shared):
    """48 windows of 2048 tokens in float32: 133.76 over all targets, 122.81 over the second halves."""
    subject = open_subject(str(shared / "models" / "books-26m-silu"))
    text = read_text(str(shared / "text" / "wikitext2.test.txt.xz"))
    inputs, targets = rolling_windows(subject.tokenizer, text, 2048)
    for protocol, expected in (("dense", 133.76), ("decode", 122.81)):
        result = summarise(score_windows(subject.scorer(), inputs[:48], targets[:48], protocol), 1)
        assert result["perplexity"]["value"] == pytest.approx(expected, abs=0.01)
