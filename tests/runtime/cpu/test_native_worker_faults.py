"""The native worker where a device or a process beside it fails: an error on both sides, and the next step is right."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from native_build import forks, skip_without_kernels
from worker_sides import answer, ask, check, made

from sparsepack.runtime.hybrid.mailbox import Abort, Mailbox

skip_without_kernels()


def test_a_device_that_never_asks_is_an_error_on_both_sides() -> None:
    side = made(Mailbox(2, 64, 256, 1), limit=0.3)
    side.worker.begin(1)
    with pytest.raises(RuntimeError, match=r"has waited 0\.3 s for the device"):
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.WORKER_WAITED
    with pytest.raises(RuntimeError, match="load the model again"):
        side.worker.begin(2)


def test_a_device_that_stops_asking_is_an_error() -> None:
    side = made(Mailbox(3, 64, 256, 1), limit=0.3)
    ask(side.seen, 0, 1, torch.ones(1, 256), torch.ones(1, 64))  # before it begins: this thread may wait for a core
    side.worker.begin(1)
    with pytest.raises(RuntimeError, match="has waited"):
        side.worker.end(1)
    assert side.seen.answer_numbers[:2].tolist() == [1, 0]


def test_a_device_that_gave_up_is_an_error_before_the_worker_gives_up() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    side.seen.abort[0] = Abort.DEVICE_WAITED
    with pytest.raises(RuntimeError, match="has not answered in time"):  # else it would have waited in vain
        side.worker.end(1)


@pytest.mark.parametrize("bad", [-1, 64, 1 << 30])
def test_a_request_for_neurons_that_are_not_is_an_error(bad: int) -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    side.seen.count[0], side.seen.indices[0, 0] = 1, bad
    side.seen.request_numbers[0] = 1
    with pytest.raises(RuntimeError, match="neurons that there are not"):
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.BAD_REQUEST
    assert side.seen.answer_numbers[0] == 0


@pytest.mark.parametrize("bad", [-1, 65])
def test_a_count_that_is_none_is_an_error(bad: int) -> None:
    side = made(Mailbox(1, 64, 256, 1))
    side.worker.begin(1)
    side.seen.count[0] = bad
    side.seen.request_numbers[0] = 1
    with pytest.raises(RuntimeError, match="neurons that there are not"):
        side.worker.end(1)


def test_a_worker_that_was_stopped_in_a_step_is_an_error_before_it_gives_up() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    threading.Timer(0.1, side.worker.stop).start()
    with pytest.raises(RuntimeError, match="is gone"):  # else it would have waited in vain
        side.worker.end(1)
    assert side.seen.abort[0] == Abort.INTERRUPTED, "the device waits on"
    with pytest.raises(RuntimeError, match="is gone"):
        side.worker.begin(2)


def test_after_an_interrupted_step_the_next_one_is_right() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    ask(side.seen, 0, 1, torch.ones(1, 256), torch.ones(1, 64))
    side.worker.interrupt()
    with pytest.raises(RuntimeError, match="interrupted"):
        side.worker.end(1)
    check(side, 2, [64, 5], 1, seed=2)


def test_a_step_that_no_device_asked_for_is_given_up_when_the_next_begins() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    check(side, 2, [64, 5], 1, seed=2)


def test_ctrl_c_ends_both_sides() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    side.worker.begin(1)
    end, main, waits = side.worker.end, threading.main_thread().ident, threading.Event()

    def interrupt() -> None:
        waits.wait()
        while sys._current_frames()[main].f_code is not wait.__code__:
            time.sleep(0.01)
        time.sleep(0.2)  # let it find the worker waited for
        os.kill(os.getpid(), signal.SIGINT)

    def wait() -> None:
        waits.set()
        end(1)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert side.seen.abort[0] == Abort.INTERRUPTED
    check(side, 2, [64, 5], 1, seed=2)


def test_a_forgotten_worker_ends_its_threads_in_a_step_too() -> None:
    program = """
import numpy as np
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.hybrid.mailbox import Mailbox
from sparsepack.runtime.hybrid.measure_bandwidth import records

layout = Mailbox(2, 64, 256, 1)
neurons = [operations.load_neurons(records(64, 256))] * 2
worker = operations.cold_worker(neurons, np.zeros(layout.size, np.uint8), layout)
worker.begin(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@forks
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_has_workers_of_its_own() -> None:
    side = made(Mailbox(2, 64, 256, 1))
    check(side, 1, [64, 5], 1, seed=1)
    child = os.fork()
    if not child:
        try:
            side.worker.begin(2)
            for block in range(2):
                ask(side.seen, block, 2, torch.ones(1, 256), torch.ones(1, 64))
                answer(side.seen, block, 2, 1)
            side.worker.end(2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    check(side, 2, [64, 5], 1, seed=2)
