"""Evaluating models whose decoded positions read some of the tokens: every path measures the same."""

import dataclasses
import json
from fractions import Fraction

import pytest
import torch
from artifacts_for_tests import write_zigzag
from models_for_tests import ONLY_ATTENTION, VOCABULARY, WINDOWED, make_model

from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.eval.engine_subject import EngineScorer
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.protocols import TokensRead
from sparsepack.eval.results import evaluation_table
from sparsepack.eval.run import evaluate
from sparsepack.eval.scorer import SparseScorer, StreamedScorer
from sparsepack.eval.subject import open_subject
from sparsepack.formats.attention import attention_section
from sparsepack.formats.open import read_packed
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.options import EngineOptions

POLICY = TokenPolicy(Fraction(1, 4), sinks=2, recent=3, min_context=8)
IDS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(3))


def first_channels(config, count=8, policy=POLICY, dense=()):
    """Sparse attention by the first channels of every head."""
    kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
    channels = torch.arange(count).expand(kv_heads, -1)
    return SparseAttention(policy, tuple(None if n in dense else channels for n in range(layers)))


@pytest.fixture(scope="module", params=ONLY_ATTENTION)
def packed(request, tmp_path_factory):
    """A checkpoint, and the same as a zigzag file with sparse attention: dense sites, so that all compute the same."""
    folder = tmp_path_factory.mktemp("m")
    made = make_model(folder / "m", request.param, **WINDOWED[request.param])
    pack(PackRequest(str(made), folder / "m.gguf"))
    found = read_packed(folder / "m.gguf")
    return dataclasses.replace(found, attention=first_channels(open_checkpoint(made).config, dense=(0,)))


def stock_scorers(packed):
    """By blocks, and the whole model in memory."""
    from sparsepack.formats.stock import stock_of
    from sparsepack.models.hf_model.model import build_model

    stock = stock_of(packed)
    whole = build_model(stock.config, stock.tensor)
    return (
        StreamedScorer(stock, stock.rules, 64, attention=stock.attention),
        SparseScorer(whole, stock.family, stock.rules, 64, attention=stock.attention),
    )


@pytest.mark.parametrize("sparse_from", [0, 20, 40])
def test_blocks_the_whole_model_and_the_reference_engine_give_the_same_logits(packed, sparse_from):
    starts = torch.full((3,), sparse_from)
    streamed, whole = stock_scorers(packed)
    engine = EngineScorer(packed, EngineOptions(backend="reference"))
    expected = engine.hidden(IDS, None, starts)
    hidden = streamed.hidden(IDS, None, starts, batch=2)
    assert torch.equal(hidden, whole.hidden(IDS, None, starts))
    torch.testing.assert_close(streamed.head(slice(None))(hidden), expected, rtol=1e-3, atol=1e-3)
    assert streamed.tokens_read.result() == whole.tokens_read.result() == engine.tokens_read.result()
    assert (streamed.tokens_read.result() is None) == (sparse_from == 40)


def test_rows_of_different_length_and_beginning_are_as_each_alone(packed):
    lengths, starts = torch.tensor([40, 31, 9]), torch.tensor([20, 0, 4])
    _, whole = stock_scorers(packed)
    together = whole.logits(IDS, lengths, starts)
    for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        alone = whole.logits(IDS[row : row + 1, :length], torch.tensor([length]), torch.tensor([start]))[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-4, atol=1e-4)


def test_sparse_attention_changes_the_logits_of_sparse_positions_alone(packed):
    _, whole = stock_scorers(packed)
    dense, sparse = (whole.hidden(IDS, None, torch.full((3,), start)) for start in (40, 20))
    torch.testing.assert_close(sparse[:, :20], dense[:, :20], rtol=1e-5, atol=1e-5)
    assert (sparse[:, 20:] - dense[:, 20:]).abs().max() > 1e-3


def test_tokens_read_are_counted_by_layer_window_and_row():
    attention = SparseAttention(TokenPolicy(Fraction(1, 2), 0, 1, 4), (None, torch.tensor([[0]]), torch.tensor([[0]])))
    read = TokensRead(attention, (0, 0, 3))
    assert read.result() is None
    read.count(6, torch.tensor([6, 5]), torch.tensor([4, 6]))  # positions 4 and 5 of the first row: 5 and 6 seen
    assert read.result() == {"target": 0.5, "of_sparse_layers": (6 + 6) / (11 + 6), "overall": (11 + 6 + 6) / (22 + 6)}
    read.reset()
    assert read.result() is None


@pytest.mark.long
def test_the_paths_agree_on_a_trained_model(tmp_path, shared):
    model = shared / "models" / "books-26m-silu"
    pack(PackRequest(str(model), tmp_path / "m.gguf"))
    found = read_packed(tmp_path / "m.gguf")
    policy = TokenPolicy(Fraction(1, 4), sinks=4, recent=16, min_context=64)
    found = dataclasses.replace(found, attention=first_channels(open_checkpoint(str(model)).config, 16, policy, (0, 1)))
    ids = torch.randint(found.architecture.vocabulary, (1, 192), generator=torch.Generator().manual_seed(1))
    streamed, _ = stock_scorers(found)
    starts = torch.tensor([96])
    logits = streamed.head(slice(None))(streamed.hidden(ids, None, starts))
    expected = EngineScorer(found, EngineOptions(backend="reference")).hidden(ids, None, starts)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    dense = streamed.head(slice(None))(streamed.hidden(ids, None, torch.tensor([192])))
    assert (logits - dense)[:, 96:].abs().max() > 0.1


def test_a_checkpoint_is_measured_with_what_a_program_gives_it(tmp_path):
    checkpoint = open_checkpoint(make_model(tmp_path / "m"))
    attention = first_channels(checkpoint.config)
    whole = SparseScorer(load_model(checkpoint), checkpoint.family, {}, 64, attention=attention)
    starts = torch.full((3,), 20)
    streamed = StreamedScorer(checkpoint, {}, 64, attention=attention)
    assert torch.equal(whole.hidden(IDS, None, starts), streamed.hidden(IDS, None, starts))


@pytest.fixture(scope="module")
def request_(half, tmp_path_factory):
    """The tiny model as a zigzag file: half of the weights skipped, and a quarter of the tokens read."""
    folder, checkpoint = tmp_path_factory.mktemp("tiny"), open_checkpoint("shipped:tiny")
    attention = first_channels(checkpoint.config, policy=TokenPolicy(Fraction(1, 4), 2, 4, 16), dense=(0,))
    section = attention_section(attention, heads_of_config(checkpoint.config), "0" * 64)
    write_zigzag(checkpoint, read_thresholds(half / "t.json").rules, folder / "m.gguf", attention=section)
    return EvalRequest(str(folder / "m.gguf"), perplexity=("shipped:heldout",), context=64, windows=4)


@pytest.mark.parametrize("runtime", ["transformers", "reference"])
def test_a_file_is_measured_with_sparse_attention_and_sparse_columns(request_, runtime):
    request = dataclasses.replace(request_, runtime=runtime)
    result = evaluate(request)
    row = result["perplexity"][0]
    assert result["protocol"] == "decode"
    assert result["subject"]["attention"]["tokens"] == "1/4"
    assert result["subject"]["attention"]["dense_layers"] == [0]
    assert row["realised_sparsity"]["of_sparse_sites"] > 0.3
    assert 0.25 < row["tokens_read"]["of_sparse_layers"] < 0.3 < row["tokens_read"]["overall"] < 1
    dense = evaluate(dataclasses.replace(request, protocol="dense"))
    assert dense["perplexity"][0]["tokens_read"] is None
    assert json.loads(json.dumps(result)) == result
    assert evaluation_table(result).count("a decoded one reads 1/4 of them") == 1
    assert "; layer 0 of 3 reads all" in evaluation_table(result)
    assert f" {100 * row['tokens_read']['of_sparse_layers']:.1f} % (25.0 %) |" in evaluation_table(result)
    assert "attention: not used by protocol dense" in evaluation_table(dense)
    assert "a decoded one reads" not in evaluation_table(dense)


def test_a_table_of_rows_and_tasks_tells_the_policy_once(request_):
    result = evaluate(request_)
    read = {"target": 0.25, "of_sparse_layers": 0.3, "overall": 0.6}
    tasks = {
        "tasks": {},
        "apply_chat_template": False,
        "realised_sparsity": result["perplexity"][0]["realised_sparsity"],
        "tokens_read": read,
        "served": None,
    }
    table = evaluation_table({**result, "tasks": tasks})
    assert table.count("attention: ") == 1
    assert "read in tasks: 30.0 % (25.0 %) of the tokens seen" in table
    alone = evaluation_table({**result, "perplexity": [], "tasks": tasks})
    assert "a decoded one reads 1/4 of them" in alone


def test_the_engine_gives_the_stock_models_figures(request_):
    stock, engine = (
        evaluate(dataclasses.replace(request_, runtime=runtime))["perplexity"][0]
        for runtime in ("transformers", "reference")
    )
    # A channel or a token within rounding of being read may flip, which no text this short averages out.
    assert engine["perplexity"]["value"] == pytest.approx(stock["perplexity"]["value"], rel=0.02)
    assert engine["tokens_read"] == stock["tokens_read"]


def test_tasks_count_the_tokens_they_read(request_):
    scorer = open_subject(request_.subject).task_scorer()
    ids = torch.randint(200, (2, 40), generator=torch.Generator().manual_seed(0))
    scorer.logits(ids, torch.tensor([40, 30]), torch.tensor([39, 20]))
    assert 0.25 <= scorer.tokens_read.result()["of_sparse_layers"] < 0.35


def test_models_that_read_all_tokens_say_so(tmp_path):
    request = EvalRequest("shipped:tiny", perplexity=("shipped:heldout",), context=64, windows=2)
    result = evaluate(request)
    assert result["subject"]["attention"] is None
    assert result["perplexity"][0]["tokens_read"] is None
    assert "a decoded one reads" not in evaluation_table(result)
