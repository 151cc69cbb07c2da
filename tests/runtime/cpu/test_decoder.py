"""The native decoder: the reference's logits to the last bits, the same bits every run, and threads that behave."""

import dataclasses
import os
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch
from model_table import VARIANTS
from native_build import forks, instruction_set_params
from packed_models import by_neurons, random_model, stock_model, with_rules
from pairwise import each_value
from torch import Tensor

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.loading import load
from sparsepack.models.family import SITES
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.cpu.decoder import NativeDecoder
from sparsepack.runtime.cpu.kv_cache import NativeKvCache
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.reference.backend import operations as reference_operations

pytestmark = [mark for parameter in instruction_set_params()[:1] for mark in parameter.marks]
IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1)).tolist()
STARTS = [0, 6, 12]
SEVERAL = {"hidden_size": 512, "intermediate_size": 3000, "vocab_size": 4100}
"""Several spans, tiles and units of every product."""


@cache
def model(variant: str) -> PackedModel:
    packed = random_model(variant)
    return with_rules(packed, stock_model(packed), IDS, STARTS)


@cache
def large() -> PackedModel:
    packed = random_model("llama", **SEVERAL)
    return with_rules(packed, stock_model(packed), IDS, [0])


def reference_logits(packed: PackedModel, start: int, cache: str) -> Tensor:
    """Those of the reference, its keys and values in a type: f32, or rounded to half precision, f16."""
    decoder = OperationsDecoder(packed, reference_operations, torch.device("cpu"), 64, None, cache)
    return decoder.teacher_forced(torch.tensor(IDS), start, True)


@each_value({"start": [*STARTS, len(IDS)], "threads": [1, 2], "variant": VARIANTS})
def test_with_float32_kernels_only_the_half_precise_cache_differs_from_the_reference(
    variant: str, start: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.FORCED, "scalar")
    expected, unrounded = (reference_logits(model(variant), start, cache) for cache in ("f16", "f32"))
    found = Engine(model(variant), backend="cpu", threads=threads).teacher_forced(IDS, start)
    # A key or value that lies between two halves may be rounded either way.
    assert (found - expected).abs().max() < max(2e-3, 0.5 * (unrounded - expected).abs().max())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_run_gives_the_same_bits(threads: int) -> None:
    def run() -> Tensor:
        engine = Engine(large(), backend="cpu", threads=threads)
        first = engine.prefill(IDS[:5])
        return torch.stack([first, *(engine.step(id) for id in IDS[5:])])

    first = run()
    assert all(torch.equal(run(), first) for _ in range(4))


def test_other_numbers_of_threads_differ_by_rounding_only() -> None:
    logits = [Engine(large(), dense=True, backend="cpu", threads=n).teacher_forced(IDS, 5) for n in (1, 2, 3, 7)]
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() < 0.05


def test_steps_are_what_teacher_forcing_does() -> None:
    engine = Engine(large(), backend="cpu", threads=2)
    expected = engine.teacher_forced(IDS, 5)
    activity = engine.activity()
    engine.reset()
    found = torch.stack([engine.prefill(IDS[:5]), *(engine.step(id) for id in IDS[5:])])
    # Several positions and one alone are added up in another order, which takes some inputs across their thresholds.
    assert (found[0] - expected[4]).abs().max() < 1e-2
    assert (found - expected[4:]).norm() < 0.2 * expected[4:].norm()
    assert engine.activity() == pytest.approx(activity, abs=0.01)


SAMPLINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, top_k=40),
    Sampling(0.8, top_p=0.9),
    Sampling(1.3, top_k=5, top_p=0.5),
    Sampling(50.0),
    Sampling(50.0, top_p=0.99),
    Sampling(1e-3, top_k=1),
    Sampling(1.0, top_k=10**6, top_p=1.0),
    Sampling(1e-300),
]


def choose_natively(engine: Engine, logits: Tensor, how: Sampling, draw: float) -> int:
    decoder: Any = engine._decoder
    top_p = 1.0 if how.top_p is None else how.top_p
    return int(decoder.native.choose(logits, (how.temperature, how.top_k or 0, top_p, draw))[0])


@each_value({"sampling": SAMPLINGS, "size": [1, 7, 300, 40000]})
def test_native_sampling_chooses_what_the_sampler_chooses(sampling: Sampling, size: int) -> None:
    engine = Engine(model("llama"), backend="cpu", threads=2)
    generator = torch.Generator().manual_seed(size)
    for kind in range(6):
        logits = torch.randn(size, generator=generator) * [3, 0.1, 10, 0, 3, 3][kind]
        if kind == 4:
            logits = logits.round()  # many are equal
        if kind == 5:
            logits[torch.rand(size, generator=generator) < 0.5] = float("-inf")
            logits[size // 2] = 1.0
        mine, theirs = Sampler(sampling), Sampler(sampling)
        for _ in range(20):
            draw = mine.draw() if sampling.temperature else 0.0
            assert choose_natively(engine, logits, sampling, draw) == theirs.choose(logits)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_ends_of_the_range_are_chosen_as_well(
    sampling: Sampling, draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model("llama"), backend="cpu", threads=2)
    monkeypatch.setattr(Sampler, "draw", lambda sampler: draw)
    logits = torch.tensor([0.5, 2.0, -1.0, 2.0, float("-inf"), 1.5])
    assert choose_natively(engine, logits, sampling, draw) == Sampler(sampling).choose(logits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    engine = Engine(model("llama"), backend="cpu")
    logits = torch.full((40,), float("-inf")) if bad == float("-inf") else torch.zeros(40)
    logits[37] = bad
    assert choose_natively(engine, logits, Sampling(), 0.0) == -1


def test_damaged_weights_are_an_error_of_the_artifact() -> None:
    packed = random_model("llama")
    packed.output_norm.fill_(float("nan"))
    with pytest.raises(ArtifactError, match="largest logit is nan"):
        Engine(packed, backend="cpu").decode_next(3, Sampler(Sampling()))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.9, seed=4)], ids=str)
def test_decode_next_is_step_and_sampler(sampling: Sampling) -> None:
    engine = Engine(model("qwen3, tied"), backend="cpu", threads=2)
    runs = []
    for native in (True, False):
        engine.reset()
        sampler, id, ids = Sampler(sampling), 5, []
        for _ in range(30):
            id = engine.decode_next(id, sampler) if native else sampler.choose(engine.step(id))
            ids.append(id)
        runs.append(ids)
    assert runs[0] == runs[1]


def test_the_phases_of_steps_are_timed_on_every_thread() -> None:
    engine = Engine(large(), backend="cpu", threads=2)
    decoder: Any = engine._decoder
    engine.step(IDS[0])
    decoder.native.time_phases(True)
    start = time.perf_counter()
    for id in IDS:
        engine.decode_next(id, Sampler(Sampling(temperature=0.0)))
    seconds = time.perf_counter() - start
    phases = {name: (work, waiting) for name, work, waiting in decoder.native.phase_times()}
    assert {*SITES, "lists", "attention", "gate", "output", "sampling"} == {*phases}
    assert all(len(of) == 2 and min(of) >= 0 for each in phases.values() for of in each)
    assert all(max(work) > 0 for name, (work, _) in phases.items() if name in SITES)
    for thread in range(2):
        assert 0 < sum(work[thread] + waiting[thread] for work, waiting in phases.values()) / 1e9 <= seconds
    decoder.native.time_phases(False)
    assert not decoder.native.phase_times()


def test_another_attention_is_another_cache() -> None:
    """Here one of windows that the model does not have."""
    packed = model("llama")
    windows = dataclasses.replace(packed.architecture, sliding_windows=(3,) * packed.architecture.layers)
    expected = Engine(dataclasses.replace(packed, architecture=windows), backend="cpu").teacher_forced(IDS, 6)

    def new_cache(shape: AttentionShape) -> NativeKvCache:
        layers = tuple(dataclasses.replace(layer, window=3) for layer in shape.layers)
        return NativeKvCache(dataclasses.replace(shape, layers=layers))

    decoder = NativeDecoder(packed, torch.device("cpu"), 64, None, new_cache)
    assert torch.equal(decoder.teacher_forced(torch.tensor(IDS), 6, True), expected)
    assert not torch.equal(Engine(packed, backend="cpu").teacher_forced(IDS, 6), expected)


def test_an_idle_engine_takes_no_time_of_the_processor() -> None:
    engine = Engine(model("llama"), backend="cpu", threads=3)
    engine.step(3)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_engines_of_several_python_threads_do_not_disturb_each_other() -> None:
    expected = Engine(model("llama"), backend="cpu", threads=2).teacher_forced(IDS, 6)
    found: list[Tensor] = []

    def run() -> None:
        engine = Engine(model("llama"), backend="cpu", threads=2)
        found.extend(engine.teacher_forced(IDS, 6) for _ in range(5))

    runners = [threading.Thread(target=run) for _ in range(3)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert len(found) == 15
    assert all(torch.equal(logits, expected) for logits in found)


@forks
def test_a_forked_process_goes_on() -> None:
    engine = Engine(model("llama"), backend="cpu", threads=2)
    engine.step(3)
    child = os.fork()
    if not child:
        status = 1
        try:
            engine.step(4)
            status = 0 if engine.position == 2 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.step(4)
    assert engine.position == 2


def test_the_native_decoder_is_the_default_on_the_cpu_and_says_what_runs() -> None:
    engine = Engine(model("llama"), threads=2)
    assert engine.backend == "cpu"
    assert engine.description == f"cpu, {machine.instruction_set()}, 2 threads"
    assert engine.notes == ()


def test_without_kernels_the_reference_runs_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise UserError("the CPU kernels were not built")

    monkeypatch.setattr(machine, "native", missing)
    engine = Engine(model("llama"))
    assert engine.backend == "reference"
    assert engine.notes == ("note: the reference backend runs: the CPU kernels were not built",)
    with pytest.raises(UserError, match="the CPU kernels were not built"):
        Engine(model("llama"), backend="cpu")
    monkeypatch.setattr("sparsepack.loading.read_packed", lambda path, verify: model("llama"))
    load("model.gguf")
    assert "note: the reference backend runs" in capsys.readouterr().err


def test_the_cpu_backend_runs_on_the_cpu_only() -> None:
    with pytest.raises(UserError, match=r"device meta: .*use device cpu or the reference backend"):
        Engine(model("llama"), device="meta", backend="cpu")


def test_no_interrupt_is_lost_on_the_way_to_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanobind asks a tensor for its memory in Python, and goes on whatever is raised there."""
    changes = {"hidden_size": 256, "intermediate_size": 300, "hidden_act": "relu"}
    engine, asked = Engine(by_neurons(random_model("llama", **changes)), backend="cpu"), list[int]()
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda *_, **__: asked.append(1))
    engine.prefill([1, 2, 3])
    engine.step(4)
    engine.teacher_forced([1, 2, 3, 4], 2)
    assert not asked
