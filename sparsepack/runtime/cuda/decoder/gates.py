"""The gates of MLPs by neurons, a class for each order in which they are stored."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import MLP_GATE
from sparsepack.runtime.cuda.decoder.buffers import Launch, MlpStep
from sparsepack.runtime.cuda.decoder.sites import CudaSite
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons
from sparsepack.runtime.cuda.products.rows import RowsFp16
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.site_columns import Columns


class Gate(Protocol):
    """The gate of an MLP by neurons, in one of the orders in which it is stored.

    flag_in_data, matrices -- as `CudaMlp` has them
    """

    @property
    def flag_in_data(self) -> bool: ...

    @property
    def matrices(self) -> Sequence[CudaZigzag]: ...

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and channels."""

    def step(self, step: MlpStep, kernels: Kernels) -> Iterable[Launch]:
        """The kernels of its product, from `step.input` to `step.of.mid`: who has a zero there is not listed."""

    def checked(self, step: MlpStep, listed: ActiveNeurons, kernels: Kernels) -> tuple[Sequence[Launch], ActiveNeurons]:
        """The kernels that find who of a list is active, and where these then are listed."""

    def prefill(self, x: ScaledFp16, scratch: Tensor, kernels: Kernels) -> Product:
        """Its product with every row of x [S, hidden]."""


@dataclass(frozen=True)
class ZigzagGate:
    """A gate in zigzag order."""

    flag_in_data: ClassVar[bool] = True

    site: CudaSite

    @property
    def matrices(self) -> Sequence[CudaZigzag]:
        return [self.site.matrix]

    @property
    def shape(self) -> tuple[int, int]:
        return self.site.matrix.rows, self.site.matrix.columns

    def step(self, step: MlpStep, kernels: Kernels) -> Iterator[Launch]:
        yield step.product(MLP_GATE, self.site, step.input, step.of.mid)

    def checked(self, step: MlpStep, listed: ActiveNeurons, kernels: Kernels) -> tuple[Sequence[Launch], ActiveNeurons]:
        return (), listed

    def prefill(self, x: ScaledFp16, scratch: Tensor, kernels: Kernels) -> Product:
        return kernels.multiply(self.site.matrix, x, scratch)


@dataclass(frozen=True)
class RowsGate:
    """A gate by rows."""

    flag_in_data: ClassVar[bool] = False
    matrices: ClassVar[Sequence[CudaZigzag]] = ()

    rows: RowsFp16

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.matrix.rows, self.rows.matrix.columns

    def step(self, step: MlpStep, kernels: Kernels) -> Iterator[Launch]:
        of, (neurons, hidden) = step.input, self.shape
        x, y = of.x.view(-1, hidden), step.of.mid.view(-1, neurons)
        yield partial(step.active(MLP_GATE).add_, hidden)
        yield partial(kernels.product, self.rows.matrix, x, y, norm=of.norm, eps=of.eps)

    def checked(self, step: MlpStep, listed: ActiveNeurons, kernels: Kernels) -> tuple[Sequence[Launch], ActiveNeurons]:
        return (), listed

    def prefill(self, x: ScaledFp16, scratch: Tensor, kernels: Kernels) -> Product:
        return kernels.multiply_rows(self.rows, x, scratch)


def load_gate(mlp: stored.NeuronMlp, device: torch.device, kernels: Kernels, place: Place) -> Gate:
    """Copy the gate of an MLP by neurons to a GPU, where it shall lie."""
    if mlp.gate.format.order != "zigzag":
        return RowsGate(kernels.load_rows_fp16(mlp.gate, device, place=place))
    return ZigzagGate(CudaSite(kernels.load_zigzag(mlp.gate, device, place=place), Columns(), Columns()))
