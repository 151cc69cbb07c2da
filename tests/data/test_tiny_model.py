"""The text that ships with Python, its split, and the tiny models trained on it."""

import importlib
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace
from sparsepack.data import SHIPPED_MODELS
from sparsepack.data.topics import HELD_OUT_TOPICS, clean_paragraphs, heldout_text, training_text, word_runs
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY, MIXTURE = SHIPPED_MODELS["shipped:tiny"], SHIPPED_MODELS["shipped:tiny-mixture"]
both = pytest.mark.parametrize("model", [TINY, MIXTURE], ids=lambda path: path.name)


def tool(name: str) -> ModuleType:
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def corpus() -> Any:
    """All the text of the tools. To read the docstrings of the standard library takes seconds."""
    return tool("tiny_model_training").gather_corpus()


def long_lines(documents: list[str]) -> set[str]:
    return {line.strip() for document in documents for line in document.split("\n") if len(line.strip()) >= 40}


def test_every_held_out_name_is_a_topic_of_this_python() -> None:
    assert set(topics) >= HELD_OUT_TOPICS


def test_no_topic_opens_a_document_of_both_parts() -> None:
    titles = [{document.split("\n")[0] for document in part} for part in (training_text(), heldout_text())]
    assert all(titles)
    assert titles[0].isdisjoint(titles[1])


def test_held_out_part_is_about_an_eighth_of_the_characters() -> None:
    training, held_out = (sum(map(len, part)) for part in (training_text(), heldout_text()))
    assert 0.08 < held_out / (training + held_out) < 0.18


def test_parts_share_no_long_line_and_no_run_of_words() -> None:
    training, held_out = training_text(), heldout_text()
    assert long_lines(training).isdisjoint(long_lines(held_out))
    runs = [word_runs("\n\n".join(part).split("\n\n")) for part in (training, held_out)]
    assert runs[0].isdisjoint(runs[1])


def test_no_paragraph_of_prose_is_repeated_within_a_part() -> None:
    for part in (training_text(), heldout_text()):
        paragraphs = [p for p in "\n\n".join(part).split("\n\n") if len(p) >= 80]
        assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.slow
def test_docstrings_share_no_run_of_words_with_held_out_topics(corpus: Any) -> None:
    found = corpus.docstrings
    assert sum(map(len, found)) > 100_000
    runs = [word_runs("\n\n".join(part).split("\n\n")) for part in (found, heldout_text())]
    assert runs[0].isdisjoint(runs[1])


def test_prose_is_unwrapped_and_code_keeps_its_lines() -> None:
    wrapped = (
        "A title\n*******\n\n"
        "   Each of these lines is long enough to be a line of a built-\n   in kind of prose.  It goes on.\n\n"
        "   for x in y:\n       print(x)\n\n"
        "   rule ::= item+\n"
    )
    assert clean_paragraphs(wrapped) == [
        "A title",
        "Each of these lines is long enough to be a line of a built-in kind of prose. It goes on.",
        "for x in y:\n    print(x)",
    ]


def test_bigram_rows_are_distributions_and_an_unseen_context_is_the_lower_order() -> None:
    bigram = tool("bigram")
    table = bigram.bigram_table(torch.tensor([0, 1, 0, 1, 0, 2, 1, 3]), 6)
    assert torch.allclose(table.sum(1), torch.ones(6, dtype=torch.float64))
    assert (table > 0).all()
    assert table[0, 1] == table[0].max()
    assert torch.equal(table[4], table[5])


def test_nll_of_a_table_counts_the_first_token_after_bos() -> None:
    table = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    nll = tool("bigram").table_nll(table, torch.tensor([1, 0]), 0)
    assert torch.allclose(nll.exp(), torch.tensor([1 / 0.75, 2.0], dtype=torch.float64))


@both
def test_a_shipped_folder_is_small(model: Path) -> None:
    assert sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) <= 4_000_000


def test_shipped_model_is_a_llama_whose_widths_are_whole_superblocks() -> None:
    config = json.loads((TINY / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_act"] == "silu"
    assert config["tie_word_embeddings"]
    assert config["dtype"] == "bfloat16"
    heads_width = config["num_attention_heads"] * config["head_dim"]
    assert [width % 256 for width in (config["hidden_size"], config["intermediate_size"], heads_width)] == [0, 0, 0]


@both
def test_a_shipped_tokenizer_round_trips_any_text(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    text = 'The "with" statement\n\n    naïve → 日本 🙂'
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode(text)[0] == 0, "as in training, where BOS is before each document"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)


@pytest.mark.slow
@both
def test_a_shipped_model_beats_the_bigrams_on_held_out_topics(model: Path, corpus: Any) -> None:
    bigram, training = tool("bigram"), tool("tiny_model_training")
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    tokenizer = training.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens, _ = training.joined(tokenizer, corpus.held_out)
    topics_only = training.stream(tokenizer, corpus.topics)
    everything = torch.cat([topics_only, training.stream(tokenizer, corpus.docstrings)])
    bigrams = [
        bigram.table_nll(bigram.bigram_table(seen, stock.config.vocab_size), tokens, training.BOS).mean().exp().item()
        for seen in (topics_only, everything)
    ]
    perplexity = training.model_nll(stock, tokens, stock.config.max_position_embeddings).mean().exp().item()
    assert perplexity < 0.8 * min(bigrams)


def test_no_block_of_the_shipped_mixture_leaves_most_of_its_experts_out(tmp_path: Path) -> None:
    options = TraceOptions(sessions=8, tokens=256, prompt=16, batch=8)
    traced = trace("shipped:tiny-mixture", "shipped:heldout", tmp_path / "trace", options)
    assert (traced.unit, traced.layers, traced.neurons) == ("experts", 4, 16)
    sessions = range(len(traced.sessions))
    for block in range(4):
        visits = sum(traced.active(session, block).sum(0) for session in sessions)
        assert (visits > 0).sum() >= 12
        assert visits.sum() == 2 * 256 * len(sessions)


def test_the_perplexity_of_the_shipped_mixture_is_the_stock_models() -> None:
    training = tool("tiny_model_training")
    request = EvalRequest(subject="shipped:tiny-mixture", perplexity=("shipped:heldout",), context=128, windows=4)
    found = evaluate(request)["perplexity"][0]["perplexity"]["value"]
    stock = AutoModelForCausalLM.from_pretrained(MIXTURE, dtype=torch.float32, local_files_only=True)
    tokenizer = training.Tokenizer.from_file(str(MIXTURE / "tokenizer.json"))
    tokens, _ = training.joined(tokenizer, heldout_text())
    nll = training.model_nll(stock, tokens[: 4 * 128], 128)
    assert found == pytest.approx(nll.mean().exp().item(), rel=1e-4)


def test_what_is_added_to_the_loss_is_what_the_stock_model_adds() -> None:
    mixture, run = tool("train_tiny_mixture"), tool("tiny_model_run")
    settings = run.Settings(run.Shape(2, 32, 64), 0.0, 1, 16, 1, 1e-3, 0.0, 0.5, 0, "cpu")
    model = mixture.build(settings)
    tokens = torch.randint(64, (2, 16))
    output = model(input_ids=tokens, labels=tokens)
    predicted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    added = mixture.MIXTURE.more_loss(model, output)
    assert added > 0
    assert torch.allclose(predicted + added, output.loss, atol=1e-6)


def test_a_short_training_leaves_a_checkpoint_and_lowers_the_loss(tmp_path: Path) -> None:
    training, run, mixture = tool("tiny_model_training"), tool("tiny_model_run"), tool("train_tiny_mixture")
    text = ["the cat sat on the mat and the dog sat on the log. " * 10]
    corpus = run.Corpus(text, text, text, text)
    tokenizer = training.train_tokenizer(text, 300)
    settings = run.Settings(run.Shape(1, 32, 300), 0.0, 8, 32, 4, 1e-2, 0.0, 0.5, 0, "cpu")
    trained = training.train(mixture.MIXTURE, settings, tokenizer, corpus)
    size = len(text[0].encode())
    tokens, _ = training.joined(tokenizer, text)
    torch.manual_seed(0)
    before = training.bits_per_byte(training.model_nll(mixture.build(settings), tokens, 32), size)
    assert trained.validation_bits < 0.9 * before
    training.save(trained, tmp_path)
    found = open_checkpoint(tmp_path)
    assert found.config.num_experts == 16
    assert found.dtype == torch.bfloat16
