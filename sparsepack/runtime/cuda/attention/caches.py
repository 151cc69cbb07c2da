"""The choice of the cache of a decoder on the GPU."""

import torch

from sparsepack.runtime.cuda.attention.double_sparsity import break_even
from sparsepack.runtime.cuda.attention.double_sparsity_kv_cache import CudaDoubleSparsityKvCache
from sparsepack.runtime.cuda.attention.kv_cache import CudaDenseKvCache, CudaKvCache, torch_type
from sparsepack.runtime.cuda.attention.offloaded_kv_cache import OffloadedKvCache
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.kv_cache import AttentionShape


def new_cache(
    shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS, *, offload: bool = False
) -> CudaKvCache:
    """An empty cache: sparse where the shape has a policy, whose steps read everything while that is faster.

    offload -- of a shape with a policy: keys and values lie in the host's memory, and steps read a part of them
               wherever the policy says

    Raises `UserError` as the caches do.
    """
    if offload:
        return OffloadedKvCache(shape, type, device, kernels)
    if shape.policy is None:
        return CudaDenseKvCache(shape, type, device, kernels)
    return CudaDoubleSparsityKvCache(shape, type, device, kernels, break_even(shape, torch_type(type)))
