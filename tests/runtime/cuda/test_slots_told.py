"""What `generate`, `eval` and `bench` tell of neurons with slots, on a GPU in plain torch."""

from dataclasses import replace
from pathlib import Path

import pytest
from artifacts_for_tests import tiny_by_neurons
from commands_for_tests import sparsepack
from native_build import skip_without_kernels
from packed_models import by_neurons, random_model

from sparsepack.bench.decode import bench_decode
from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.eval.engine_subject import EngineScorer, open_engine_subject
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import read_text
from sparsepack.formats.open import read_packed
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.placement.traffic import HitCounts
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_features
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions

skip_without_kernels()
pytestmark = pytest.mark.usefixtures("simulated_card")

WHOLE = EngineOptions(backend="cuda", cache_type="f32", threads=1)
SOME = replace(WHOLE, cached=0.3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model by neurons, as if it had been trained with ReLU."""
    return tiny_by_neurons(tmp_path_factory.mktemp("slots"))


@pytest.fixture
def request_of(path: Path) -> EvalRequest:
    texts = {"perplexity": ("shipped:heldout",), "context": 16, "windows": 1}
    return EvalRequest(str(path), runtime="cuda", engine=WHOLE, **texts)


def test_slots_change_nothing_but_what_is_told_of_them(request_of: EvalRequest) -> None:
    (plain,) = evaluate(request_of)["perplexity"]
    (placed,) = evaluate(replace(request_of, engine=SOME))["perplexity"]
    assert plain["protocol"] == placed["protocol"] == "decode"
    assert plain["served"] is None
    assert placed["perplexity"]["value"] == pytest.approx(plain["perplexity"]["value"], rel=1e-3)
    assert placed["realised_sparsity"]["overall"] == pytest.approx(plain["realised_sparsity"]["overall"], rel=1e-2)
    served = placed["served"]
    assert served["tokens"] == placed["targets"]
    assert 0 < served["hits"] < served["needed"]
    assert served["hit_rate"] == served["hits"] / served["needed"]


def test_what_is_served_is_the_sum_over_windows_whose_counts_begin_anew(request_of: EvalRequest) -> None:
    (found,) = evaluate(replace(request_of, engine=SOME, protocol="all"))["perplexity"]
    engine, total = Engine(read_packed(Path(request_of.subject)), SOME, context=16), HitCounts()
    tokenizer = open_engine_subject(request_of.subject, EngineOptions(backend="reference")).tokenizer
    windows = rolling_windows(tokenizer, read_text("shipped:heldout"), 16, 1)[0]
    for ids in windows.tolist():
        engine.reset()
        for id in ids:
            engine.step(id)
        assert engine.hit_counts is not None
        total += engine.hit_counts
    assert found["served"] == total.to_json()
    scorer = EngineScorer(read_packed(Path(request_of.subject)), SOME)
    assert scorer.hit_counts is None
    scorer.hidden(windows[:1, :16], None, windows.new_tensor([8]))
    once = scorer.hit_counts
    scorer.reset()
    assert scorer.hit_counts is None
    scorer.hidden(windows[:1, :16], None, windows.new_tensor([8]))
    assert scorer.hit_counts == once is not None


def test_the_commands_tell_what_had_slots(request_of: EvalRequest) -> None:
    flags = ["--perplexity", "shipped:heldout", "--context", "16", "--windows", "1"]
    done = sparsepack("eval", request_of.subject, *flags, "--backend", "cuda", "--cached", 0.3)
    assert done.exit_code == 0, done.output
    assert "% of the active neurons" in done.stdout
    assert "30 % of the neurons with slots, slow" in done.stderr
    flags = ["--prompt", "The for", "-n", 5, "--backend", "cuda", "--threads", 1]
    plain, *slots = (
        sparsepack("generate", request_of.subject, *flags, *some)
        for some in ((), *(("--cached", 0.3, "--policy", policy) for policy in ("slow", "static")))
    )
    assert "of the active neurons" not in plain.stderr
    for found, policy in zip(slots, ("slow", "static"), strict=True):
        assert found.exit_code == 0, found.output
        assert found.stdout == plain.stdout
        assert f"30 % of the neurons with slots, {policy}" in found.stderr
        assert "of the active neurons" in found.stderr


def test_bench_tells_what_each_test_of_decoding_took() -> None:
    packed = by_neurons(random_model("llama", hidden_size=256, intermediate_size=300, hidden_act="relu"))
    bandwidth = BandwidthProfile(1e9, 1e3, 1e2, 1e-5)
    engine = replace(SOME, policy="lru", bandwidth=bandwidth)
    settings = BenchSettings(prompt=8, generate=12, repetitions=1, engine=engine)
    found = bench_decode(packed, settings, "model.gguf", list(range(20, 36)))
    prefill, dense, row = found["tests"]
    assert "served" not in prefill
    assert "per_token" not in dense
    for each in (dense, row):
        assert each["served"]["tokens"] == 12
        assert 0 < each["served"]["hits"] < each["served"]["needed"]
    each, read, record = row["per_token"], row["per_token"]["bytes"], 2 * 256 * 4.5 / 8
    assert (each["needed"], each["hits"]) == (row["served"]["needed"] / 12, row["served"]["hits"] / 12)
    always = plan_of_share(parts_of(packed, 12, "f32"), 0.3).always_read()[0]
    assert read["card"] - always + read["bus"] + read["worker"] == pytest.approx(each["needed"] * record)
    assert read["moved"] == pytest.approx(row["served"]["moves"] / 12 * record)
    assert "30 % of the neurons with slots, lru" in found["runtime"]
    model = each["model"]
    assert model["slowest"] == "host"
    assert model["share"] == pytest.approx(model["together"] / (row["median_ns"] / 1e9 / 12))
    offloaded = each["needed"] - each["hits"] + row["served"]["moves"] / 12
    assert model["host"] == pytest.approx(max(offloaded / 1.1e3, row["served"]["moves"] / 12 / 1e3))
    assert "most of it reading host memory" in found["notes"][1]


def test_a_model_without_neurons_is_refused() -> None:
    def check(packed: object) -> None:
        check_features(find_backend("cuda"), SOME, packed)  # type: ignore[arg-type]

    with pytest.raises(UserError, match="cached: the model's MLPs are not stored by neurons; pack it with --format"):
        check(random_model("llama, one head, relu"))
    with pytest.raises(UserError, match=r"with the activation 'silu' none is exactly inactive; slots are for .* relu"):
        check(random_model())
