"""The rule of all kernels for shared memory: a block that does not fit has fewer stages of its pipeline.

What a kernel needs is computed beside its layout: `attention.Variant`, `rows.product`, `tile_config.shared_bytes`,
`zigzag.batch`.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch

from sparsepack.runtime.cuda.driver.kernel import checked


@cache
def shared_limit(device: torch.device) -> int:
    """The bytes of shared memory that a block may have, those included that its kernel declares itself."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(checked(driver.cuDeviceGetAttribute(attribute, device.index or 0), "shared memory of a block"))


def deepest_pipeline(stages: Sequence[int], needed: Callable[[int], int], device: torch.device) -> int:
    """The first of these numbers of stages with which a block's bytes fit; the last one where none does.

    needed -- bytes that a block needs with a number of stages, those that its kernel declares included
    """
    limit = shared_limit(device)
    return next((n for n in stages if needed(n) <= limit), stages[-1])
