"""Error feedback for the experts of a mixture: the matrices of each are quantised to what enters them.

All experts of a block are given the same at mlp_in. What enters the down matrix of one are the tokens that the router
gives it: of few of them little is believed, as at every site, and an expert that none reaches is rounded to nearest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sparsepack.files.transfer import stacked_on
from sparsepack.formats.encoded import EncodedSite
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.experts import as_shared
from sparsepack.models.family import MLP_MID
from sparsepack.models.records.rule import SiteRule
from sparsepack.reconstruction.block_inputs import empty_sums, entering, inputs_name
from sparsepack.reconstruction.inputs import Inputs, root_of_share
from sparsepack.refit.inputs import FittedSite
from sparsepack.sparsity.sequential import sparsify_second_half


class ExpertSums:
    """What enters the experts' matrices at one site of a block, over the tokens of windows.

    rule   -- of the site, by which the second half of every window is sparse
    routed -- holds the experts that the tokens of the running pass are given: int64 [B, S, used]
    """

    def __init__(
        self, checkpoint: Checkpoint, layer: int, site: str, rule: SiteRule | None, routed: list[Tensor], device: str
    ) -> None:
        self._checkpoint, self._layer, self._site, self._device = checkpoint, layer, site, device
        self._rule, self._routed = rule, routed
        self._sums = empty_sums(checkpoint, site, layer, True, torch.device(device))

    def add(self, x: Tensor) -> None:
        """Count what a function of `site_hooks` is shown."""
        sparse = sparsify_second_half(x, self._rule)
        chosen = self._routed[-1] if self._routed else None  # not known yet at mlp_in, nor needed
        for name, inputs in entering(self._checkpoint.family, self._site, sparse, chosen):
            self._sums[name].add(inputs)

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
            known[name] = replace(means, damping=damping(len(means.moments), count))
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
                sizes[stored_as] += _squares(weight[rows])
                moves[stored_as] += _squares(made.weight[rows] - weight[rows])
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
            name = inputs_name(family, self._site, first, number)
            return name, known.get(name)
        name = inputs_name(family, self._site, shared[0])
        inputs, columns_of_part = known.get(name), torch.arange(columns, device=self._device) + part * columns
        return name, inputs and inputs.permuted(columns_of_part)

    def _by_name(self, experts: Tensor) -> dict[str, Tensor]:
        family, count = self._checkpoint.family, self._routed_experts
        first, *shared = (family.weight(projection) for projection in family.projections[self._site])
        parts = as_shared(self._site, experts[count:]) if shared else ()
        return {first: experts[:count], **dict(zip(shared, parts, strict=True))}

    @property
    def _routed_experts(self) -> int:
        """The number of those among which the router chooses."""
        return self._checkpoint.source.shapes[self._checkpoint.weight_names(self._layer, self._site)[0]][0]


def _squares(values: Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))
