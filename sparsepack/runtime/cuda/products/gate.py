"""The gate of an MLP as a kernel of its own (`kernels/products/gate.cu`)."""

from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch


def gate(stacked: Tensor, activation: int, out: Tensor) -> None:
    """Put out = activation(gate) * up on the current stream.

    stacked    -- float32 [2 * width] or [B, 2 * width], gate before up
    activation -- number of the function, see `kernels/common/activations.cuh`
    out        -- float32 [width] or [B, width]
    """
    width = out.shape[-1]
    launch(
        kernel("gate", "gate", (), stacked.device.index or 0),
        (-(-width // 256), out.numel() // width),
        256,
        *(stacked, width, activation, out),
    )
