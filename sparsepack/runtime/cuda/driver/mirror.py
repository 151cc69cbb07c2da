"""Numbers on the GPU that kernels read and change, written by the host only where they are not there already."""

from collections.abc import Sequence

from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel_set import Kernels


class Mirror:
    """Numbers on the GPU, and what the host knows of them.

    there -- int32 [n]
    known -- what lies there when all that is on the stream has run; None: the host does not know. Who lets kernels
             change the numbers says so here
    """

    def __init__(self, there: Tensor, kernels: Kernels) -> None:
        self.there = there
        self.known: list[int] | None = None
        self._kernels = kernels

    def write(self, values: Sequence[int]) -> None:
        """Put values on the current stream, unless they are there. The host waits for nothing."""
        if self.known == values:
            return
        if len(values) == 1:
            self.there.fill_(values[0])
        else:
            self.there.copy_(self._kernels.host_values(values), non_blocking=True)
        self.known = list(values)
