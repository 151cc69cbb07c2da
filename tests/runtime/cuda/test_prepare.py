"""What the first step would make is made before it: kernels, compiled many at a time, and the graph of the step."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_build import skip_without_kernels
from packed_models import by_neurons, random_model

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver import kernel as launching
from sparsepack.runtime.cuda.driver.kernel import nvrtc_version
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.cpu_gpu import CpuGpu
from sparsepack.runtime.hybrid.plan import make_plan
from sparsepack.runtime.options import EngineOptions

DEVICE = torch.device("cuda")
CONTEXT = 16
IDS = torch.randint(300, (9,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, tuple[str, ...]]]]:
    """What was compiled since, in that order; nothing had been."""
    launching._code.cache_clear()
    found: list[tuple[str, int, tuple[str, ...]]] = []
    cubin = launching.cubin

    def counted(*of: Any) -> bytes:
        found.append(of)
        return cubin(*of)

    monkeypatch.setattr(launching, "cubin", counted)
    yield found
    launching._code.cache_clear()


def launched(file: str, *defines: str) -> None:
    """A launch that no GPU would take: a kernel has more arguments than one."""
    launching.launch(launching.kernel(file, file, defines), (1,), 32, 0)


def has_nvrtc() -> bool:
    try:
        return bool(nvrtc_version())
    except UserError:
        return False


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC")
def test_what_a_function_launches_is_compiled_once_each_and_not_launched(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launching, "architecture", lambda device: 80)
    wanted = [("scale_outputs", 80, (f"SUMS={sums}", "OUTPUT=0")) for sums in (0, 1)]

    def run() -> None:
        for file, _, defines in [*wanted, *wanted]:
            launched(file, *defines)

    launching.compile_together(run)
    assert sorted(compiled) == wanted
    assert all(launching._code(of)[:4] == b"\x7fELF" for of in wanted)
    launching.compile_together(run)
    assert len(compiled) == len(wanted), "compiled again"
    assert len(list((tmp_path / "sparsepack" / "cuda").iterdir())) == len(wanted), "for the next process"


def test_an_error_of_the_function_ends_naming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "architecture", lambda device: 80)
    loaded: list[str] = []
    monkeypatch.setattr(launching, "_loaded", lambda file, *of: loaded.append(file))

    def run() -> None:
        launched("sampling")
        raise ValueError("no such product")

    with pytest.raises(ValueError, match="no such product"):
        launching.compile_together(run)
    assert not loaded
    launching.kernel("sampling", "pick_likeliest")
    assert loaded == ["sampling"]


def test_another_thread_launches_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "architecture", lambda device: 80)
    monkeypatch.setattr(launching, "cubin", lambda *of: b"")
    loaded: list[str] = []
    monkeypatch.setattr(launching, "_loaded", lambda file, *of: loaded.append(file))

    def run() -> None:
        other = threading.Thread(target=launching.kernel, args=("post_norm", "post_norm"))
        other.start()
        other.join()

    launching.compile_together(run)
    assert loaded == ["post_norm"]


def plain(kernels: Kernels) -> CudaDecoder:
    return CudaDecoder(random_model("llama"), DEVICE, CONTEXT, 1, "f32", kernels)


def several(kernels: Kernels) -> CudaDecoder:
    return CudaDecoder(random_model("llama"), DEVICE, CONTEXT, 2, "f32", kernels)


def neurons() -> PackedModel:
    return by_neurons(random_model("llama", hidden_size=256, intermediate_size=300, hidden_act="relu"))


def divided(kernels: Kernels) -> CudaDecoder:
    skip_without_kernels()
    options, packed = EngineOptions(device="cuda", cached=0.3, threads=2, policy="lru"), neurons()
    plan = make_plan(packed, CONTEXT, "f32", options)
    cpu_gpu = CpuGpu(packed, operations, DEVICE, options, plan, kernels=kernels)
    return CudaDecoder(packed, DEVICE, CONTEXT, 1, "f32", kernels, plan=plan, cpu_gpu=cpu_gpu)


def outputs(engine: CudaDecoder) -> torch.Tensor:
    ids = IDS[5:].tolist()
    return torch.cat([engine.step([id] * len(engine.cache.lengths), True).cpu() for id in ids])


@pytest.mark.parametrize("made", [plain, several, divided])
@pytest.mark.parametrize("prompt", [0, 5])
def test_a_prepared_step_is_the_same_step(
    made: Callable[[Kernels], CudaDecoder], prompt: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, unprepared = made(kernels), made(kernels)
    for each in (engine, unprepared):
        for sequence in range(len(each.cache.lengths) if prompt else 0):
            each.prefill(sequence, IDS[:prompt])
    engine.prepare(True)
    engine.prepare(True)
    assert engine.cache.lengths == unprepared.cache.lengths
    assert engine.stepped == 0
    with monkeypatch.context() as patch:
        patch.setattr(type(kernels), "capture_graph", staticmethod(lambda *_: pytest.fail("a graph in a step")))
        found = outputs(engine)
    assert torch.equal(found, outputs(unprepared))
    assert engine.active() == unprepared.active()
    assert engine.hit_counts == unprepared.hit_counts


@pytest.mark.parametrize("made", [plain, divided])
def test_a_full_context_needs_no_step(made: Callable[[Kernels], CudaDecoder], kernels: Kernels) -> None:
    engine = made(kernels)
    engine.prefill(0, IDS.repeat(2)[:CONTEXT])
    engine.prepare(True)
    assert not engine._steps


def test_slots_begin_anew_where_preparing_was_interrupted(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, undisturbed = divided(kernels), divided(kernels)
    with monkeypatch.context() as patch:

        def interrupted(*of: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(type(kernels), "capture_graph", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            engine.prepare(True)
    assert torch.equal(outputs(engine), outputs(undisturbed))
    assert engine.hit_counts == undisturbed.hit_counts


def test_torch_s_compiler_is_not_imported_to_begin_with() -> None:
    """It takes a second or more, at every start."""
    code = "import sys, sparsepack.runtime.cuda.backend; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("which", ["llama", "neurons"])
def test_what_a_step_launches_is_compiled_together(
    which: str, sparse: bool, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(neurons() if which == "neurons" else random_model(which), device="cuda", context=CONTEXT)
    engine.dense = not sparse
    engine.prefill(IDS[:5].tolist())
    launching._loaded.cache_clear()
    launching._code.cache_clear()
    capture_graph, later = KERNELS.capture_graph, list[int]()

    def counted(run: Callable[[], None], *of: Any) -> torch.cuda.CUDAGraph:
        before = len(compiled)
        graph = capture_graph(run, *of)
        later.append(len(compiled) - before)
        return graph

    monkeypatch.setattr(Kernels, "capture_graph", staticmethod(counted))
    engine.prepare()
    assert later == [0]
    assert compiled
