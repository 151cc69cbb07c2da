"""A decoder of one sequence on an Apple GPU."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.generation.sampling import Sampler, not_finite, sample
from sparsepack.runtime.metal.kv_cache import MetalKvCache
from sparsepack.runtime.metal.operations import operations
from sparsepack.runtime.metal.products import MetalZigzag, gpu_name
from sparsepack.runtime.metal.step import MetalModel, Step, state_parts

MOST_COUNTED = 2**31 - 1
"""The GPU counts active columns in so many numbers; the host takes over what was counted before that is too few."""


class MetalDecoder(OperationsDecoder):
    """A `runtime.decoder.Decoder` of one sequence.

    Matrices keep the size that they have in the file. A step is a chain of kernels (`step.py`), and the host waits for
    nothing but the token that it asked for. Steps sum in float32; prefill, and positions that are given together, are
    products of torch's in float32 with weights that are decoded some bands at a time; keys and values are float16. The
    same sequence gives the same bits every run, until `sparsepack tune` finds other grids.

    device -- where tensors lie, as `library.usable` gives it

    Raises `UserError` for heads that the kernels do not know.
    """

    def __init__(self, packed: PackedModel, device: torch.device, context: int) -> None:
        super().__init__(packed, operations, device, context, threads=1, cache_type="f16")
        embedding = (
            self._output if packed.output is packed.embedding else operations.load_rows(packed.embedding, device)
        )
        model = MetalModel(self._architecture, tuple(self._layers), embedding, self._output, self._output_norm)
        self._step = Step(model, cast(MetalKvCache, self.cache))
        sites = [site for number in range(self._architecture.layers) for site in model.sites(number).values()]
        self._matrices: list[MetalZigzag] = [site.matrix for site in sites]
        self._counted = [0] * len(sites)  # what was taken over from the GPU
        self._steps_counted = 0  # since then
        self._known: int | None = None  # the token that lies in the step's state, where the host knows it

    @property
    def description(self) -> str:
        return gpu_name()

    @property
    def dispatches(self) -> int:
        """How many kernels a token takes."""
        return self._step.dispatches

    def active(self) -> dict[tuple[int, str], int]:
        self._take_counts()
        together = super().active()  # of positions that were given together
        return {key: count + together[key] for key, count in zip(together, self._counted, strict=True)}

    def reset(self) -> None:
        super().reset()
        self._step.active.zero_()
        self._counted, self._steps_counted = [0] * len(self._counted), 0

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        (id,) = ids
        assert id is not None  # a step has at least one sequence
        self._append(id, sparse)
        return self._step.logits.clone()[None]

    def decode_next(
        self, ids: Sequence[int | None], sparse: bool, samplers: Sequence[Sampler | None]
    ) -> list[int | None]:
        (id,), (sampler,) = ids, samplers
        assert id is not None
        assert sampler is not None
        self._append(id, sparse)
        how = sampler.sampling
        if how.temperature:
            # Apple's GPUs have no float64.
            draw = torch.full((), sampler.draw(), dtype=torch.float32, device=self._device)
            self._step.id.copy_(sample(self._step.logits, draw, how.temperature, how.top_k, how.top_p))
        chosen, best, _ = state_parts(self._step.state[:2].cpu())
        if not math.isfinite(best.item()):
            raise not_finite(best.item())
        self._known = int(chosen)
        return [self._known]

    def _append(self, id: int, sparse: bool) -> None:
        """Put a step on torch's stream."""
        if self._steps_counted == MOST_COUNTED // max(matrix.units for matrix in self._matrices):
            self._take_counts()
        if self._known != id:
            self._step.id.fill_(id)
        self._known = None  # should what follows be interrupted
        scales = self._scales if sparse else None
        if scales is not None:
            self._take_counts()
        self._step.run(self.cache.lengths[0], sparse, 1.0 if scales is None else scales.scales[0])
        self._steps_counted += 1
        self.cache.advance(1)
        self.stepped += 1
        if scales is not None:
            counted = self._take_counts()
            of_step = scales.begin_step([0])
            of_step.skipped.fill_(
                sum(
                    matrix.rows * ((matrix.units - active) * matrix.columns // matrix.units)
                    for matrix, active in zip(self._matrices, counted, strict=True)
                )
            )
            scales.end_step([0], of_step)

    def _take_counts(self) -> list[int]:
        """Take over what the GPU has counted in steps since the last time: of each site the columns that were active.
        The host waits for them."""
        if not self._steps_counted:
            return [0] * len(self._counted)
        found = self._step.active.tolist()
        self._step.active.zero_()
        self._counted = [before + more for before, more in zip(self._counted, found, strict=True)]
        self._steps_counted = 0
        return found
