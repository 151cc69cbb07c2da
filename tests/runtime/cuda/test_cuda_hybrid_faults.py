"""The decoder on a GPU with the processor beside it, where either side fails or a step is interrupted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import largest_difference
from decoder_steps import steps
from hybrid_decoders import IDS, ROUNDED, decoder, model
from native_build import skip_without_kernels
from pairwise import each_value

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.engine import Engine

skip_without_kernels()


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_worker_that_is_gone_is_an_error(kernels: Kernels, when: str) -> None:
    engine = decoder(model(), kernels, 0.3)
    engine.step([3], True)
    if when == "before":
        engine.cpu_gpu.worker.stop()
    else:
        run: Callable[..., object] = engine.cpu_gpu.worker.begin

        def begin(number: int, texts: int) -> None:
            run(number, texts)
            engine.cpu_gpu.worker.stop()

        class Stopping:
            def __getattr__(self, name: str) -> Any:
                return begin if name == "begin" else getattr(worker, name)

        worker = engine.cpu_gpu.worker
        engine.cpu_gpu.worker = Stopping()
    with pytest.raises(UserError, match=r"^the processor beside the GPU: .* is gone; load the model again$"):
        engine.step([3], True)


class Reached:
    """A native object, some of whose methods are others."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


INTERRUPTED: dict[str, tuple[Callable[[CudaDecoder], Any], str]] = {
    "before the worker is called": (lambda engine: engine.cpu_gpu.worker, "begin"),
    "before the step is launched": (lambda engine: engine._ids, "write"),
    "while the worker computes": (lambda engine: engine.cpu_gpu.worker, "end"),
    "before the policy is told": (lambda engine: engine.cpu_gpu.slots, "step_bits"),
    "before neurons move": (lambda engine: engine.cpu_gpu.slots, "move"),
    "while the table changes": (lambda engine: engine.cpu_gpu.slots.residency, "agree"),
}


@each_value({"when": list(INTERRUPTED), "before": [4, 0]})
def test_an_interrupted_step_leaves_a_decoder_that_goes_on(
    kernels: Kernels, when: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends both sides; a conversation goes on with the text as it was."""
    packed = model()
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 0)
    engine, undisturbed = (decoder(packed, kernels, 0.3, policy="lru") for _ in range(2))
    engine.cpu_gpu.worker = Reached(engine.cpu_gpu.worker)
    for id in IDS[:before].tolist():
        engine.step([id], True)
    owner, name = INTERRUPTED[when]

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner(engine), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step([int(IDS[before])], True)
    assert largest_difference(steps(engine, IDS[before:]), expected[before:]) < ROUNDED
    assert engine.hit_counts is not None
    assert engine.hit_counts.tokens == 13 - before, "counted anew"
    engine.reset()
    assert torch.equal(steps(engine, IDS), steps(undisturbed, IDS))
    assert engine.hit_counts == undisturbed.hit_counts


def test_memory_that_a_step_lacks_is_no_error_of_the_worker(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model()
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 0)
    engine = decoder(packed, kernels, 0.3)

    def without_memory(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_make_graph", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step([int(IDS[0])], True)
    assert largest_difference(steps(engine, IDS), expected) < ROUNDED


def test_a_fault_of_the_gpu_is_raised_before_the_worker_is_waited_for(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker waits for a request, which does not come after a fault, for much longer."""
    engine = decoder(model(), kernels, 0.3)
    engine.step([3], True)
    engine.cpu_gpu.worker = Reached(engine.cpu_gpu.worker)

    def fault() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_launch", lambda graph, ids: None)
        patch.setattr(type(engine._kernels), "wait_for_step", staticmethod(fault))
        patch.setattr(
            engine.cpu_gpu.worker, "end", lambda number: pytest.fail("the worker was waited for"), raising=False
        )
        with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
            engine.step([3], True)
