"""What a benchmark's result holds; never how fast anything is."""

import dataclasses
import itertools
import json
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from packed_models import by_neurons, random_model, stock_model, with_rules

from sparsepack.bench import bandwidth as memory
from sparsepack.bench import decode
from sparsepack.bench.decode import bench_decode
from sparsepack.bench.energy import EnergyMeter
from sparsepack.bench.options import BenchSettings
from sparsepack.bench.run import HEADER, bench_table
from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions

TEXT = list(range(20, 36))
SETTINGS = BenchSettings(prompt=8, generate=12, repetitions=3, engine=EngineOptions(threads=1, backend="reference"))
LLAMA_BENCH_KEYS = {
    *("cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params", "n_threads"),
    *("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
    *("samples_ns", "samples_ts"),
}


@pytest.fixture(autouse=True)
def _small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    read = memory.read_bandwidth
    monkeypatch.setattr(memory, "read_bandwidth", lambda device: read(device, 1 << 20))


def running(**changes: Any) -> BenchSettings:
    return dataclasses.replace(SETTINGS, engine=dataclasses.replace(SETTINGS.engine, **changes))


@cache
def sparse_model() -> PackedModel:
    packed = random_model("llama")
    return with_rules(packed, stock_model(packed), TEXT, [0])


@cache
def result() -> dict[str, Any]:
    return bench_decode(sparse_model(), SETTINGS, "model.gguf", TEXT)


def test_the_tests_are_prefill_and_decoding_dense_and_sparse() -> None:
    assert [(row["test"], row["mode"]) for row in result()["tests"]] == [
        ("pp8", "dense"),
        ("tg12", "dense"),
        ("tg12", "sparse"),
    ]
    assert [(row["n_prompt"], row["n_gen"]) for row in result()["tests"]] == [(8, 0), (0, 12), (0, 12)]


def test_the_result_is_json_with_llama_bench_s_keys() -> None:
    again = json.loads(json.dumps(result(), allow_nan=False))
    for row in again["tests"]:
        assert set(row) >= LLAMA_BENCH_KEYS
        assert row["model_filename"] == "model.gguf"
        assert row["n_threads"] == 1
        assert row["backends"] == "reference"
        assert row["cpu_info"] == cpu_info() != ""
        assert row["model_size"] == decode.stored_bytes(sparse_model())


def test_speeds_follow_from_the_samples() -> None:
    for row in result()["tests"]:
        tokens = row["n_prompt"] + row["n_gen"]
        assert len(row["samples_ns"]) == 3
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])
        assert row["min_ts"] <= row["median_ts"] <= row["max_ts"]
        assert row["min_ts"] <= row["avg_ts"] <= row["max_ts"]
        assert row["stddev_ts"] >= 0


def test_bytes_and_sparsity_are_those_of_the_tokens_that_ran() -> None:
    prefill, dense, sparse = result()["tests"]
    engine = Engine(sparse_model(), backend="reference")
    for id in TEXT[:12]:
        engine.step(id)
    activity = engine.activity()
    assert prefill["bytes_per_token"] is prefill["realised_sparsity"] is prefill["bandwidth_share"] is None
    assert dense["bytes_per_token"] == decode.bytes_per_token(sparse_model(), {})
    assert dense["realised_sparsity"] == 0
    assert sparse["bytes_per_token"] == pytest.approx(decode.bytes_per_token(sparse_model(), activity))
    assert 0.2 < sparse["realised_sparsity"] < 0.7
    bandwidth = result()["read_bandwidth"]["bytes_per_second"]
    for row in (dense, sparse):
        assert row["bandwidth_share"] == pytest.approx(row["bytes_per_token"] * row["avg_ts"] / bandwidth)


def test_dense_and_sparse_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    timed = decode._timed

    def watched(engine: Engine, test: Any, tokens: Any) -> int:
        order.append(f"{test.name} {test.mode}")
        return timed(engine, test, tokens)

    monkeypatch.setattr(decode, "_timed", watched)
    bench_decode(sparse_model(), BenchSettings(prompt=0, generate=3, repetitions=2))
    assert order == ["tg3 dense", "tg3 sparse"] * 2


def test_output_is_checked_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(result()["check"]) == {"dense", "sparse"}
    assert max(result()["check"].values()) < 1e-4
    step = Engine.step_all
    monkeypatch.setattr(Engine, "step_all", lambda engine, ids: 2 * step(engine, ids))
    with pytest.raises(UserError, match="steps differ from the whole text at once by 1"):
        bench_decode(sparse_model(), SETTINGS)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_the_clock_starts_and_stops_when_the_device_has_done_its_work(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake device of torch's that no backend is made for: the reference's way of waiting."""
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append(f"waited for {device}"))
    monkeypatch.setattr(decode.time, "perf_counter_ns", lambda: len(done.append("clock") or done))
    engine = Engine(sparse_model(), backend="reference")
    engine.device = torch.device(device)
    monkeypatch.setattr(engine, "step_all", lambda ids: done.append("step"))
    nanoseconds = decode._timed(engine, decode._Test("tg2", "dense", 0, 2), [TEXT])
    waited = [] if device == "cpu" else [f"waited for {device}"]
    assert done == [*waited, "clock", "step", "step", *waited, "clock"]
    assert nanoseconds == 3 + len(waited)


def test_an_artifact_without_thresholds_has_no_sparse_rows_and_says_so() -> None:
    found = bench_decode(random_model("llama"), SETTINGS)
    assert [row["mode"] for row in found["tests"]] == ["dense", "dense"]
    assert "no sparse decoding" in found["notes"][0]


def test_sparse_attention_alone_is_measured_and_tells_from_where_on_it_is_sparse() -> None:
    packed = random_model("llama")
    heavy = torch.arange(2).expand(packed.architecture.kv_heads, -1)
    for first, said in ((4, ""), (1024, "; here at most 12 are there, and all are read")):
        policy = TokenPolicy(Fraction(1, 2), sinks=0, recent=1, min_context=first)
        attention = SparseAttention(policy, (None, heavy))
        found = bench_decode(dataclasses.replace(packed, attention=attention), SETTINGS)
        assert [row["mode"] for row in found["tests"]] == ["dense", "dense", "sparse"]
        assert found["notes"][-1] == f"attention is sparse where {first:,} tokens or more are there{said}"


def test_random_tokens_repeat_and_begin_with_bos() -> None:
    first, again, other = (decode._tokens(sparse_model(), seed, 9) for seed in (0, 0, 1))
    assert first == again != other
    assert first[0] == sparse_model().architecture.bos
    assert "random, seed 0" in bench_table(bench_decode(sparse_model(), BenchSettings(8, 0, 1)))


def test_threads_are_set_for_the_run_and_restored() -> None:
    before = torch.get_num_threads()
    settings = BenchSettings(prompt=4, generate=0, repetitions=1, engine=EngineOptions(threads=before + 1))
    found = bench_decode(random_model("llama"), settings)
    assert found["tests"][0]["n_threads"] == before + 1
    assert torch.get_num_threads() == before


def test_the_table_has_a_line_per_test_and_says_that_the_reference_is_slow() -> None:
    lines = bench_table(result()).split("\n")
    rows = [line for line in lines if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in rows]
    assert [len(row) for row in cells] == [len(HEADER)] * 4
    assert cells[0] == list(HEADER)
    assert [row[2:4] for row in cells[1:]] == [["pp8", "dense"], ["tg12", "dense"], ["tg12", "sparse"]]
    assert "±" in cells[1][7]
    assert cells[1][9] == "-"
    assert "not to be fast" in "\n".join(lines)


def test_the_native_backend_says_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = pytest.importorskip("sparsepack.runtime.cpu._native")
    found = bench_decode(sparse_model(), running(backend="cpu", threads=2), ids=TEXT)
    assert "runtime: cpu, " + cpu.instruction_sets()[0] + ", 2 threads" in capsys.readouterr().err
    assert "native kernels" in bench_table(found)
    for row in found["tests"]:
        assert (row["backends"], row["n_threads"], row["type_k"], row["type_v"]) == ("cpu", 2, "f16", "f16")


def test_a_single_repetition_has_no_spread() -> None:
    row = bench_decode(random_model("llama"), BenchSettings(4, 0, 1))["tests"][0]
    assert row["stddev_ts"] == row["stddev_ns"] == 0


@pytest.mark.parametrize("options", [{"prompt": -1}, {"repetitions": 0}, {"prompt": 0, "generate": 0}], ids=str)
def test_settings_out_of_range_are_errors(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"expected at least|nothing to measure"):
        BenchSettings(**options)
    with pytest.raises(UserError, match="threads 0: expected at least 1"):
        EngineOptions(threads=0)


def test_tests_beyond_the_context_or_the_text_are_errors() -> None:
    with pytest.raises(UserError, match="context 65"):
        bench_decode(sparse_model(), BenchSettings(prompt=65, generate=0))
    with pytest.raises(UserError, match="text of 3 tokens: the tests take 12"):
        bench_decode(sparse_model(), SETTINGS, ids=TEXT[:3])


def test_several_sequences_need_no_room_for_a_prefill_that_is_not_run() -> None:
    alone, together = (BenchSettings(generate=8, batch=batch) for batch in (1, 3))
    assert alone.longest == alone.tokens == alone.prompt > 8
    assert (together.longest, together.tokens) == (8, 24)


def test_a_model_by_neurons_is_measured_with_and_without_skipping_them() -> None:
    packed = by_neurons(random_model("llama", hidden_size=256, intermediate_size=300, hidden_act="relu"))
    _, dense, sparse = bench_decode(packed, SETTINGS, "model.gguf", TEXT)["tests"]
    assert [row["mode"] for row in (dense, sparse)] == ["dense", "sparse"]
    assert {row["model_type"] for row in (dense, sparse)} == {"llama neuron-q4_k"}
    records = sum(layer.matrices["mlp_records"].blocks.nbytes for layer in packed.layers)
    saved = dense["bytes_per_token"] - sparse["bytes_per_token"]
    assert 0.3 * records < saved < 0.7 * records
    assert dense["realised_sparsity"] == 0
    assert sparse["realised_sparsity"] > 0.1
    assert dense["model_size"] == decode.stored_bytes(packed)


def test_tokens_per_joule_are_there_where_energy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench_decode(sparse_model(), BenchSettings(8, 4, 2))
    if found["energy"] is None:
        assert [row["tokens_per_joule"] for row in found["tests"]] == [None] * 3
        assert "tokens/J" not in bench_table(found)
    counted = itertools.count(step=2)
    meter = EnergyMeter("a fake", lambda: [next(counted)], 1.0, [2**64 - 1])  # 2 J a measurement
    monkeypatch.setattr("sparsepack.bench.decode.energy_meter", lambda device: meter)
    found = bench_decode(sparse_model(), BenchSettings(8, 4, 2))
    assert [row["tokens_per_joule"] for row in found["tests"]] == [4.0, 2.0, 2.0]
    lines = bench_table(found).split("\n")
    assert [line.split("|")[-2].strip() for line in lines[:1] + lines[2:5]] == ["tokens/J", "4.00", "2.00", "2.00"]
    assert any(line.startswith("tokens/J: a fake") for line in lines)
