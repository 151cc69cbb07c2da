"""Memory of the host that is pinned for a GPU: what the system refuses is one line, and nothing stays behind."""

import gc
import weakref
from contextlib import nullcontext
from mmap import mmap
from typing import Any

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver import host_memory


class Refusing:
    """A driver that pins nothing."""

    def __init__(self) -> None:
        self.unpinned = list[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 2

    def cudaHostUnregister(self, address: int) -> None:
        self.unpinned.append(address)


@pytest.mark.parametrize("purpose", ["records", "the hand-over"])
def test_pinning_that_is_refused_is_one_line_with_its_size(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, mapped = Refusing(), list[weakref.ref[mmap]]()

    def mapping(*given: Any) -> mmap:
        found = mmap(*given)
        mapped.append(weakref.ref(found))
        return found

    monkeypatch.setattr(host_memory.mmap, "mmap", mapping)
    monkeypatch.setattr(host_memory, "_runtime", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CudaError", lambda code: f"error {code}")
    with pytest.raises(UserError) as caught:
        asked(purpose)
    said = f"12.4MB of the host's memory for {purpose}, pinned: not to be had (error 2); free memory, allow more of it "
    assert str(caught.value) == said + "to be locked (ulimit -l), or take a smaller model"
    del caught
    gc.collect()
    assert [each() for each in mapped] == [None]
    assert driver.unpinned == []


def asked(purpose: str) -> Any:
    size, device = 12_345_678, torch.device("cuda")
    if purpose == "records":
        return host_memory.host_tensors(1, (size,), torch.uint8, device, purpose)
    return host_memory.shared_memory(size, device, purpose)
