"""What stands for torch's MPS device in tests: tensors on the CPU, and the backend's own kernels on this processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import metal_emulation
import pytest
import torch

from sparsepack.runtime.metal import library


@dataclass
class Stream:
    """What a decoder did with the device: `submitted` after so many kernels, `waited` so often."""

    order: metal_emulation.Order
    submitted: list[int] = field(default_factory=list)
    waited: int = 0

    def event(self) -> "Stream":
        """Stands for torch.mps.Event."""
        return self

    def record(self) -> None:
        self.submitted.append(len(self.order.launched))

    def synchronize(self) -> None:
        self.waited += 1


@contextmanager
def stand_in(seed: int = 0) -> Iterator[Stream]:
    """Inside, the metal backend runs here, on device "mps" by name.

    seed -- of the order of threads and threadgroups; 0: that of their numbers
    """
    with metal_emulation.order(seed) as order, pytest.MonkeyPatch.context() as patch:
        stream = Stream(order)
        patch.setattr(torch.mps, "compile_shader", metal_emulation.compile_shader)
        patch.setattr(torch.mps, "Event", stream.event)
        patch.setattr(torch.mps, "synchronize", stream.synchronize)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(library, "PLACE", "cpu")
        library.library.cache_clear()
        yield stream
        library.library.cache_clear()
