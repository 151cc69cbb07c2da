"""A trained model: packed, read back and run, against the stock model with the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import write_zigzag
from backends import engine_of, every_backend
from packed_models import stock_logits, with_rules
from tokenizers import Tokenizer

from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.stock import dequantised, stock_config
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.model import build_model
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.generate import generate, open_tokenizer
from sparsepack.runtime.options import GenerateOptions

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
START = 12
NEAR = {"reference": 1e-3, "cpu": 0.02, "cuda": 0.02}
"""Largest difference of a logit without sparsity, of logits up to 20: keys and values of the cpu backend are half
precise, and so is what enters the products of the cuda backend's prefill."""


@pytest.fixture(scope="module")
def packed(shared_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """books-26m-silu, about half of its channels inactive at every site but one."""
    checkpoint = open_checkpoint(shared_model("books-26m-silu"))
    path = tmp_path_factory.mktemp("real") / "books.gguf"
    write_zigzag(checkpoint, {}, path)
    dense = read_packed(path)
    stock = build_model(stock_config(dense), dequantised(dense))
    chosen = with_rules(dense, stock, tokens(dense), [START])
    write_zigzag(checkpoint, chosen.rules, path, overwrite=True)
    return read_packed(path)


def tokens(packed: PackedModel) -> list[int]:
    assert packed.architecture.bos is not None
    return [packed.architecture.bos, *Tokenizer.from_str(packed.tokenizer_json).encode(TEXT).ids]


@every_backend
def test_logits_are_the_stock_models(backend: str, packed: PackedModel) -> None:
    model, ids = build_model(stock_config(packed), dequantised(packed)), tokens(packed)
    engine = engine_of(packed, backend, context=64)
    dense, _ = stock_logits(model, packed, ids, len(ids))
    assert (engine.teacher_forced(ids, len(ids)).cpu() - dense).abs().max() < NEAR[backend]
    sparse, _ = stock_logits(model, packed, ids, START)
    found = engine.teacher_forced(ids, START).cpu()
    # On the other backends rounding is coarser than the gap between a threshold and the nearest of thousands of inputs;
    # what one column changes grows from block to block, but stays well below what leaving out half of them does.
    bound = 0.1 if backend == "reference" else 0.6 * (sparse - dense)[START:].norm()
    assert (found - sparse).norm() < bound
    assert ((sparse - dense)[START:].norm() / dense.norm()) > 0.02
    assert 0.4 < sum(engine.activity().values()) / len(engine.activity()) < 0.6


@every_backend
def test_steps_agree_with_the_whole_text(backend: str, packed: PackedModel) -> None:
    engine, ids = engine_of(packed, backend, context=64), tokens(packed)
    expected = engine.teacher_forced(ids, START)[START - 1 :]
    engine.reset()
    found = torch.stack([engine.prefill(ids[:START]), *(engine.step(id) for id in ids[START:])])
    assert (found - expected).abs().max() < NEAR[backend]


@every_backend
def test_it_writes_english(backend: str, packed: PackedModel) -> None:
    engine = engine_of(packed, backend, context=64)
    tokenizer = open_tokenizer(packed.tokenizer_json)
    text = "".join(generate(engine, tokenizer, "The old man sat down by", GenerateOptions(12)))
    assert text.startswith(" ")
    assert text.isascii()
    assert " the " in text + " "


def test_the_whole_context_is_there_for_the_asking(packed: PackedModel) -> None:
    assert Engine(packed).context == 4096
    assert Engine(packed, context=8192).context == 8192
