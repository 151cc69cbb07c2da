"""Single steps of a decoder on the GPU, or on simulated kernels, as tests take them."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder


def steps(engine: CudaDecoder, ids: Tensor, sparse: bool = True) -> Tensor:
    """Logits of steps over ids, [S, V], on the CPU."""
    return torch.cat([engine.step([id], sparse) for id in ids.tolist()]).cpu()
