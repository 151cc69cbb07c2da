"""Streams that nobody else has: what others do on torch's 32 streams spoils no recording."""

import threading

import pytest
import torch

pytestmark = pytest.mark.gpu
POOL = 32


def test_no_two_are_one_while_both_are_there():
    from sparsepack.runtime.cuda.driver.device import own_stream

    own = [own_stream() for _ in range(2 * POOL)] + [own_stream(priority=-1) for _ in range(POOL)]
    others = [torch.cuda.Stream() for _ in range(2 * POOL)]
    handles = {stream.cuda_stream for stream in own}
    assert len(handles) == len(own)
    assert not handles & {stream.cuda_stream for stream in others}


def test_one_that_is_let_go_of_is_given_to_the_next_of_its_priority():
    from sparsepack.runtime.cuda.driver.device import own_stream

    first = own_stream(priority=-1)
    handle = first.cuda_stream
    del first
    assert own_stream().cuda_stream != handle
    assert handle in {stream.cuda_stream for stream in [own_stream(priority=-1) for _ in range(2 * POOL)]}


def test_a_recording_survives_what_other_threads_do_on_torchs_streams():
    from sparsepack.runtime.cuda.driver.device import Recorder

    x, others = torch.ones(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda")
    recorder, recording, seen = Recorder(x.device), threading.Event(), threading.Event()
    failed = []

    def beside() -> None:
        recording.wait(10)
        try:
            for _ in range(2 * POOL):
                with torch.cuda.stream(stream := torch.cuda.Stream()):
                    others.add_(1)
                stream.synchronize()
        except RuntimeError as error:
            failed.append(error)
        finally:
            seen.set()

    def run() -> torch.Tensor:
        doubled = x * 2
        recording.set()
        seen.wait(10)
        return doubled + 1

    run_once = x * 2 + 1  # its kernels are loaded
    thread = threading.Thread(target=beside)
    thread.start()
    repeat, made = recorder(run)
    thread.join()
    repeat()
    torch.cuda.synchronize()
    assert not failed
    assert torch.equal(made, run_once)
