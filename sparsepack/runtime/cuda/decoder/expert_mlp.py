"""The mixtures of experts that the cuda decoder runs: their part of a step, and of prefill."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsepack.runtime.cuda.decoder.buffers import FilledUp, Launch, MlpPrompt, MlpStep
from sparsepack.runtime.cuda.decoder.sites import CudaExpertsSite, rows_for_mid, split_activation
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.experts import decoded_weights
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Together
from sparsepack.runtime.reference.products import rms_norm, route, with_shared


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
    def gated(self) -> bool:
        """Whether experts have a gate beside up."""
        return self.sites["mlp_in"].matrix.all.rows > self.sites["mlp_mid"].matrix.all.columns

    @property
    def numbers(self) -> int:
        return self.together.of_token * rows_for_mid(self.sites["mlp_in"].matrix.all)

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
        of_product, of_input = split_activation(into.matrix.all, step.activation)
        yield product("mlp_in", into, step.input, of.mid, activation=of_product)
        plain = not self.gated
        mid = Input(of.mid, eps=step.input.eps, flag_in_data=of.flag_in_data, gated=of_input, plain=plain)
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
        up = both.part(into.matrix.all.rows - width, width)  # without a gate, the gate too
        inner = kernels.gated(both.part(0, width), up, of.activation)
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
            parts = _products(self.sites["mlp_in"], first, count, 1 + self.gated, rows, scratch, kernels)
            inner = kernels.gated(parts[0], parts[-1], of.activation)
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
