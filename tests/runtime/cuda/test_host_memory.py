"""Memory of the host that is pinned for a GPU: what the system refuses is one line, and nothing stays behind."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from mmap import mmap
from typing import Any

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.driver import memory


class Refusing:
    """A driver that pins nothing."""

    def __init__(self) -> None:
        self.unpinned = list[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 2

    def cudaHostUnregister(self, address: int) -> None:
        self.unpinned.append(address)


@pytest.mark.parametrize("purpose", ["records", "the mailbox"])
def test_pinning_that_is_refused_is_one_line_with_its_size(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, mapped = Refusing(), list[weakref.ref[mmap]]()

    def mapping(*given: Any) -> mmap:
        found = mmap(*given)
        mapped.append(weakref.ref(found))
        return found

    monkeypatch.setattr(memory.mmap, "mmap", mapping)
    monkeypatch.setattr(memory, "_runtime", lambda: driver)
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
        return memory.host_tensors(1, (size,), torch.uint8, device, purpose)
    return memory.shared_memory(size, device, purpose)


@pytest.mark.gpu
def test_what_loading_took_does_not_stay_beside_what_is_kept() -> None:
    device, large = torch.device("cuda"), 96 << 20
    small = large * 5 // 8  # what is left of the larger one is too small for the next

    def beside_kept(place: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Bytes that torch cannot give back, of tensors that came where something larger had been."""
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        kept = []
        for number in range(4):
            taken = torch.zeros(large, dtype=torch.uint8, device=device)
            del taken
            kept.append(place(torch.full((small,), number, dtype=torch.uint8, device=device)))
        assert all((each == number).all() for number, each in enumerate(kept))
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - before

    assert beside_kept(memory.on_card) > large // 4
    assert beside_kept(memory.apart_on_card()) < large // 4
