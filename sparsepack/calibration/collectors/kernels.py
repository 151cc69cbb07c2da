"""Whether our kernels do on a device what calibrating does, beside torch's."""

from functools import cache

import torch

from sparsepack.errors import UserError
from sparsepack.models.architecture import by_length, rotary_settings
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.hooks import Record
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


def recorder_on(stream: BlockStream) -> Record | None:
    """What records runs of blocks of a stream, or None. Experts are chosen by a run that waits for the GPU,
    and so are the frequencies of rotary embeddings that depend on a text's length."""
    source = stream.source
    if not kernels_on(stream.device) or source.family.experts is not None:
        return None
    if source.family.rotary != "none" and any(by_length(of) for of in rotary_settings(source.config)):
        return None
    from sparsepack.runtime.cuda.driver.graph import Recorder

    return Recorder(stream.device)
