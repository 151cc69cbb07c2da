"""What a process takes of a GPU's memory, measured, beside what was planned."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparsepack.errors import UserError
from sparsepack.placement.budget import DRIVER_BYTES, Plan, format_bytes

LIBRARY_BYTES = 1 << 26
"""cuBLAS takes at most so many bytes for itself of the memory that torch hands out."""


def check_room(plan: Plan, free: int, device: torch.device) -> None:
    """Raise `UserError` where a GPU has fewer bytes free than a plan takes there."""
    if plan.card_bytes > free:
        raise UserError(
            f"device {device}: {free / 1e9:.2f}GB of its memory are free, and {format_bytes(plan.card_bytes)} are to "
            "lie there; give a smaller --vram, or end the processes that have the rest"
        )


def check_use(plan: Plan, tensors: int, driver: int) -> None:
    """Raise `UserError` where more was taken than a plan's budget allows.

    tensors -- bytes that torch's tensors took; driver: by how many bytes the driver's free memory fell
    """
    budget = plan.budget
    if budget is not None and (tensors > budget + LIBRARY_BYTES or driver > budget + DRIVER_BYTES):
        raise UserError(
            f"--vram {format_bytes(budget)}: the model took {format_bytes(tensors)} of the GPU's memory, by the "
            f"driver's count {format_bytes(driver)}, of {format_bytes(plan.card_bytes)} planned and up to "
            f"{format_bytes(DRIVER_BYTES)} beside; give a larger --vram, and report this"
        )


@contextmanager
def within_budget(plan: Plan, device: torch.device) -> Iterator[None]:
    """Measure what is taken meanwhile and stays. Raises `UserError` as `check_room` before, and as `check_use` after.
    What torch keeps for later is given back, before and after."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
    check_room(plan, free, device)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated(device) - before
    check_use(plan, taken, free - torch.cuda.mem_get_info(device)[0])
