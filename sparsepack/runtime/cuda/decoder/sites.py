"""A site of a packed model on the GPU: its matrix, and the columns that products read; and the gates of neurons."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import MLP_GATE
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import ExpertMlp, PackedSite
from sparsepack.models.sites import SiteRule
from sparsepack.runtime.cuda.decoder.buffers import Launch, MlpStep
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.cuda.products.experts import CudaExperts
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons
from sparsepack.runtime.cuda.products.offloaded import OffloadedProduct
from sparsepack.runtime.cuda.products.rows import RowsFp16
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.decoder import Columns, load_vector


@dataclass(frozen=True)
class CudaSite:
    """A site on the GPU: the matrix, and the columns that products read in dense and in sparse steps, which are the
    same without a rule. Prefill is dense.

    offloaded -- how a step shares its products with the processor; None: it does not
    """

    matrix: CudaZigzag
    dense: Columns
    sparse: Columns
    offloaded: OffloadedProduct | None = None


@dataclass(frozen=True)
class CudaExpertsSite:
    """A site of all experts of an MLP, likewise."""

    matrix: CudaExperts
    dense: Columns
    sparse: Columns


def load_sites(
    sites: Mapping[str, PackedSite], device: torch.device, kernels: Kernels, place: Place, gated: bool = True
) -> dict[str, CudaSite]:
    """Copy sites to a GPU, their matrices where they shall lie. Rows of gate and up are interleaved where they fill
    whole bands: a product can then finish both. gated: mlp_in has both."""
    return {name: _site(site, device, name == "mlp_in" and gated, kernels, place) for name, site in sites.items()}


MOST_GROUPS = 32
"""A lane has the score of a group (`kernels/products/choose.cuh`)."""


def load_expert_sites(mlp: ExpertMlp, device: torch.device, kernels: Kernels) -> dict[str, CudaExpertsSite]:
    """Copy the sites of an MLP's experts to a GPU, rows of gate and up as `load_sites` does.

    Raises `UserError` for more groups of experts than the kernels know.
    """
    routing, found = mlp.routing, {}
    if routing is not None and routing.groups > MOST_GROUPS:
        raise UserError(
            f"{routing.groups} groups of experts: the cuda backend runs up to {MOST_GROUPS}; use the reference backend"
        )
    correction = None if mlp.correction is None else load_vector(mlp.correction, device)
    ones = torch.ones(mlp.shared)
    scale = None if mlp.scale is None else load_vector(torch.cat([mlp.scale.cpu(), ones]), device)
    for name, site in mlp.sites.items():
        matrix = kernels.load_experts(
            site.matrix,
            mlp.used,
            mlp.normalised,
            device,
            gate=name == "mlp_in" and mlp.gated and _interleaves(site.matrix.rows),
            added=name == "mlp_mid",
            shared=mlp.shared,
        )
        together = replace(matrix.together, routing=routing, shared_gate=mlp.shared_gate is not None)
        matrix = replace(matrix, together=together, correction=correction, scale=scale)
        limits = None if site.rule is None else _thresholds(site.rule, device)
        bias = None if site.bias is None else site.bias.to(device, torch.float32).contiguous()
        found[name] = CudaExpertsSite(matrix, Columns(bias=bias), Columns(limits, bias=bias))
    return found


def _interleaves(rows: int) -> bool:
    return rows % (2 * BAND_ROWS) == 0


def _site(site: PackedSite, device: torch.device, gate: bool, kernels: Kernels, place: Place) -> CudaSite:
    load = partial(kernels.load_zigzag, site.matrix, device, place=place)
    return load_site(site, device, kernels, load, gate and _interleaves(site.matrix.rows))


def load_site(
    site: PackedSite, device: torch.device, kernels: Kernels, load: Callable[..., CudaZigzag], gate: bool = False
) -> CudaSite:
    """A site on the GPU.

    load -- brings its matrix there, with `gate` in rows of gate and up interleaved; gate -- whether they shall be
    """
    bias = None if site.bias is None else load_vector(site.bias, device)
    dense = Columns(bias=bias)
    if site.rule is None:
        return CudaSite(load(gate=gate), dense, dense)
    threshold = _thresholds(site.rule, device)
    if site.rule.offset is None:
        return CudaSite(load(gate=gate), dense, Columns(threshold, bias=bias))
    offset = load_vector(site.rule.offset, device)
    matrix = load()
    with_offset = torch.empty(site.matrix.rows, device=device)
    kernels.synchronize(device)
    kernels.gemv(matrix, Input(offset), Output(with_offset, bias=bias))
    if gate:  # rows of such a matrix come in pairs from the product that was just made
        matrix = load(gate=True)
    return CudaSite(matrix, dense, Columns(threshold, offset, with_offset))


def _thresholds(rule: SiteRule, device: torch.device) -> Tensor:
    if rule.of_levels:
        return rule.limits.to(device, torch.float32).contiguous()
    return load_vector(rule.limits, device)


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


def rows_for_mid(matrix: CudaZigzag) -> int:
    """How many numbers the product with gate and up leaves."""
    return matrix.rows // (2 if matrix.gate_bands else 1)


def split_activation(matrix: CudaZigzag, activation: int) -> tuple[int | None, int | None]:
    """The function of the gate where the product with gate and up finishes both, and where it leaves both to what reads
    them."""
    return (activation, None) if matrix.gate_bands else (None, activation)
