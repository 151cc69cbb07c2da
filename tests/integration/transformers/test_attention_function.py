"""`attn_implementation="sparsepack_double"` in stock models, against a loop over texts, positions and heads."""

import dataclasses
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from packed_models import random_model, stock_model
from pairwise import each_value

from sparsepack.errors import UserError
from sparsepack.formats.blocks.labels import encode_labels, label_numbers, quantise_queries
from sparsepack.integration.transformers import double_sparsity as attention
from sparsepack.integration.transformers.double_sparsity import NAME, attach, attention_forward, sparse_rows
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.engine import Engine

POLICY = TokenPolicy(Fraction(1, 3), sinks=2, recent=3, min_context=6)
FAMILIES = [
    "llama",
    "llama, one head, relu",
    "mistral, sliding window",
    "qwen2, every second layer slides",
    "qwen3, wide heads, yarn",
]


def attention_of(config, policy=POLICY, channels=5, dense=(), seed=0):
    """Random heavy channels for a stock configuration."""
    generator = torch.Generator().manual_seed(seed)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = [
        torch.stack(
            [
                torch.randperm(head_dim, generator=generator)[:channels].sort().values
                for _ in range(config.num_key_value_heads)
            ]
        )
        for _ in range(config.num_hidden_layers)
    ]
    return SparseAttention(policy, tuple(None if n in dense else each for n, each in enumerate(layers)))


def models(variant, **options):
    """The stock model, dense, and another with the same weights and sparse attention."""
    packed = random_model(variant)
    dense, sparse = stock_model(packed), stock_model(packed)
    attach(sparse, attention_of(sparse.config, **options))
    return packed, dense, sparse


def naive(query, key, value, channels, policy, window, start):
    """One text, without padding: query [heads, S, D], key and value [kv_heads, S, D] -> [S, heads, D]."""
    heads, length, head_dim = query.shape
    group = heads // len(key)
    output = torch.zeros(length, heads, head_dim)
    for s in range(length):
        seen = [t for t in range(s + 1) if not window or t > s - window]
        for kv in range(len(key)):
            read = seen
            if s >= start:
                always = [t for t in seen if t < policy.sinks or t > s - policy.recent]
                mean = query[kv * group : (kv + 1) * group, s].sum(0)[channels[kv]]
                codes, scales = encode_labels(key[kv, seen][:, channels[kv]])
                sums = (label_numbers(codes).float() * quantise_queries(mean).float()).sum(-1)
                scores = dict(zip(seen, (sums * scales.float()).bfloat16().tolist(), strict=True))
                best = sorted((t for t in seen if t not in always), key=lambda t: (-scores[t], t))
                read = sorted(always + best[: policy.budget(len(seen)) - len(always)])
            for head in range(kv * group, (kv + 1) * group):
                weights = (query[head, s] @ key[kv, read].T / head_dim**0.5).softmax(-1)
                output[s, head] = weights @ value[kv, read]
    return output


class Module(torch.nn.Module):
    """An attention module as the function sees it."""

    def __init__(self, heads, channels, policy=POLICY):
        super().__init__()
        self.num_key_value_groups = heads // len(channels)
        setattr(self, attention._LAYER, attention._Layer(policy, channels))


def drawn(heads=4, kv_heads=2, length=20, head_dim=8, batch=1):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, n, length, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads)]


@each_value({"window": [0, 7, 9], "start": [0, 5, 19, 20], "heads, kv_heads": [(4, 4), (4, 2), (6, 1)]})
def test_rows_from_a_position_on_read_what_a_loop_finds_and_those_before_read_all(heads, kv_heads, start, window):
    query, key, value = drawn(heads, kv_heads)
    channels = torch.stack([torch.randperm(8)[:4].sort().values for _ in range(kv_heads)])
    mask = None
    if window:
        at = torch.arange(20)
        mask = ((at <= at[:, None]) & (at > at[:, None] - window))[None, None]
    with sparse_rows(torch.tensor([start])):
        found, weights = attention_forward(
            Module(heads, channels),
            query,
            key,
            value,
            mask,
            scaling=8**-0.5,
            sliding_window=window or None,
            position_ids=torch.arange(20)[None],
        )
    expected = naive(query[0], key[0], value[0], channels, POLICY, window, start)
    assert weights is None
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@each_value({"at_once": [1, 8, 256], "window": [0, 7]})
def test_texts_at_the_same_places_are_attended_together_as_each_alone(monkeypatch, at_once, window):
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", at_once)
    query, key, value = drawn(batch=5)
    channels = torch.stack([torch.randperm(8)[:4].sort().values for _ in range(2)])
    at = torch.arange(20)
    mask = ((at <= at[:, None]) & (at > at[:, None] - (window or 20))).expand(5, 1, 20, 20)
    options = {"sliding_window": window or None, "position_ids": at[None]}
    for alike in (True, False):
        starts = torch.tensor([16, 16, 16, 16, 16 if alike else 5])
        with sparse_rows(starts):
            found, _ = attention_forward(Module(4, channels), query, key, value, mask, **options)
        for row, start in enumerate(starts.tolist()):
            expected = naive(query[row], key[row], value[row], channels, POLICY, window, start)
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_without_a_word_one_query_is_sparse_and_several_are_dense():
    query, key, value = drawn()
    module = Module(4, torch.tensor([[0, 1, 2, 3]] * 2))
    dense = naive(query[0], key[0], value[0], None, POLICY, 0, 20)
    sparse = naive(query[0], key[0], value[0], torch.tensor([[0, 1, 2, 3]] * 2), POLICY, 0, 0)
    several, _ = attention_forward(module, query, key, value, None)
    torch.testing.assert_close(several[0], dense, rtol=1e-5, atol=1e-5)
    one, _ = attention_forward(module, query[:, :, -1:], key, value, None)
    torch.testing.assert_close(one[0, 0], sparse[-1], rtol=1e-5, atol=1e-5)
    assert (one[0, 0] - dense[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_padding_on_either_side_changes_no_real_position(variant, side):
    _, _, model = models(variant)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 300, (n,), generator=generator) for n in (24, 17, 9, 1)]
    ids, real = torch.full((4, 24), 2), torch.zeros(4, 24, dtype=torch.int64)
    for row, text in enumerate(texts):
        at = slice(24 - len(text), 24) if side == "left" else slice(len(text))
        ids[row, at], real[row, at] = text, 1
    starts = [12, 0, 3, 0]
    padding = [24 - len(text) if side == "left" else 0 for text in texts]
    position_ids = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), sparse_rows(torch.tensor([a + b for a, b in zip(starts, padding, strict=True)])):
        together = model(ids, attention_mask=real, position_ids=position_ids).logits
    for row, (text, start, before) in enumerate(zip(texts, starts, padding, strict=True)):
        with torch.no_grad(), sparse_rows(torch.tensor([start])):
            alone = model(text[None]).logits[0]
        torch.testing.assert_close(together[row, before : before + len(text)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_decoding_with_a_cache_is_a_prompt_with_sparse_rows(variant, cache):
    from transformers import DynamicCache, StaticCache

    _, _, model = models(variant)
    ids = torch.randint(3, 300, (2, 26), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), sparse_rows(torch.tensor([10, 10])):
        expected = model(ids).logits
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=40)
    with torch.no_grad():
        found = [model(ids[:, :10], past_key_values=past, use_cache=True).logits]
        for n in range(10, 26):
            found.append(model(ids[:, n : n + 1], past_key_values=past, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_are_those_of_the_reference_engine(variant):
    packed, _, model = models(variant, dense=(0,))
    packed = dataclasses.replace(packed, attention=attention_of(model.config, dense=(0,)))
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(7))
    engine = Engine(packed, device="cpu", context=64, backend="reference")
    for start in (0, 20, 40):
        with torch.no_grad(), sparse_rows(torch.tensor([start])):
            found = model(ids[None]).logits[0]
        torch.testing.assert_close(found, engine.teacher_forced(ids.tolist(), start), rtol=1e-3, atol=1e-3)


@each_value(
    {
        "policy": [
            TokenPolicy(Fraction(1), min_context=0, recent=1, sinks=0),
            TokenPolicy(Fraction(1, 16), min_context=0, sinks=60, recent=64),
            TokenPolicy(Fraction(1, 16), min_context=1024),
        ],
        "variant": FAMILIES,
    }
)
def test_generation_is_the_dense_one_where_every_token_is_read(variant, policy):
    _, dense, sparse = models(variant, policy=policy)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(9))
    real = torch.ones_like(ids)
    real[1, :5] = 0
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "attention_mask": real,
        "eos_token_id": None,
        "pad_token_id": 2,
    }
    assert torch.equal(sparse.generate(ids, **options), dense.generate(ids, **options))


def test_a_text_of_one_token_is_generated_from():
    _, dense, sparse = models("llama", policy=TokenPolicy(Fraction(1, 2), 0, 1, 0))
    one = torch.tensor([[5]])
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    assert sparse.generate(one, **options)[0, 1] == dense.generate(one, **options)[0, 1]


def test_half_precision_comes_and_goes():
    query, key, value = (x.bfloat16() for x in drawn())
    module = Module(4, torch.tensor([[0, 1, 2, 3]] * 2))
    found, _ = attention_forward(module, query[:, :, -1:], key, value, None)
    wide, _ = attention_forward(module, query[:, :, -1:].float(), key.float(), value.float(), None)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.bfloat16())


def test_a_model_without_a_policy_is_told_how_to_get_one():
    packed = random_model()
    model = stock_model(packed)
    model.set_attn_implementation(NAME)
    with pytest.raises(UserError, match=r"does not say which tokens it reads; load .* or call"):
        model(torch.tensor([[1, 2]]))


def test_channels_of_another_model_are_refused():
    _, model, _ = models("llama")
    fitting = attention_of(model.config)
    with pytest.raises(UserError, match="of 1 layers for a model of 2"):
        attach(model, SparseAttention(POLICY, fitting.channels[:1]))
    for wrong in (torch.tensor([[0, 8], [0, 1]]), torch.tensor([[0, 1]])):
        with pytest.raises(UserError, match=r"layer 1: heavy channels .* do not fit 2 KV heads of 8 channels"):
            attach(model, SparseAttention(POLICY, (None, wrong)))


def test_masks_that_are_not_causal_are_refused():
    query, key, value = drawn()
    module = Module(4, torch.tensor([[0, 1, 2, 3]] * 2))
    at = torch.arange(20)
    packed = (at <= at[:, None]) & (at // 10 == at[:, None] // 10)
    with sparse_rows(torch.tensor([0])), pytest.raises(UserError, match="text 0 is not causal"):
        attention_forward(module, query, key, value, packed[None, None])


def test_a_batch_of_another_size_than_announced_is_refused():
    query, key, value = drawn(batch=2)
    with sparse_rows(torch.tensor([0])), pytest.raises(UserError, match="of \\[1\\] texts, the batch has 2"):
        attention_forward(Module(4, torch.tensor([[0]] * 2)), query, key, value, None)


def test_importing_sparsepack_alone_imports_neither_torch_nor_transformers():
    code = "import sys, sparsepack; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_configuration_says_nothing_of_it_when_it_is_saved():
    _, _, model = models("llama")
    assert NAME not in model.config.to_json_string()
