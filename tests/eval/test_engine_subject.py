"""`evaluate` with the engine as the runtime: the figures of the stock model, by the kernels that users run."""

from dataclasses import replace

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.eval import engine_subject
from sparsepack.eval.engine_subject import open_engine_subject
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def request_(half):
    """Four windows of the tiny model's zigzag artifact, half of it skipped."""
    return EvalRequest(str(half / "m.gguf"), perplexity=("shipped:heldout",), context=64, windows=4)


@pytest.mark.parametrize("protocol", ["dense", "decode", "all"])
@pytest.mark.parametrize("runtime", ["reference", "cpu", pytest.param("cuda", marks=gpu)])
def test_an_engine_gives_the_stock_models_figures(request_, runtime, protocol):
    device = "cuda" if runtime == "cuda" else "cpu"
    stock = evaluate(replace(request_, protocol=protocol, against="shipped:tiny"))["perplexity"][0]
    result = evaluate(replace(request_, protocol=protocol, against="shipped:tiny", runtime=runtime, device=device))
    ours = result["perplexity"][0]
    assert result["compute"]["runtime"] == runtime
    assert ours["targets"] == stock["targets"]
    # A channel within rounding of its threshold may flip, which no text this short averages out.
    rounding = 0.02 if protocol != "dense" else 1e-3 if runtime == "cuda" else 1e-4
    assert ours["perplexity"]["value"] == pytest.approx(stock["perplexity"]["value"], rel=rounding)
    assert ours["kl_divergence"]["value"] == pytest.approx(stock["kl_divergence"]["value"], abs=0.02)
    for name in ("overall", "of_sparse_sites", "target"):
        assert ours["realised_sparsity"][name] == pytest.approx(stock["realised_sparsity"][name], abs=0.005)
    assert ours["realised_sparsity"]["sites"].keys() == stock["realised_sparsity"]["sites"].keys()


def test_rows_of_different_lengths_are_scored_apart(request_):
    scorer = open_engine_subject(request_.subject, EngineOptions(backend="reference")).scorer()
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    together = scorer.logits(ids, torch.tensor([12, 5]), torch.tensor([6, 2]))
    assert not together[1, 5:].any()
    alone = scorer.logits(ids[1:, :5], torch.tensor([5]), torch.tensor([2]))
    assert torch.equal(together[1, :5], alone[0])


def test_rows_that_grow_load_the_model_a_few_times_only_and_say_what_runs_once(request_, monkeypatch, capsys):
    made = []

    class Watched(Engine):
        def __init__(self, packed, options, **changes):
            made.append(changes["context"])
            super().__init__(packed, options, **changes)

    monkeypatch.setattr(engine_subject, "Engine", Watched)
    scorer = open_engine_subject(request_.subject, EngineOptions(backend="reference")).scorer()
    for length in range(1, 9):
        scorer.logits(torch.full((1, length), 5), torch.tensor([length]), torch.tensor([0]))
    assert made == [1, 2, 4, 8]
    assert capsys.readouterr().err.count("runtime: reference") == 1


def test_only_zigzag_artifacts_run_in_an_engine(request_):
    with pytest.raises(UserError, match=r"--backend cpu runs zigzag-q4_k or .* or neuron-q4_k artifacts; pack"):
        evaluate(replace(request_, subject="shipped:tiny", runtime="cpu"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"runtime": "cuda"}, "device cpu: the cuda backend runs on NVIDIA GPUs; use device cuda or"),
        ({"runtime": "cpu", "device": "cuda"}, "device cuda: the cpu backend runs on the CPU; use device cpu or"),
        ({"runtime": "cuda", "device": "cuda:1", "dtype": "float16"}, "leave out --thresholds and --dtype"),
    ],
    ids=str,
)
def test_a_runtime_has_its_own_device_and_types(request_, changes, expected):
    with pytest.raises(UserError, match=expected):
        evaluate(replace(request_, **changes))


def test_a_runtime_that_does_not_exist_is_an_error(request_):
    with pytest.raises(UserError, match="runtime 'tpu': expected one of transformers"):
        evaluate(replace(request_, runtime="tpu"))
