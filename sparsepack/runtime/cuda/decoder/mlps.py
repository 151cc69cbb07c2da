"""The MLPs that the cuda decoder runs, a class for each kind: their part of a step, and of prefill."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import DENSE, EXPERTS, MLP_RECORDS, NEURONS, PLAIN_NEURONS, MlpKind
from sparsepack.models.activations import xielu
from sparsepack.runtime.cuda.decoder.buffers import Launch, MlpPrompt, MlpStep, first_numbers
from sparsepack.runtime.cuda.decoder.expert_mlp import ExpertMlp
from sparsepack.runtime.cuda.decoder.sites import (
    CudaSite,
    Gate,
    load_expert_sites,
    load_gate,
    load_sites,
    rows_for_mid,
    split_activation,
)
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons, CudaNeurons, Division
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input
from sparsepack.runtime.decoder import load_vector

RELU2 = 4
"""relu2 has this number (`kernels/common/activations.cuh`) where neurons without gates are listed; products take their
rows for both gate and up (`model.ACTIVATIONS`)."""


class CudaMlp(Protocol):
    """A loaded MLP.

    matrices   -- zigzag matrices that products of a step read, or some of their shapes
    per_sequence  -- whether a step counts the units of each of its sequences; else those that are active in any
    """

    per_sequence: ClassVar[bool]

    @property
    def has_rooms(self) -> bool:
        """Whether prefill has room for so many positions of a part of it, where the host does not wait (`FilledUp`)."""

    @property
    def flag_in_data(self) -> bool:
        """Whether its first product can read what the kernel before leaves as soon as it is stored."""

    @property
    def matrices(self) -> Sequence[CudaZigzag]: ...

    @property
    def numbers(self) -> int:
        """How many numbers its first product leaves, for each sequence."""

    @property
    def logits(self) -> int:
        """How many logits its router has; 0: there is none."""

    def parts(self, sequences: int, kernels: Kernels) -> int | None:
        """In how many parts the last product leaves the squares of each y, and y as soon as known; None: y lies in
        plain memory, without squares."""

    def new_workspace(self, sequences: int, kernels: Kernels) -> Any:
        """What `step` needs beside the buffers; MLPs of a model share it."""

    def step(self, step: MlpStep, workspace: Any, kernels: Kernels) -> Iterator[Launch]:
        """The kernels of the MLP, from `step.of.between` to `step.of.y`, which is the residual and the MLP's output."""

    @property
    def decoded(self) -> int:
        """How many weights prefill decodes together at best, beside those of `matrices`."""

    def prefill(self, of: MlpPrompt, kernels: Kernels) -> Product:
        """What the MLP makes of a prompt; parts of it may have been added to the residual already."""


@dataclass(frozen=True)
class DenseMlp:
    """An MLP of the sites mlp_in and mlp_mid.

    norm, eps -- weight of the RMSNorm of what enters mlp_mid; None: it is not normed
    xielu     -- coefficients of its function, float32 [4]; None: it has the activation's
    """

    per_sequence: ClassVar[bool] = False
    has_rooms: ClassVar[bool] = False
    flag_in_data: ClassVar[bool] = True

    sites: Mapping[str, CudaSite]
    norm: Tensor | None = field(default=None, kw_only=True)
    eps: float = field(default=0.0, kw_only=True)
    xielu: Tensor | None = field(default=None, kw_only=True)

    @property
    def matrices(self) -> Sequence[CudaZigzag]:
        return [site.matrix for site in self.sites.values()]

    @property
    def numbers(self) -> int:
        return rows_for_mid(self.sites["mlp_in"].matrix)

    @property
    def logits(self) -> int:
        return 0

    def parts(self, sequences: int, kernels: Kernels) -> int:
        return kernels.blocks(self.sites["mlp_mid"].matrix)

    def new_workspace(self, sequences: int, kernels: Kernels) -> None:
        return None

    def step(self, step: MlpStep, workspace: None, kernels: Kernels) -> Iterator[Launch]:
        of, into = step.of, self.sites["mlp_in"]
        of_product, of_input = split_activation(into.matrix, step.activation)
        plain = self.numbers == self.sites["mlp_mid"].matrix.columns and of_input is not None
        inner = first_numbers(of.mid, self.numbers)  # of other blocks there may be twice as many, gate and up
        yield step.product("mlp_in", into, step.input, inner, activation=of_product)
        mid = Input(inner, eps=step.input.eps, flag_in_data=of.flag_in_data, gated=of_input, plain=plain)
        if of.second_inputs is not None:
            width = self.sites["mlp_mid"].matrix.columns
            memory = of.second_inputs[1]
            made, rows = first_numbers(memory, width), memory.numel() // memory.shape[-1]
            views = inner.view(rows, -1), made.view(rows, -1)
            launch = partial(kernels.activation_norm, *views, norm=self.norm, eps=self.eps)
            how = {"xielu": self.xielu} if self.xielu is not None else {"activation": of_input}
            yield partial(launch, **how, flag_in_data=of.flag_in_data)
            mid = Input(made, eps=self.eps, flag_in_data=of.flag_in_data)
        yield step.product("mlp_mid", self.sites["mlp_mid"], mid, of.y, residual=of.between, squares=of.squares_of_y)

    @property
    def decoded(self) -> int:
        return 0

    def prefill(self, of: MlpPrompt, kernels: Kernels) -> Product:
        into, mid = self.sites["mlp_in"], self.sites["mlp_mid"]
        stacked = kernels.multiply(into.matrix, of.x, of.scratch, into.dense.bias)
        width = mid.matrix.columns
        up = stacked.part(into.matrix.rows - width, width)  # without a gate, the gate too
        if self.xielu is not None:
            rows = up.sums * (up.factor * up.inverse)[:, None]
            rows = rows if up.bias is None else rows + up.bias
            return kernels.multiply(
                mid.matrix, kernels.to_scaled_fp16(xielu(rows, self.xielu)), of.scratch, mid.dense.bias
            )
        gated = kernels.gated(stacked.part(0, width), up, of.activation)
        if self.norm is not None:
            gated = kernels.to_scaled_fp16(gated.values.float() * gated.factor[:, None], None, self.norm, self.eps)
        return kernels.multiply(mid.matrix, gated, of.scratch, mid.dense.bias)


@dataclass(frozen=True)
class LastMlp(DenseMlp):
    """The MLP of the last block, behind which the next step has the next number, where the processor has part in steps.

    number -- int32 [2], of the step that ran last
    """

    number: Tensor

    def step(self, step: MlpStep, workspace: None, kernels: Kernels) -> Iterator[Launch]:
        yield from super().step(step, workspace, kernels)
        yield partial(kernels.count_step, self.number)


@dataclass(frozen=True)
class NeuronMlp:
    """An MLP by neurons. All of its records lie on the GPU, unless a class that derives from it says where they lie."""

    per_sequence: ClassVar[bool] = False
    has_rooms: ClassVar[bool] = False

    gate: Gate
    records: CudaNeurons

    @property
    def flag_in_data(self) -> bool:
        return self.gate.flag_in_data

    @property
    def division(self) -> Division | None:
        """How a step divides the neurons."""
        return None

    @property
    def memories(self) -> tuple[CudaNeurons, CudaNeurons | None]:
        """The records of listed neurons lie in the first memory of `add_neurons` and in its `host`."""
        return self.records, None

    def pieces(self, at_once: int) -> Iterator[CudaNeurons]:
        """All records on the GPU, in their order, at most so many at a time; a piece lasts until the next one."""
        for first in range(0, len(self.records.records), at_once):
            yield self.records.piece(first, at_once)

    def saw(self, gate: Product) -> None:
        """Prefill has these gates, before the activation."""

    @property
    def matrices(self) -> Sequence[CudaZigzag]:
        return self.gate.matrices

    @property
    def numbers(self) -> int:
        return self.gate.shape[0]

    @property
    def logits(self) -> int:
        return 0

    def parts(self, sequences: int, kernels: Kernels) -> None:
        return None

    def new_workspace(self, sequences: int, kernels: Kernels) -> ActiveNeurons:
        return kernels.new_active_neurons(*self.gate.shape, sequences, self.records.records.device)

    def step(self, step: MlpStep, workspace: ActiveNeurons, kernels: Kernels) -> Iterator[Launch]:
        of, sequences, norm = step.of, len(workspace.x), step.input.norm
        activation = step.activation if self.records.gated else RELU2
        yield from self.gate.step(step, kernels)
        residual, x = of.between.view(sequences, -1), step.input.x.view(sequences, -1)
        yield partial(
            kernels.list_neurons,
            *(of.mid.view(sequences, -1), activation, x, norm, step.input.eps, workspace),
            everyone=not step.sparse,
            active=step.active(MLP_RECORDS),
            flag_in_data=of.flag_in_data,
            division=self.division,
        )
        checks, active = self.gate.checked(step, workspace, kernels)
        yield from checks
        first, host = self.memories
        y = of.y.view(sequences, -1)
        yield partial(kernels.add_neurons, first, active, residual, y, host=host, division=self.division)

    @property
    def decoded(self) -> int:
        return (1 + self.records.gated) * self.records.hidden * len(self.records.records)

    def prefill(self, of: MlpPrompt, kernels: Kernels) -> Product:
        gate = self.gate.prefill(of.x, of.scratch, kernels)
        self.saw(gate)
        product: Product | None = None
        first = 0
        for piece in self.pieces(kernels.neurons_at_once(self.records.hidden, of.scratch)):
            if product is not None:
                kernels.add(of.residual, product)
            count = len(piece.records)
            product = kernels.multiply_neurons(piece, gate.part(first, count), of.x, of.activation, of.scratch)
            first += count
        assert product is not None  # a model has neurons
        return product


def load_mlp(mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place) -> CudaMlp:
    """Copy a block's MLP to a GPU: its gate, or gate and up, where the first place says, its down matrix where the
    second says, all of its records into the GPU's memory."""
    return _LOADERS[mlp.kind](mlp, device, kernels, place, of_down)


def _dense(mlp: stored.DenseMlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place) -> CudaMlp:
    sites: dict[str, CudaSite] = {}
    for (name, site), where in zip(mlp.sites.items(), (place, of_down), strict=True):
        sites |= load_sites({name: site}, device, kernels, where, mlp.gated)
    return DenseMlp(sites)


def _neurons(mlp: stored.NeuronMlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place) -> CudaMlp:
    records = kernels.load_neurons(mlp.records, device, gated=mlp.gated)
    return NeuronMlp(load_gate(mlp, device, kernels, place), records)


def _experts(mlp: stored.ExpertMlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place) -> CudaMlp:
    router = mlp.router if mlp.shared_gate is None else torch.cat([mlp.router, mlp.shared_gate])
    router = router.to(device, torch.float32).contiguous()
    bias = None if mlp.router_bias is None else load_vector(mlp.router_bias, device)
    return ExpertMlp(router, load_expert_sites(mlp, device, kernels), bias)


_LOADERS: Mapping[MlpKind, Callable[[Any, torch.device, Kernels, Place, Place], CudaMlp]] = {
    DENSE: _dense,
    NEURONS: _neurons,
    PLAIN_NEURONS: _neurons,
    EXPERTS: _experts,
}
