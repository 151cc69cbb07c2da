"""Q4_K's encoder as one kernel, on the devices where it can run."""

from torch import Tensor

from sparsepack.by_triton import by_triton

WITHOUT = "Q4_K is encoded by plain torch, many times slower"


def encode(weight: Tensor) -> Tensor | None:
    """Zigzag superblocks of a finite matrix [rows, columns]: uint8 [bands * columns, 144], by `q4_k_triton`; None where
    `by_triton` cannot run it."""

    def by_kernel() -> Tensor:
        from sparsepack.formats.codecs import q4_k_triton

        return q4_k_triton.encode(weight)

    return by_triton(weight, by_kernel, WITHOUT)
