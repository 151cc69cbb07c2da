"""The MLPs that the cuda decoder runs, a class for each kind: their part of a step, and of prefill."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sparsepack.formats import packed as stored
from sparsepack.formats.kinds import DENSE, EXPERTS, MLP_RECORDS, NEURONS, PLAIN_NEURONS, MlpKind
from sparsepack.runtime.cuda.decoder.buffers import FilledUp, Launch, MlpPrompt, MlpStep, first_numbers
from sparsepack.runtime.cuda.decoder.sites import (
    CudaExpertsSite,
    CudaSite,
    Gate,
    load_expert_sites,
    load_gate,
    load_sites,
)
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import Place
from sparsepack.runtime.cuda.products.experts import decoded_weights
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.neurons import ActiveNeurons, CudaNeurons, Division
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Together
from sparsepack.runtime.decoder import load_vector
from sparsepack.runtime.reference.products import rms_norm, route, with_shared

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
    """An MLP of the sites mlp_in and mlp_mid."""

    per_sequence: ClassVar[bool] = False
    has_rooms: ClassVar[bool] = False
    flag_in_data: ClassVar[bool] = True

    sites: Mapping[str, CudaSite]

    @property
    def matrices(self) -> Sequence[CudaZigzag]:
        return [site.matrix for site in self.sites.values()]

    @property
    def numbers(self) -> int:
        return _rows(self.sites["mlp_in"].matrix)

    @property
    def logits(self) -> int:
        return 0

    def parts(self, sequences: int, kernels: Kernels) -> int:
        return kernels.blocks(self.sites["mlp_mid"].matrix)

    def new_workspace(self, sequences: int, kernels: Kernels) -> None:
        return None

    def step(self, step: MlpStep, workspace: None, kernels: Kernels) -> Iterator[Launch]:
        of, into = step.of, self.sites["mlp_in"]
        of_product, of_input = _activations(into.matrix, step.activation)
        plain = self.numbers == self.sites["mlp_mid"].matrix.columns and of_input is not None
        inner = first_numbers(of.mid, self.numbers)  # of other blocks there may be twice as many, gate and up
        yield step.product("mlp_in", into, step.input, inner, activation=of_product)
        mid = Input(inner, eps=step.input.eps, flag_in_data=of.flag_in_data, gated=of_input, plain=plain)
        yield step.product("mlp_mid", self.sites["mlp_mid"], mid, of.y, residual=of.between, squares=of.squares_of_y)

    @property
    def decoded(self) -> int:
        return 0

    def prefill(self, of: MlpPrompt, kernels: Kernels) -> Product:
        into, mid = self.sites["mlp_in"], self.sites["mlp_mid"]
        stacked = kernels.multiply(into.matrix, of.x, of.scratch, into.dense.bias)
        width = mid.matrix.columns
        up = stacked.part(into.matrix.rows - width, width)  # without a gate, the gate too
        gated = kernels.gated(stacked.part(0, width), up, of.activation)
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


@dataclass(frozen=True)
class ExpertMlp:
    """A mixture of experts, all of them in the GPU's memory.

    router -- float32 [logits, hidden]: a row for each expert, then that of the experts that every token has, if these
              have a gate
    bias   -- float32 [logits], of the router; None: there is none
    norms  -- weights of the RMSNorms of what the chosen experts make, and of what the shared ones make, with `eps`: a
              step leaves the two apart. None: it is one sum
    """

    per_sequence: ClassVar[bool] = True
    flag_in_data: ClassVar[bool] = True

    router: Tensor
    sites: Mapping[str, CudaExpertsSite]
    bias: Tensor | None = None
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0

    @property
    def together(self) -> Together:
        """How a token's experts are chosen."""
        return self.sites["mlp_in"].matrix.together

    @property
    def matrices(self) -> Sequence[CudaZigzag]:
        return [site.matrix.expert(0) for site in self.sites.values()]

    @property
    def numbers(self) -> int:
        return self.together.of_token * _rows(self.sites["mlp_in"].matrix.all)

    @property
    def logits(self) -> int:
        return self.together.logits

    def parts(self, sequences: int, kernels: Kernels) -> int:
        return kernels.expert_blocks(self.sites["mlp_mid"].matrix, sequences)

    def new_workspace(self, sequences: int, kernels: Kernels) -> None:
        return None

    def step(self, step: MlpStep, workspace: None, kernels: Kernels) -> Iterator[Launch]:
        of, into = step.of, self.sites["mlp_in"]
        assert of.logits is not None  # the architecture has experts
        product = partial(step.product, by=partial(kernels.multiply_experts, logits=of.logits))
        yield partial(kernels.route, self.router, step.input, of.logits, self.bias)
        of_product, of_input = _activations(into.matrix.all, step.activation)
        yield product("mlp_in", into, step.input, of.mid, activation=of_product)
        mid = Input(of.mid, eps=step.input.eps, flag_in_data=of.flag_in_data, gated=of_input)
        down = self.sites["mlp_mid"]
        if self.norms is None or of.updates is None:
            yield product("mlp_mid", down, mid, of.y, residual=of.between, squares=of.squares_of_y)
            return
        chosen, shared = (replace(down, matrix=down.matrix.part(which)) for which in ("chosen", "shared"))
        yield product("mlp_mid", chosen, mid, of.y, residual=of.between)
        yield product("mlp_mid", shared, mid, of.updates[2], residual=of.between)

    @property
    def has_rooms(self) -> bool:
        return not all(site.matrix.grouped for site in self.sites.values())

    @property
    def decoded(self) -> int:
        return max(decoded_weights(site.matrix) for site in self.sites.values()) if self.has_rooms else 0

    def prefill(self, of: MlpPrompt, kernels: Kernels) -> Product:
        x = of.x
        chosen, weights = self._chosen(x.values.float() * x.factor[:, None])
        if self.has_rooms:
            made = self._decoded_groups(of, chosen, kernels)
            outputs, weights = made.sums, weights * (made.factor * made.inverse).view_as(weights)
        else:
            outputs = self._grouped(of, chosen, kernels)
        of_each = outputs.view(*chosen.shape, -1)
        if self.norms is None:
            output = torch.bmm(weights[:, None], of_each)[:, 0]
        else:
            used, output = self.together.used, torch.zeros_like(of_each[:, 0])
            for part, norm in zip((slice(used), slice(used, None)), self.norms, strict=True):
                output += rms_norm(torch.bmm(weights[:, None, part], of_each[:, part])[:, 0], norm, self.eps)
        return Product(output, torch.ones_like(x.factor), 1.0, None)

    def _grouped(self, of: MlpPrompt, chosen: Tensor, kernels: Kernels) -> Tensor:
        """What each position's experts make of it, float32 [places, hidden], by products that decode weights on their
        way."""
        into, mid = self.sites["mlp_in"], self.sites["mlp_mid"]
        counted = None if of.filled is None else of.filled.count
        places, zeros = kernels.order_by_expert(chosen, self.together.stored, counted), counted is not None
        both = kernels.multiply_grouped(
            into.matrix, of.x, *places, self.together.of_token, into.dense.bias, zeros=zeros
        )
        width = mid.matrix.all.columns
        inner = kernels.gated(both.part(0, width), both.part(width, width), of.activation)
        return kernels.multiply_grouped(mid.matrix, inner, *places, 1, mid.dense.bias, zeros=zeros).sums

    def _decoded_groups(self, of: MlpPrompt, chosen: Tensor, kernels: Kernels) -> Product:
        """The same by products of decoded weights: some experts together, as the scratch has room."""
        x, scratch = of.x, of.scratch
        of_one = -(-self.decoded // self.together.stored)
        # The last of each is of nobody.
        new = torch.empty if of.filled is None else torch.zeros  # positions that do not count are no one's
        outputs = new(chosen.numel() + 1, of.residual.shape[1], device=of.residual.device)
        factors, inverse = new(len(outputs), device=of.residual.device), 1.0
        scratch = scratch if len(scratch) >= of_one else scratch.new_empty(of_one)
        for first, count, place, position in self._groups(chosen, len(scratch) // of_one, of.filled):
            rows = x.rows(position)
            gate, up = _products(self.sites["mlp_in"], first, count, 2, rows, scratch, kernels)
            inner = kernels.gated(gate, up, of.activation)
            (product,) = _products(self.sites["mlp_mid"], first, count, 1, inner, scratch, kernels)
            outputs[place], factors[place], inverse = product.sums, product.factor, product.inverse
        return Product(outputs[:-1], factors[:-1], inverse, None)

    def _groups(
        self, chosen: Tensor, workspace: int, filled: FilledUp | None
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The experts that are multiplied together, at most `workspace` of them: the first one, how many, and what is
        theirs, places in `chosen` [S, of_token], flat, and the positions of these. Each has as many as the one with
        most, for which the host waits, or as `filled` has room for: others are filled up with the place behind the
        last, of whatever position. Short prompts wait for the host, so all is put together for all groups at once."""
        experts, stored = self.together.experts, self.together.stored
        if filled is not None:
            counts_here = torch.arange(len(chosen), device=chosen.device) < filled.count
            chosen = torch.where(counts_here[:, None], chosen, stored)
        in_order, by_expert = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(in_order, torch.arange(stored + 1, device=chosen.device))
        before, counts, of_nobody = ends[:-1], ends.diff(), chosen.numel()
        largest = counts[:experts].max()
        if filled is not None:
            filled.missed.logical_or_(largest > filled.room)
        kinds = [(0, experts, int(largest) if filled is None else filled.room)]
        if stored > experts:  # by themselves, since the others would fill up to all positions
            kinds.append((experts, stored, len(chosen)))
        for start, end, most in kinds:
            column = torch.arange(most, device=counts.device)
            at_once = min(workspace, max(1, 2 * of_nobody // most))
            places = by_expert[(before[start:end, None] + column).clamp(max=of_nobody - 1)]  # [experts, most]
            positions = torch.split(places // self.together.of_token, at_once)
            places = torch.where(column < counts[start:end, None], places, of_nobody)
            for group, (place, position) in enumerate(zip(torch.split(places, at_once), positions, strict=True)):
                yield start + group * at_once, len(place), place.flatten(), position.flatten()

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts that positions x [S, hidden] have, and their weights: [S, of_token] each."""
        together = self.together
        router, of_shared = self.router[: together.experts], self.router[together.experts :]
        into = self.sites["mlp_in"].matrix
        how = together.used, together.normalised, self.bias, together.routing, into.correction
        chosen, weights = route(x, router, *how, into.scale)
        if not together.shared:
            return chosen, weights
        gate = of_shared if together.shared_gate else None
        return with_shared(x, gate, range(together.experts, together.stored), chosen, weights)


def _products(
    site: CudaExpertsSite, first: int, count: int, parts: int, x: ScaledFp16, scratch: Tensor, kernels: Kernels
) -> list[Product]:
    """The products of some experts, each with as many rows of x as the others; by parts of the matrices' rows."""
    values = x.values.view(count, -1, x.values.shape[1])
    inverse, bias = 1 / site.matrix.all.fp16_scale, site.dense.bias
    weights = kernels.decode_experts(site.matrix, first, count, parts, scratch)
    sums = [kernels.new_products(values, part) for part in weights]
    if bias is None:
        return [Product(part.flatten(0, 1), x.factor, inverse, None) for part in sums]
    factor, ones = (x.factor * inverse).view(count, -1, 1), torch.ones_like(x.factor)
    biases = bias[first : first + count, None].chunk(parts, dim=-1)
    whole = [torch.addcmul(of, part, factor) for of, part in zip(biases, sums, strict=True)]
    return [Product(part.flatten(0, 1), ones, 1.0, None) for part in whole]


def _rows(matrix: CudaZigzag) -> int:
    """How many numbers the product with gate and up leaves."""
    return matrix.rows // (2 if matrix.gate_bands else 1)


def _activations(matrix: CudaZigzag, activation: int) -> tuple[int | None, int | None]:
    """The function of the gate where the product with gate and up finishes both, and where it leaves both to what reads
    them."""
    return (activation, None) if matrix.gate_bands else (None, activation)


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
