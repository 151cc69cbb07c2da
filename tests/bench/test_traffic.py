"""Sizes counted from the stored tensors, against counts by hand."""

import dataclasses

import pytest
import torch
from packed_models import random_model, stock_model, with_sites

from sparsepack.bench.decode import bytes_per_token, parameters, stored_bytes
from sparsepack.formats.packed import PackedModel, PackedSite, skipped_weights
from sparsepack.models.sites import SiteRule


@pytest.mark.parametrize("variant", ["llama", "llama tied, biases, llama3 rotary", "qwen3, tied"])
def test_parameters_are_those_of_the_stock_model(variant: str) -> None:
    packed = random_model(variant)
    assert parameters(packed) == sum(p.numel() for p in stock_model(packed).parameters())


def test_stored_bytes_are_those_of_all_tensors() -> None:
    packed = random_model("llama")
    # hidden 64 in 8 heads of 8, 2 of keys; intermediate 172; vocabulary 300: bands of 256 rows, 144 bytes a column
    sites = 144 * (1 * 64 + 1 * 64 + 2 * 64 + 1 * 172)
    assert stored_bytes(packed) == 2 * (sites + 2 * 64 * 4) + 64 * 4 + 300 * 64 * 2 + 300 * 64 * 2


def test_a_tied_output_is_stored_once() -> None:
    tied, free = (random_model("qwen3, tied", tie_word_embeddings=tie) for tie in (True, False))
    assert stored_bytes(free) - stored_bytes(tied) == 300 * 64 * 2


def test_a_dense_token_reads_everything_but_the_embedding_s_other_rows() -> None:
    packed = random_model("llama")
    assert bytes_per_token(packed, {}) == stored_bytes(packed) - 299 * 64 * 2
    assert skipped_weights(packed, {}).overall == 0


def test_inactive_columns_are_not_read() -> None:
    packed = random_model("llama")
    saved = 144 * (0.5 * 64 + 0.75 * 172)
    activity = {(0, "attn_in"): 0.5, (1, "mlp_mid"): 0.25}
    assert bytes_per_token(packed, {}) - bytes_per_token(packed, activity) == pytest.approx(saved)
    # Of the weights, not of the stored bytes, which have padding: 64 + 32 rows of q, k, v, and 64 of down.
    weights = 2 * (96 * 64 + 64 * 64 + 344 * 64 + 64 * 172)
    assert skipped_weights(packed, activity).overall == pytest.approx((0.5 * 96 * 64 + 0.75 * 64 * 172) / weights)


def test_biases_and_rules_are_read_too() -> None:
    packed = random_model("qwen2, biases, tied")
    before = bytes_per_token(packed, {})
    site = dataclasses.replace(packed.layers[0].sites["attn_in"], rule=SiteRule(torch.zeros(()), torch.zeros(64)))
    assert bytes_per_token(_with_first_site(packed, site), {}) - before == 4 + 64 * 4
    bare = dataclasses.replace(packed.layers[0].sites["attn_in"], bias=None)
    assert before - bytes_per_token(_with_first_site(packed, bare), {}) == (64 + 16 + 16) * 4


def _with_first_site(packed: PackedModel, site: PackedSite) -> PackedModel:
    layer = with_sites(packed.layers[0], {"attn_in": site})
    return dataclasses.replace(packed, layers=(layer, *packed.layers[1:]))
