"""OPT is scored block by block as the whole stock model scores it, also where it runs sparse."""

import math

import pytest
import torch
from models_for_tests import OPT, TEXT, VOCABULARY, make_opt
from torch.nn import functional
from transformers import AutoModelForCausalLM

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.eval.run import EvalRequest, evaluate
from sparsepack.eval.scorer import SparseScorer
from sparsepack.eval.streamed import StreamedScorer
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.records.rule import SiteRule
from sparsepack.models.stock.whole import load_model
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.sparsity.find import find_thresholds
from sparsepack.sparsity.options import AllocationOptions

IDS = torch.randint(VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=OPT)
def folder(request, tmp_path_factory):
    return make_opt(tmp_path_factory.mktemp("opt") / "m", **OPT[request.param])


@pytest.mark.parametrize("sparse_from", [0, 12, 24])
def test_hidden_states_logits_and_counts_are_those_of_the_whole_model_bit_for_bit(folder, sparse_from):
    checkpoint, start = open_checkpoint(folder), torch.full((5,), sparse_from)
    rules = {(layer, site): SiteRule(torch.tensor(0.4)) for layer in range(checkpoint.layers) for site in SITES}
    whole = SparseScorer(load_model(checkpoint), checkpoint.family, rules, 64)
    blocks = StreamedScorer(checkpoint, rules, 64)
    expected, found = (scorer.hidden(IDS, None, start) for scorer in (whole, blocks))
    assert torch.equal(expected, found)
    assert torch.equal(whole.head(slice(100))(expected), blocks.head(slice(100))(found))
    assert whole.realised() == blocks.realised()
    assert bool(whole.realised()) == (sparse_from < 24)


def test_perplexity_is_that_of_the_stock_model(folder, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT[:3000])
    request = EvalRequest(subject=str(folder), perplexity=(str(path),), context=48, windows=6, protocol="dense")
    row = evaluate(request)["perplexity"][0]
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = Text("text", (TEXT[:3000],), "text")
    inputs, targets = rolling_windows(open_checkpoint(folder).tokenizer, text, 48, 6)
    with torch.inference_mode():
        logits = stock(inputs).logits.flatten(0, 1)
    assert math.log(row["perplexity"]["value"]) == pytest.approx(
        float(functional.cross_entropy(logits, targets.flatten())), rel=1e-5
    )


@pytest.mark.parametrize("allocation", ["uniform", "teal", "global"])
def test_every_allocation_of_thresholds_works_on_it(allocation, tmp_path):
    checkpoint = open_checkpoint(make_opt(tmp_path / "m", **OPT["opt, narrow embedding, norms after"]))
    text = Text("text", (TEXT[:6000],), "text")
    made = calibrate(checkpoint, text, tmp_path / "c", CalibrateOptions(context=48, samples=8))
    options = AllocationOptions(sparsity=0.6, allocation=allocation, steps=3, length=32)
    table = find_thresholds(checkpoint, made, options)
    skipped = sum(table.rules[key].realised * weight for key, weight in table.weights.items())
    assert skipped / sum(table.weights.values()) == pytest.approx(0.6, abs=0.03)
