"""Whether our kernels do on a device what calibrating does, beside torch's."""

from functools import cache

import torch

from sparsepack.errors import UserError
from sparsepack.models.stock.parts import Parts
from sparsepack.progress import say


@cache
def kernels_on(device: torch.device) -> bool:
    """Whether our kernels count on a device. Where they cannot on a GPU, why is said, once."""
    if device.type != "cuda":
        return False
    from sparsepack.runtime.cuda.driver.device import usable

    try:
        usable(device)
    except UserError as error:
        say(f"note: {device}: statistics are counted by PyTorch alone, which takes longer ({error})")
        return False
    return True


def parts_on(device: torch.device) -> Parts | None:
    """The parts of stock blocks that our kernels do at once on a device, as far as they gave there what stock code
    gives; None: all is left to stock code."""
    if not kernels_on(device):
        return None
    from sparsepack.runtime.cuda.stock_parts import judged_parts

    return judged_parts(device)
