"""Gradients that have the same bits each time they are taken, on a GPU, too."""

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel


def repeatable(device: str) -> AbstractContextManager[None]:
    """Within the context attention's backward pass adds in an order of its own on a GPU.

    The other kernels that PyTorch has there add in the order in which groups of threads happen to end, so that a
    training is another one each time it is run. This one keeps all scores of a block; it takes no longer on windows of
    usual length, of which only the second half has gradients.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.startswith("cuda") else nullcontext()
