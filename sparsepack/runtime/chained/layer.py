"""The operations of a backend that a decoder chains (`runtime/chained/decoder.py`), and what the decoder loads of a
block by them: its sites, and its MLP, which count what decoded positions read of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsepack.formats.kinds import DENSE, EXPERTS, MLP_GATE, MLP_RECORDS, NEURONS, PLAIN_NEURONS, MlpKind
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.packed import DenseMlp, ExpertMlp, NeuronMlp, PackedLayer, PackedSite
from sparsepack.models.activations import xielu, xielu_coefficients
from sparsepack.models.blocks import EXPERT_NORMS, SUB_NORMS, Router
from sparsepack.models.sites import SiteRule, levels_read
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.threshold_controller import StepScales


class Operations(Protocol):
    """What a backend offers, each function as its namesake in `runtime/reference`.

    A loaded matrix is the backend's own: it may repack the bytes, and only its own operations read it.
    """

    def load_zigzag(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a zigzag matrix for `zigzag_gemv` and `zigzag_matmul`."""

    def load_rows(self, matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
        """Prepare a matrix stored by rows, the output matrix or a change of basis, for `matmul`."""

    def collect(self, x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """The active columns of x, in ascending order, and their count."""

    def zigzag_gemv(self, matrix: Any, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """W[:, active] x[active]."""

    def zigzag_matmul(self, matrix: Any, x: Tensor) -> Tensor:
        """X W^T with every column."""

    def matmul(self, weight: Any, x: Tensor) -> Tensor:
        """X W^T of a matrix stored by rows."""

    def load_neurons(self, records: PackedMatrix, device: torch.device | str = "cpu", gated: bool = True) -> Any:
        """Prepare neuron records for `neuron_ffn` and `neuron_matmul`. A backend whose row has no `PLAIN_NEURONS` need
        not take those without gates."""

    def neuron_ffn(self, neurons: Any, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
        """The sum over active neurons of gate_n (up_n . x) down_n."""

    def neuron_matmul(self, neurons: Any, x: Tensor, gate: Tensor) -> Tensor:
        """The sum of `neuron_ffn` for several positions, with every neuron."""

    def new_cache(self, shape: AttentionShape, type: str | None = None, device: torch.device | str = "cpu") -> KvCache:
        """An empty cache that attends to every position that a layer's window shows."""


class PlanesOperations(Operations, Protocol):
    """What a backend offers that runs matrices with planes."""

    def planes_matmul(self, matrix: Any, x: Tensor, levels: Tensor) -> Tensor:
        """X W^T, every column of every row of X at its level."""


class Mode(Enum):
    """How a block treats the positions at hand; all but the first are counted."""

    PREFILL = "dense, not counted"
    DENSE = "dense, each counted"
    MASKED = "each counted, what is inactive read but zero: the same sums as STEP"
    STEP = "one position of each sequence, counted as one; columns and neurons that are inactive in all are not read"
    DENSE_STEP = "one position of each sequence, dense, counted as one"

    def units(self, x: Tensor) -> int:
        """How many units are counted where all of x [S, units] are read."""
        return x.numel() if self in (Mode.DENSE, Mode.MASKED) else x.shape[1] if self is not Mode.PREFILL else 0


class Mlp(Protocol):
    """A loaded MLP."""

    @property
    def active(self) -> Mapping[str, Tensor]:
        """For each matrix, by its name there, the units that were read: int64 []."""

    def output(self, x: Tensor, activation: str, mode: Mode, scales: StepScales | None = None) -> Tensor:
        """What the MLP makes of x [S, hidden]: [S, hidden].

        activation -- as `Architecture` names it; scales: as in `LoadedSite.product`
        """


@dataclass(frozen=True)
class LoadedSite:
    """A loaded site.

    sparse_bias -- what its sparse product lacks: bias + W offset, None where both are absent
    active      -- int64 []: the columns that were read, or with planes the bytes of a row of superblocks
    level_bytes -- of a matrix with planes, the bytes of a superblock that are read at each level from 0 on
    """

    operations: Operations
    matrix: Any
    bias: Tensor | None
    rule: SiteRule | None
    sparse_bias: Tensor | None
    active: Tensor
    level_bytes: Tensor | None = None

    def product(self, x: Tensor, mode: Mode, scales: StepScales | None = None) -> Tensor:
        """The output rows for x [S, columns]: [S, rows]. scales: of S sequences under a threshold
        controller, which also get the count of skipped weights."""
        if mode in (Mode.PREFILL, Mode.DENSE, Mode.DENSE_STEP) or self.rule is None:
            unit = 1 if self.level_bytes is None else self.level_bytes[-1]
            self.active.add_(mode.units(x) * unit)
            return _plus(self.operations.zigzag_matmul(self.matrix, x), self.bias)
        if self.level_bytes is not None:
            return self._product_of_planes(x, mode, self.level_bytes, scales)
        threshold, offset = self.rule.limits, self.rule.offset
        limits = threshold if scales is None else scales.scaled(threshold)
        d = x if offset is None else x - offset
        if mode is Mode.STEP and len(x) == 1:
            indices, count = self.operations.collect(d[0], limits.reshape(threshold.shape))
            y = self.operations.zigzag_gemv(self.matrix, d[0], indices, count)[None]
            of_each = count[None]
        else:
            active = d.abs() > limits
            of_each = active.sum(1)
            if mode is Mode.STEP:
                active = active.any(0)
            count = active.sum()
            y = self.operations.zigzag_matmul(self.matrix, torch.where(active, d, 0))
        self.active.add_(count)
        if scales is not None:
            scales.count(x.shape[1] - of_each, y.shape[1])
        return _plus(y, self.sparse_bias)

    def _product_of_planes(self, x: Tensor, mode: Mode, bytes: Tensor, scales: StepScales | None) -> Tensor:
        """Each column at the level that its input asks for; in a step of several sequences, the largest of them."""
        assert self.rule is not None
        d = x if self.rule.offset is None else x - self.rule.offset
        levels = _levels(d, self.rule.limits, scales, len(bytes) - 1)
        of_each = bytes[levels.long()].sum(1)
        if mode is Mode.STEP:
            levels = levels.amax(0).expand_as(levels)
            self.active.add_(bytes[levels[0].long()].sum())
        else:
            self.active.add_(of_each.sum())
        y = cast(PlanesOperations, self.operations).planes_matmul(self.matrix, d, levels)
        if scales is not None:
            scales.count((x.shape[1] * bytes[-1] - of_each) // bytes[-1], y.shape[1])
        return _plus(y, self.sparse_bias)


@dataclass(frozen=True)
class LoadedDenseMlp:
    """A loaded MLP of the sites mlp_in and mlp_mid.

    norm  -- of what enters mlp_mid; None: it is not normed
    xielu -- its function, in place of the activation; None: that is it
    """

    sites: Mapping[str, LoadedSite]
    gated: bool
    norm: Callable[[Tensor], Tensor] | None = None
    xielu: Callable[[Tensor], Tensor] | None = None

    @property
    def active(self) -> Mapping[str, Tensor]:
        return {name: site.active for name, site in self.sites.items()}

    def output(self, x: Tensor, activation: str, mode: Mode, scales: StepScales | None = None) -> Tensor:
        h = self.sites["mlp_in"].product(x, mode, scales)
        if self.gated:
            middle = reference.gated(activation, *h.chunk(2, dim=-1))
        else:
            middle = (self.xielu or reference.ACTIVATION_FUNCTIONS[activation])(h)
        return self.sites["mlp_mid"].product(middle if self.norm is None else self.norm(middle), mode, scales)


@dataclass(frozen=True)
class _LoadedNeuronMlp:
    operations: Operations
    gate: Callable[[Tensor], Tensor]
    records: Any
    active: Mapping[str, Tensor]

    def output(self, x: Tensor, activation: str, mode: Mode, scales: StepScales | None = None) -> Tensor:
        gate = reference.ACTIVATION_FUNCTIONS[activation](self.gate(x))  # [S, neurons]
        self.active[MLP_GATE].add_(mode.units(x))
        if mode is Mode.STEP and len(x) == 1:
            indices, count = self.operations.collect(gate[0], torch.zeros((), device=gate.device))
            self.active[MLP_RECORDS].add_(count)
            return self.operations.neuron_ffn(self.records, x[0], gate[0], indices, count)[None]
        if mode in (Mode.DENSE, Mode.DENSE_STEP):
            self.active[MLP_RECORDS].add_(mode.units(gate))
        elif mode is not Mode.PREFILL:
            active = gate.any(0) if mode is Mode.STEP else gate
            self.active[MLP_RECORDS].add_(active.count_nonzero())
        return self.operations.neuron_matmul(self.records, x, gate)


@dataclass(frozen=True)
class LoadedExpertMlp:
    """Loaded experts: matrices and rule of each site, and what chooses. Matrices after those that may be chosen are of
    experts that every token has.

    Counted are columns of the experts that a token has, or with planes bytes of rows of superblocks; of a step of
    several sequences the mean over these.

    level_bytes -- as of a `LoadedSite`
    biases      -- of each site, float32 [experts, rows]; None: there are none
    routing, correction, shared_gate, scale, gated -- as an `ExpertMlp` has them
    norms       -- RMSNorms of what the chosen experts make, and of what the shared ones do; None: there are none
    """

    operations: Operations
    router: Tensor
    router_bias: Tensor | None
    shared_gate: Tensor | None
    used: int
    normalised: bool
    matrices: Mapping[str, Sequence[Any]]
    rules: Mapping[str, SiteRule | None]
    biases: Mapping[str, Tensor | None]
    active: Mapping[str, Tensor]
    level_bytes: Tensor | None
    routing: Router | None = None
    correction: Tensor | None = None
    scale: Tensor | None = None
    gated: bool = True
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None

    def output(self, x: Tensor, activation: str, mode: Mode, scales: StepScales | None = None) -> Tensor:
        how = self.used, self.normalised, self.router_bias, self.routing, self.correction, self.scale
        chosen, weights = reference.route(x, self.router, *how)
        into, middle_of = self.matrices["mlp_in"], self.matrices["mlp_mid"]
        if len(into) > len(self.router):
            numbers = range(len(self.router), len(into))
            chosen, weights = reference.with_shared(x, self.shared_gate, numbers, chosen, weights)
        product = partial(self._product, mode is Mode.STEP and len(x) == 1)
        places = [(expert, *torch.where(chosen == expert)) for expert in sorted(set(chosen.flatten().tolist()))]
        # [S, 1, hidden], the same for all of a token's
        x, read = self._selected("mlp_in", x[:, None], None, mode, scales)
        middle: Tensor | None = None
        for expert, token, slot in places:
            of_these = None if read is None else read[token, 0]
            made = self._biased("mlp_in", expert, product(into[expert], x[token, 0], of_these))
            if self.gated:
                gated = reference.gated(activation, *made.chunk(2, dim=-1))
            else:
                gated = reference.ACTIVATION_FUNCTIONS[activation](made)
            middle = x.new_empty(*chosen.shape, gated.shape[1]) if middle is None else middle
            middle[token, slot] = gated
        assert middle is not None
        middle, read = self._selected("mlp_mid", middle, chosen, mode, scales)
        output = torch.zeros_like(x[:, 0])
        of_shared = output if self.norms is None else torch.zeros_like(output)
        for expert, token, slot in places:
            of_these = None if read is None else read[token, slot]
            made = self._biased("mlp_mid", expert, product(middle_of[expert], middle[token, slot], of_these))
            to = output if expert < len(self.router) else of_shared
            to.index_add_(0, token, made * weights[token, slot, None])
        return output if self.norms is None else self.norms[0](output) + self.norms[1](of_shared)

    def _selected(
        self, site: str, x: Tensor, chosen: Tensor | None, mode: Mode, scales: StepScales | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [S, experts, columns] with zeros where columns are inactive, counted; and the level at which each is read,
        without planes 0 or 1, uint8 [S, experts, columns]; None: all is read.

        chosen -- the experts whose inputs these are [S, experts]; None: they are the same for all
        """
        of_token = self.used + len(self.matrices[site]) - len(self.router)
        rule, times, bytes = self.rules[site], of_token // x.shape[1], self.level_bytes
        sequences = 1 if mode in (Mode.DENSE, Mode.MASKED) else len(x)
        if mode is Mode.PREFILL:
            return x, None
        if rule is None or mode in (Mode.DENSE, Mode.DENSE_STEP):
            self.active[site].add_(times * x.numel() // sequences * (1 if bytes is None else bytes[-1]))
            return x, None
        limits = rule.limits[chosen] if rule.limits.dim() == 3 else rule.limits
        levels = _levels(x, limits, scales, 1 if bytes is None else len(bytes) - 1)
        of_each = (levels if bytes is None else bytes[levels.long()]).sum(2, dtype=torch.int64)  # [S, experts]
        self.active[site].add_((times * of_each.sum()).div(sequences, rounding_mode="floor"))
        if scales is not None:
            unread = x.shape[2] - (of_each if bytes is None else -(-of_each // bytes[-1]))
            scales.count(times * unread.sum(1), self._rows(site))
        return torch.where(levels > 0, x, 0), levels

    def _biased(self, site: str, expert: int, y: Tensor) -> Tensor:
        of_site = self.biases[site]
        return y if of_site is None else y + of_site[expert]

    def _rows(self, site: str) -> int:
        return int(self.matrices[site][0].rows)

    def _product(self, one: bool, matrix: Any, x: Tensor, levels: Tensor | None) -> Tensor:
        """The product of positions x [n, columns]; of one position, one reads those columns alone that are not zero.

        levels -- as of `_selected`
        """
        if levels is not None and self.level_bytes is not None:
            return cast(PlanesOperations, self.operations).planes_matmul(matrix, x, levels)
        if levels is None or not one:
            return self.operations.zigzag_matmul(matrix, x)
        indices, count = self.operations.collect(x[0], torch.zeros((), device=x.device))
        return self.operations.zigzag_gemv(matrix, x[0], indices, count)[None]


def _levels(x: Tensor, limits: Tensor, scales: StepScales | None, most: int) -> Tensor:
    """At which level each column of x [S, ..., columns] is read: uint8, as x.

    limits -- a rule's, or of each vector of x its own [S, ..., levels, columns]; scales -- of the S sequences
    most   -- the level of a column whose limit is one number and that is read
    """
    of_levels = limits.dim() > 1
    if scales is not None:
        limits = scales.scales.view(-1, *[1] * (x.dim() - 1 + of_levels)) * limits
    return levels_read(x, limits) if of_levels else (x.abs() > limits).to(torch.uint8) * most


@dataclass(frozen=True)
class LoadedPerLayer:
    """What a block adds by an input of its own; the fields are as `PackedPerLayer` has them."""

    operations: Operations
    gate: Any
    out: Any
    norm: Tensor
    eps: float

    def output(self, x: Tensor, own: Tensor, activation: str) -> Tensor:
        """What is added to x [S, hidden] by the inputs [S, width]."""
        gate = reference.ACTIVATION_FUNCTIONS[activation](self.operations.matmul(self.gate, x))
        return reference.rms_norm(self.operations.matmul(self.out, gate * own), self.norm, self.eps)


@dataclass(frozen=True)
class LoadedLayer:
    """A loaded block. `basis` is what its input is multiplied by first; None: nothing. `delta_net` and `scalar` are as
    a `PackedLayer` has them."""

    attention: Mapping[str, LoadedSite]
    norms: Mapping[str, Tensor]
    mlp: Mlp
    basis: Any | None
    delta_net: Mapping[str, Tensor]
    scalar: Tensor | None
    per_layer: LoadedPerLayer | None

    @property
    def active(self) -> Mapping[str, Tensor]:
        """For each matrix, by its name in the block, the units that were read: int64 []."""
        return {**{name: site.active for name, site in self.attention.items()}, **self.mlp.active}


def load_layer(layer: PackedLayer, operations: Operations, device: torch.device, eps: float) -> LoadedLayer:
    """A block on a device, its counts at zero. eps -- of its norms"""
    norms = {name: norm.to(device) for name, norm in layer.norms.items()}
    mlp = _LOADERS[layer.mlp.kind](layer.mlp, operations, device)
    if isinstance(mlp, LoadedExpertMlp) and EXPERT_NORMS[0] in norms:
        of_chosen, of_shared = (partial(reference.rms_norm, weight=norms[name], eps=eps) for name in EXPERT_NORMS)
        mlp = replace(mlp, norms=(of_chosen, of_shared))
    if isinstance(mlp, LoadedDenseMlp) and SUB_NORMS[1] in norms:
        mlp = replace(mlp, norm=partial(reference.rms_norm, weight=norms[SUB_NORMS[1]], eps=eps))
    if isinstance(mlp, LoadedDenseMlp) and layer.xielu is not None:
        mlp = replace(mlp, xielu=partial(xielu, coefficients=xielu_coefficients(layer.xielu.to(device))))
    basis = None if layer.basis is None else operations.load_rows(layer.basis, device)
    delta_net = {name: value.to(device) for name, value in layer.delta_net.items()}
    scalar = None if layer.scalar is None else layer.scalar.to(device)
    sites, own = _load_sites(layer.attention, operations, device), layer.per_layer
    per_layer = None
    if own is not None:
        matrices = operations.load_rows(own.gate, device), operations.load_rows(own.out, device)
        per_layer = LoadedPerLayer(operations, *matrices, own.norm.to(device), eps)
    return LoadedLayer(sites, norms, mlp, basis, delta_net, scalar, per_layer)


def _load_dense(mlp: DenseMlp, operations: Operations, device: torch.device) -> Mlp:
    return LoadedDenseMlp(_load_sites(mlp.sites, operations, device), mlp.gated)


def _load_neurons(mlp: NeuronMlp, operations: Operations, device: torch.device) -> Mlp:
    gate, records = (
        _product_of(mlp.gate, operations, device),
        (
            operations.load_neurons(mlp.records, device)
            if mlp.gated
            else operations.load_neurons(mlp.records, device, False)
        ),
    )
    return _LoadedNeuronMlp(operations, gate, records, {name: _zero(device) for name in NEURONS.counted})


def _product_of(matrix: PackedMatrix, operations: Operations, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Y = X W^T for a matrix in either order, which is loaded."""
    if matrix.format.order == "zigzag":
        return partial(operations.zigzag_matmul, operations.load_zigzag(matrix, device))
    return partial(operations.matmul, operations.load_rows(matrix, device))


def _load_experts(mlp: ExpertMlp, operations: Operations, device: torch.device) -> Mlp:
    matrices = {
        name: [operations.load_zigzag(site.matrix.expert(number), device) for number in range(site.matrix.experts)]
        for name, site in mlp.sites.items()
    }
    rules = {name: None if site.rule is None else site.rule.to(device) for name, site in mlp.sites.items()}
    active = {name: _zero(device) for name in EXPERTS.counted}
    router, shared = mlp.router.to(device), None if mlp.shared_gate is None else mlp.shared_gate.to(device)
    bytes = _level_bytes(mlp.sites["mlp_in"].matrix.levels, device)
    bias = None if mlp.router_bias is None else mlp.router_bias.to(device)
    biases = {name: None if site.bias is None else site.bias.to(device) for name, site in mlp.sites.items()}
    correction = None if mlp.correction is None else mlp.correction.to(device)
    scale = None if mlp.scale is None else mlp.scale.to(device)
    gates, of_sites = (router, bias, shared, mlp.used, mlp.normalised), (matrices, rules, biases, active, bytes)
    return LoadedExpertMlp(operations, *gates, *of_sites, mlp.routing, correction, scale, mlp.gated)


_LOADERS: Mapping[MlpKind, Callable[[Any, Operations, torch.device], Mlp]] = {
    DENSE: _load_dense,
    NEURONS: _load_neurons,
    PLAIN_NEURONS: _load_neurons,
    EXPERTS: _load_experts,
}


def _load_sites(sites: Mapping[str, PackedSite], operations: Operations, device: torch.device) -> dict[str, LoadedSite]:
    return {name: _load_site(site, operations, device) for name, site in sites.items()}


def _load_site(site: PackedSite, operations: Operations, device: torch.device) -> LoadedSite:
    matrix = operations.load_zigzag(site.matrix, device)
    bias = None if site.bias is None else site.bias.to(device)
    rule = None if site.rule is None else site.rule.to(device)
    sparse_bias = bias
    if rule is not None and rule.offset is not None:
        sparse_bias = _plus(operations.zigzag_matmul(matrix, rule.offset[None])[0], bias)
    bytes = _level_bytes(site.matrix.levels, device)
    return LoadedSite(operations, matrix, bias, rule, sparse_bias, _zero(device), bytes)


def _level_bytes(levels: Sequence[int], device: torch.device) -> Tensor | None:
    """Bytes of a superblock that are read at each level from 0 on; None: there are no planes."""
    return torch.tensor([0, *levels], device=device) if levels else None


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
