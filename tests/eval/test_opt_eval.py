"""OPT is scored as the stock model scores it, and every allocation of thresholds works on it."""

import math

import pytest
import torch
from models_for_tests import OPT, TEXT, make_opt
from torch.nn import functional
from transformers import AutoModelForCausalLM

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.run import EvalRequest, evaluate
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer.windows import rolling_windows


@pytest.fixture(scope="module", params=OPT)
def folder(request, tmp_path_factory):
    return make_opt(tmp_path_factory.mktemp("opt") / "m", **OPT[request.param])


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
    learnt = {"steps": 3, "length": 32} if allocation == "global" else {}
    options = AllocationOptions(sparsity=0.6, allocation=allocation, **learnt)
    table = find_thresholds(checkpoint, made, options)
    skipped = sum(table.rules[key].realised * weight for key, weight in table.weights.items())
    assert skipped / sum(table.weights.values()) == pytest.approx(0.6, abs=0.03)
