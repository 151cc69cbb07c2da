"""Single steps of a decoder on the GPU, or on simulated kernels, as tests take them."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.hybrid.cuda_decoder import CudaHybridDecoder


def steps(engine: CudaDecoder | CudaHybridDecoder, ids: Tensor, sparse: bool = True) -> Tensor:
    """Logits of steps over ids, [S, V], on the CPU."""
    return torch.cat([engine.step([id], sparse) for id in ids.tolist()]).cpu()
