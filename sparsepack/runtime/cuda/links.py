"""How fast a GPU and the processor beside it compute neurons: measured once by `sparsepack tune`, then remembered."""

from collections.abc import Iterable
from typing import Any

import torch

from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cpu.dispatch import instruction_set
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.cpu.operations import worker_threads
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.hybrid.kept_links import kept_links, measure_and_keep
from sparsepack.runtime.hybrid.measure_card import measure_card


def measured_links(
    threads: int | None, hidden: int, device: torch.device, kernels: Kernels = KERNELS
) -> BandwidthProfile | None:
    """The links as measured on this machine with this GPU; None where `sparsepack tune` never saw records of this
    width, or so many threads beside the GPU (None: all that there are)."""
    return kept_links(depends_on(threads, hidden, device, kernels))


def measure(
    widths: Iterable[int], device: torch.device, threads: int | None, kernels: Kernels = KERNELS
) -> list[dict[str, Any]]:
    """Measure the links for records of each width, once, keep them, and return what was found, JSON-able.

    Raises `UserError` without kernels, or where other work hides a figure, and `OutputError` where it cannot be kept,
    before anything is measured.
    """
    device = kernels.usable(device)
    wanted = [depends_on(threads, hidden, device, kernels) for hidden in widths]
    return measure_and_keep(wanted, lambda of: measure_card(kernels, device, of["threads"], of["hidden"]))


def depends_on(threads: int | None, hidden: int, device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """What the links depend on; each has a file of its own. Threads are those of the worker."""
    most = worker_threads()
    return {
        "cpu_info": cpu_info(),
        "instruction_set": instruction_set(),
        "gpu_info": kernels.device_name(device),
        "threads": min(threads or most, most),
        "hidden": hidden,
    }
