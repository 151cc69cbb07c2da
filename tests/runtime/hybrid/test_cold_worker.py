"""The second worker: work is done in order, and a worker that is gone ends in an error, not in a wait."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparsepack.runtime.hybrid.handover import Worker


def raises(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_results_come_in_the_order_of_their_numbers() -> None:
    worker = Worker()
    for expected in range(1, 200):
        number = worker.post(lambda value=expected: value * value)
        assert (number, worker.take(number)) == (expected, expected * expected)


def test_what_nobody_took_is_left_behind() -> None:
    worker = Worker()
    worker.post(lambda: "of a call that was interrupted")
    assert worker.take(worker.post(lambda: "next")) == "next"


@pytest.mark.parametrize("error", [ValueError("no memory"), SystemExit(3), MemoryError()], ids=repr)
def test_work_that_fails_is_an_error_now_and_from_then_on(error: BaseException) -> None:
    worker = Worker()
    number = worker.post(raises(error))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the worker of the offloaded neurons failed"):
            worker.take(number)
    with pytest.raises(RuntimeError, match="failed"):
        worker.post(lambda: 1)


def test_a_worker_that_does_not_answer_is_given_up() -> None:
    worker, go_on = Worker(longest=0.2), threading.Event()
    number = worker.post(go_on.wait)
    with pytest.raises(RuntimeError, match=r"has not answered for 0\.2 s"):
        worker.take(number)
    with pytest.raises(RuntimeError, match="is gone; load the model again"):
        worker.post(lambda: 1)
    go_on.set()


def test_a_thread_that_is_gone_is_an_error() -> None:
    worker = Worker()
    worker.close()
    with pytest.raises(RuntimeError, match="is gone"):
        worker.post(lambda: 1)


def test_a_forgotten_worker_ends_its_thread() -> None:
    worker = Worker()
    thread = worker.take(worker.post(threading.current_thread))
    assert thread.name == "offloaded neurons"
    assert thread.is_alive()
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_python_ends_well_while_a_kernel_runs() -> None:
    """As after Ctrl-C: the worker may not come back from a kernel to a Python that is gone."""
    program = """
import time, torch
from sparsepack.runtime.cpu.operations import neuron_ffn_beside, new_neurons
from sparsepack.runtime.hybrid.handover import Worker

neurons, ffn, end = new_neurons(2000, 1024), neuron_ffn_beside(1), time.monotonic() + 1
x, gate, indices = torch.ones(1024), torch.ones(2000), torch.arange(2000, dtype=torch.int32)

def work():
    while time.monotonic() < end:
        ffn(neurons, x, gate, indices, torch.tensor(2000))

worker = Worker()
worker.post(work)
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
