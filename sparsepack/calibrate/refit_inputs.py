"""What enters a site while it decodes: the products of its sparse inputs, and what skipping takes from them.

Of a window the first half is a prompt, whose inputs x are dense; the second half is decoded, and there the matrix sees
x~, x with an offset (or zero) in place of every inactive channel. With e = x - x~ and means over tokens

    products      E[x~ x~^T]     both halves, each with its share
    lost          E[e x~^T]      zero in the first half

say all that fitting W' x~ to W x needs: x is the unsparsified input of the same stream, with everything upstream as it
will be. Where no site skips anything, the two halves are one. Where rules have levels, they are one, too, but x~ lacks
what is not read, and it is known how much of each channel is read at each level.

New weights of one matrix, in closed form: what of W x the sparse inputs x~ can still give.

W' minimises E|W' x~ - W x|^2 + lambda |W' - W|^2, with lambda the damping times the mean of E[x~_j^2]:

    W' = W + W E[e x~^T] (E[x~ x~^T] + lambda)^-1,   e = x - x~

A matrix whose inputs are not skipped stays as it is. For any other W'', and so for a quantised one, the sum is that of
W' plus tr((W'' - W') (E[x~ x~^T] + lambda) (W'' - W')^T): GPTQ with the same products goes on where this ends.

Error feedback for the experts of a mixture: the matrices of each are quantised to what enters them.

All experts of a block are given the same at mlp_in. What enters the down matrix of one are the tokens that the router
gives it: of few of them little is believed, as at every site, and an expert that none reaches is rounded to nearest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsepack.calibrate.sequential import sparsify_second_half
from sparsepack.files.transfer import stacked_on
from sparsepack.formats.plan import EncodedSite
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.experts import as_shared
from sparsepack.models.family import MLP_MID
from sparsepack.models.sites import SiteRule, levels_read, sparsify
from sparsepack.reconstruction import Inputs, Sums, empty_sums, entering, inputs_name, root_of_share

_TOLD = 128  # evenly spread


@dataclass(frozen=True)
class SiteInputs:
    """Means over tokens, on the device where the matrix is fitted.

    inputs  -- of x~
    lost    -- W E[e x~^T]: float32 [rows, columns]; None: nothing is skipped
    told    -- rows of W by whose outputs errors are told, `_TOLD` of them where nothing is skipped: int64
    outputs -- of the squared length of W x in these rows
    missing -- of the squared length of W e in these rows
    """

    inputs: Inputs
    lost: Tensor | None
    told: Tensor
    outputs: float
    missing: float

    def relative_error(self, weight: Tensor, changed: Tensor) -> float:
        """How far W' x~, W' the `changed` weight, is from W x: the root mean square of the difference over that of
        W x."""
        change = changed[self.told] - weight[self.told]
        squares = self.inputs.output_squares(change) + self.missing
        if self.lost is not None:
            squares -= 2 * float((self.lost[self.told] * change).sum(dtype=torch.float64))
        return root_of_share(max(squares, 0.0), self.outputs)


class SiteSums:
    """Sums over the tokens of windows, from which `SiteInputs` are made.

    weight -- W, float32 [rows, columns]
    rule   -- of the site; None: every channel is active
    dense  -- share of the first halves; None: both halves are one
    count  -- tokens so far
    """

    def __init__(self, weight: Tensor, rule: SiteRule | None, dense: float | None) -> None:
        self.weight, self._dense = weight, dense
        self._rule = None if rule is None or rule.dense else rule.to(weight.device)
        rows, columns = weight.shape
        told = min(rows, _TOLD) if self._rule is None or self._rule.of_levels else rows
        self._told = torch.linspace(0, rows - 1, told, device=weight.device).round().long()
        self._sums = Sums(columns, True, weight.device)
        levels = 0 if self._rule is None or self._rule.steps is None else len(self._rule.steps)
        self._by_level = torch.zeros(1 + levels, columns, device=weight.device) if levels else None
        self._lost = None if self._rule is None or levels else torch.zeros(columns, columns, device=weight.device)
        self._outputs = self._missing = self._tokens = 0.0
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Count the unsparsified inputs of windows: [B, S, columns]."""
        self.count += x.shape[0] * x.shape[1]
        if self._by_level is not None:
            return self._count_levels(x.flatten(0, -2))
        if self._dense is None:
            return self._count(x, None, 1.0)
        half = x.shape[1] // 2
        # Halves of an odd window count by their shares, too.
        self._count(x[:, :half], None, self._dense * x.shape[1] / half)
        self._count(x[:, half:], self._rule, (1 - self._dense) * x.shape[1] / (x.shape[1] - half))

    def _count(self, x: Tensor, rule: SiteRule | None, share: float) -> None:
        if share == 0:
            return
        x = x.flatten(0, -2)
        self._tokens += share * len(x)
        if self._rule is not None:
            self._outputs += share * _squares(self.weight, x.float())
        if rule is None or self._lost is None:
            return self._sums.add(x, share)
        sparse = sparsify(x, rule)
        self._sums.add(sparse, share)
        error = x.float() - sparse.float()
        self._missing += share * _squares(self.weight, error)
        self._lost.addmm_(error.t(), sparse.float(), alpha=share)

    def _count_levels(self, x: Tensor) -> None:
        assert self._rule is not None
        assert self._by_level is not None
        levels = levels_read(x, self._rule.limits)
        self._by_level += squares_by_level(x, levels, len(self._by_level) - 1)
        self._tokens += len(x)
        self._sums.add(torch.where(levels > 0, x, 0))

    def inputs(self, damping: float, shrunk: bool = False) -> SiteInputs:
        """The means of what was counted; the sums are let go of."""
        lost = None if self._lost is None else self.weight @ self._lost.div_(self._tokens)
        inputs = self._sums.inputs(damping, shrunk)
        del self._lost, self._sums
        if self._by_level is not None:
            assert self._rule is not None
            inputs = replace(inputs, levels=_shares_of_read(self._by_level), row_costs=self._rule.row_costs)
        outputs = self._outputs / self._tokens
        if lost is None:
            outputs = inputs.output_squares(self.weight[self._told])
        return SiteInputs(inputs, lost, self._told, outputs, self._missing / self._tokens)


def squares_by_level(x: Tensor, levels: Tensor, most: int) -> Tensor:
    """Sums over inputs [tokens, columns] of their squares at each level from 0 on: float32 [1 + most, columns]."""
    squares = x.float().square()
    if x.device.type == "cpu":  # elsewhere it adds in no fixed order
        return squares.new_zeros(1 + most, x.shape[1]).scatter_add_(0, levels.long(), squares)
    return torch.stack([torch.where(levels == level, squares, 0).sum(0) for level in range(1 + most)])


def _shares_of_read(by_level: Tensor) -> Tensor:
    """`Inputs.levels` of sums of squares."""
    return by_level / by_level[1:].sum(0).clamp_min(1e-30)


def _squares(weight: Tensor, x: Tensor) -> float:
    return float((x @ weight.t()).square().sum(dtype=torch.float64))


@dataclass(frozen=True)
class FittedSite:
    """The matrices of a site, as they are stored.

    tensors -- their bytes, by the names of the artifact's tensors: uint8, of experts [experts, ...]
    decoded -- what they decode to, by the names that the tensors of the transformers model have within the block
    changes -- of the weights, relative, by the names of the stored tensors
    before  -- relative error of the outputs, were the weights rounded to nearest
    after   -- the same of what is stored
    """

    tensors: Mapping[str, Tensor]
    decoded: Mapping[str, Tensor]
    changes: Mapping[str, float]
    before: float
    after: float


def refitted(weight: Tensor, known: SiteInputs) -> Tensor:
    """float32 [rows, columns] -> new weights of the same shape. Raises `SingularError` as `Inputs.inverse_factor`."""
    if known.lost is None:
        return weight
    order, inputs = known.inputs.by_size  # as quantising will take them, so that the inverse is made once
    factor = inputs.inverse_factor
    found = weight.clone()
    found[:, order] += known.lost[:, order] @ factor.t() @ factor
    return found


class ExpertSums:
    """What enters the experts' matrices at one site of a block, over the tokens of windows.

    rule   -- of the site, by which the second half of every window is sparse
    routed -- holds the experts that the tokens of the running pass are given: int64 [B, S, used]
    """

    def __init__(
        self, checkpoint: Checkpoint, layer: int, site: str, rule: SiteRule | None, routed: list[Tensor], device: str
    ) -> None:
        self._checkpoint, self._layer, self._site, self._device = checkpoint, layer, site, device
        self._rule, self._routed = None if rule is None else rule.to(device), routed
        self._sums = empty_sums(checkpoint, site, layer, True, torch.device(device))
        self._by_level: dict[str, Tensor] = {}

    def add(self, x: Tensor) -> None:
        """Count what a function of `site_hooks` is shown."""
        sparse = sparsify_second_half(x, self._rule)
        chosen = self._routed[-1] if self._routed else None  # not known yet at mlp_in, nor needed
        for name, inputs in entering(self._checkpoint.family, self._site, sparse, chosen):
            if self._rule is not None and self._rule.of_levels:
                inputs = self._count_levels(name, inputs.flatten(0, -2), self._rule.limits)
            self._sums[name].add(inputs)

    def _count_levels(self, name: str, x: Tensor, limits: Tensor) -> Tensor:
        """What is read of inputs [tokens, columns], whose squares at each level are counted."""
        if limits.dim() == 3:
            _, _, expert = name.partition("/")
            shared = limits[self._routed_experts :].transpose(0, 1).flatten(1)
            limits = limits[int(expert)] if expert.isdigit() else shared
        levels = levels_read(x, limits)
        found = squares_by_level(x, levels, len(limits))
        self._by_level[name] = found + self._by_level.get(name, 0)
        return torch.where(levels > 0, x, 0)

    def fitted(
        self,
        encode: Callable[[Tensor, Inputs | None], EncodedSite],
        damping: Callable[[int, float], float],
        dtype: torch.dtype,
    ) -> FittedSite:
        """Encode the experts' matrices one by one; the sums are let go of.

        damping -- of the products of so many inputs, after so many tokens
        dtype   -- of what is decoded

        Raises as `encode`.
        """
        tokens = {name: sums.tokens for name, sums in self._sums.items() if sums.tokens}
        known = {}
        for name, count in tokens.items():
            means = self._sums.pop(name).inputs(0.0, shrunk=True)
            levels = _shares_of_read(self._by_level.pop(name)) if name in self._by_level else None
            known[name] = replace(means, damping=damping(len(means.moments), count), levels=levels)
        self._sums.clear()
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        sizes: dict[str, float] = defaultdict(float)
        moves: dict[str, float] = defaultdict(float)
        decoded: list[Tensor] = []
        before = after = outputs = 0.0
        for number, stored in enumerate(self._checkpoint.each_expert(self._layer, self._site)):
            weight = stacked_on(self._device, [stored]).float()
            name, inputs = self._of_expert(known, number, weight.shape[1])
            made, rounded = encode(weight, inputs), encode(weight, None)
            for stored_as, tensor in made.tensors.items():
                tensors[stored_as].append(tensor)
            for stored_as, rows in made.rows.items():
                sizes[stored_as] += _squared(weight[rows])
                moves[stored_as] += _squared(made.weight[rows] - weight[rows])
            decoded.append(made.weight.to(dtype))
            if inputs is not None:
                outputs += tokens[name] * inputs.output_squares(weight)
                before += tokens[name] * inputs.output_squares(rounded.weight - weight)
                after += tokens[name] * inputs.output_squares(made.weight - weight)
        return FittedSite(
            {name: torch.stack(parts) for name, parts in tensors.items()},
            self._by_name(torch.stack(decoded)),
            {name: root_of_share(moves[name], size) for name, size in sizes.items()},
            root_of_share(before, outputs),
            root_of_share(after, outputs),
        )

    def _of_expert(self, known: Mapping[str, Inputs], number: int, columns: int) -> tuple[str, Inputs | None]:
        """What enters a stored expert's matrix: its name, and what is known of it; None: nothing entered. The parts of
        a shared expert come after the others, and have inputs of their own."""
        family, (first, *shared) = self._checkpoint.family, self._checkpoint.family.projections[self._site]
        part = number - self._routed_experts
        if part < 0 or self._site != MLP_MID:
            name = inputs_name(family, self._site, first, number, self._layer)
            return name, known.get(name)
        name = inputs_name(family, self._site, shared[0], layer=self._layer)
        inputs, columns_of_part = known.get(name), torch.arange(columns, device=self._device) + part * columns
        return name, inputs and inputs.permuted(columns_of_part)

    def _by_name(self, experts: Tensor) -> dict[str, Tensor]:
        family, count = self._checkpoint.family, self._routed_experts
        first, *shared = (family.weight(projection) for projection in family.projections[self._site])
        parts = as_shared(self._site, experts[count:], 1 + family.gated) if shared else ()
        return {first: experts[:count], **dict(zip(shared, parts, strict=True))}

    @property
    def _routed_experts(self) -> int:
        """The number of those among which the router chooses."""
        return self._checkpoint.source.shapes[self._checkpoint.weight_names(self._layer, self._site)[0]][0]


def _squared(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))
