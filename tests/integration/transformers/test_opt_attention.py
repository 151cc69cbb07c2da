"""Sparse attention in stock OPT models, whose attention scales queries itself."""

from fractions import Fraction

import torch
from models_for_tests import make_opt

from sparsepack.integration.transformers.double_sparsity import attach, sparse_rows
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy

IDS = torch.randint(512, (2, 30), generator=torch.Generator().manual_seed(2))


def sparse(checkpoint, policy):
    channels = torch.arange(8).expand(4, -1)
    model = load_model(checkpoint)
    attach(model, SparseAttention(policy, (channels,) * checkpoint.layers))
    with torch.no_grad(), sparse_rows(torch.tensor([10, 0])):
        return model(IDS).logits


def test_reading_every_token_is_dense_attention_and_reading_few_is_not(tmp_path):
    checkpoint = open_checkpoint(make_opt(tmp_path / "m"))
    with torch.no_grad():
        dense = load_model(checkpoint)(IDS).logits
    every = sparse(checkpoint, TokenPolicy(Fraction(1), sinks=0, recent=1, min_context=0))
    torch.testing.assert_close(every, dense, rtol=1e-4, atol=1e-3)
    few = sparse(checkpoint, TokenPolicy(Fraction(1, 8), sinks=1, recent=2, min_context=4))
    assert (few - dense).abs().max() > 1
