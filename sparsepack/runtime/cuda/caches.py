"""Which cache a decoder on the GPU gets."""

import torch

from sparsepack.runtime.cuda.double.kv_cache import DoubleKvCache
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.kv_cache import CudaKvCache, DenseKvCache
from sparsepack.runtime.kv_cache import AttentionShape


def new_cache(shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> CudaKvCache:
    """A sparse one where the shape has a policy, whose steps read everything while that is faster. Raises `UserError`
    as the caches do."""
    if shape.policy is None:
        return DenseKvCache(shape, type, device, kernels)
    return DoubleKvCache(shape, type, device, kernels, where_it_pays=True)
