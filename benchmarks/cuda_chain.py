"""Products with zigzag matrices on the GPU that feed each other, as in a decoder: none can begin before the last one's
result is there."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.flag_in_data import flag_in_data_buffers
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, gemv


class Buffers:
    """What products of a chain hand off. Each takes what the one before made, as far as it goes: the last rows where
    there are more than columns, since those are there last; where there are fewer, the other columns stay as they are.

    Of four buffers, product i reads number i % 4, writes the next one, and resets the one before, which product i + 2
    will write (`kernels/common/flag_in_data.cuh`).

    fill -- puts values into a part that no product writes, in place
    """

    def __init__(self, rows: int, columns: int, device: torch.device, fill: Callable[[Tensor], object]) -> None:
        self._rows, self._columns = rows, columns
        sizes = [max(rows, columns)] * 4
        self._words, self._buffers = flag_in_data_buffers(sizes, device)
        self._start, begin = flag_in_data_buffers(sizes, device)
        fill(begin[0])
        for buffer in begin[1:]:
            fill(buffer[rows:])

    def begin(self) -> None:
        """The first input, and nothing yet that products make."""
        self._words.copy_(self._start)

    def taken(self, number: int) -> Tensor:
        """What a product takes, float32 [columns]."""
        return self._buffers[number % 4][max(self._rows - self._columns, 0) :][: self._columns]

    def made(self, number: int) -> Tensor:
        """What it makes, float32 [rows], until the second after it runs."""
        return self._buffers[(number + 1) % 4][: self._rows]

    def reset(self, number: int) -> Tensor:
        """What it resets, int32 [rows]."""
        return self._buffers[(number - 1) % 4][: self._rows].view(torch.int32)


class Chain:
    """Products with matrices of one shape, in order.

    matrices -- take turns
    length   -- products
    active   -- share of the columns that they read, once thresholds are found; until then everything
    """

    def __init__(self, matrices: Sequence[CudaZigzag], length: int, generator: torch.Generator) -> None:
        self._matrices, self._length = matrices, length
        device = matrices[0].blocks.device
        self._buffers = Buffers(
            matrices[0].rows, matrices[0].columns, device, lambda part: part.normal_(generator=generator)
        )
        self._thresholds: list[Tensor] | None = None
        self.active = 1.0

    def run(self, number: int) -> None:
        """Put a product on the current stream, after those before it."""
        if number == 0:
            self._buffers.begin()
        threshold = self._thresholds[number] if self._thresholds else None
        gemv(
            self._matrices[number % len(self._matrices)],
            Input(self._buffers.taken(number), threshold=threshold, flag_in_data=True),
            Output(self.made(number), reset=self._buffers.reset(number)),
        )

    def made(self, number: int) -> Tensor:
        """What a product made, float32 [rows], until the second after it runs."""
        return self._buffers.made(number)

    def taken(self, number: int) -> Tensor:
        """What it multiplies, float32 [columns], inactive ones zero; to be asked for before the next one runs."""
        x = self._buffers.taken(number)
        return torch.where(x.abs() > self._thresholds[number], x, 0) if self._thresholds else x.clone()

    def skip(self, share: float) -> None:
        """Leave out a share of the columns from now on. Every product has a threshold of its own: the quantile of what
        it takes, everything before it already sparse."""
        self._thresholds = [torch.zeros(1, device=self.made(0).device) for _ in range(self._length)]
        self._buffers.begin()
        total = 0.0
        for number, threshold in enumerate(self._thresholds):
            magnitudes = self._buffers.taken(number).abs()
            threshold.copy_(magnitudes.kthvalue(round(share * magnitudes.numel())).values)
            total += float((magnitudes > threshold).float().mean())
            self.run(number)
        self.active = total / len(self._thresholds)
