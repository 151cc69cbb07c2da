"""A decoder of models by neurons, whose resident neurons lie in slots of their own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.counts import HitCounts
from sparsepack.placement.links import HALVES, Links
from sparsepack.placement.ways import Ways
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.chained.operations import NeuronFfn, Operations
from sparsepack.runtime.hybrid.boundaries import Boundaries
from sparsepack.runtime.hybrid.measure import divided
from sparsepack.runtime.hybrid.mlps import DividedMlps
from sparsepack.runtime.hybrid.placing import links_of, placing_of
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions


class HybridDecoder(OperationsDecoder):
    """An `OperationsDecoder` on `DividedMlps`, and between tokens the policy.

    A text begins with the placement by the artifact's frequencies. After each token the policy sees who was active and
    says who has slots from then on; of a prompt it sees one token after the other when all have passed. The same text
    since a `reset` thus gives the same bits, with the same threads and links. `truncate` takes back no moves; after a
    call that was interrupted, slots and counts begin anew.

    operations -- of a backend on the CPU
    beside     -- given a number of threads, its `neuron_ffn` on threads of its own
    options    -- share, policy and links; `threads` are for both workers together, a half each and at least one
    measured   -- the links as they were measured on this machine for this model's records and these threads
    slow       -- the native `SlowPolicy`, for the policies that it knows; None: all run in numpy

    Raises `UserError` for a device other than the CPU.
    """

    def __init__(
        self,
        packed: PackedModel,
        operations: Operations,
        beside: Callable[[int], NeuronFfn],
        device: torch.device,
        context: int,
        cache_type: str | None,
        options: EngineOptions,
        measured: Links | None = None,
        slow: Callable[..., Any] | None = None,
    ) -> None:
        if device.type != "cpu":
            raise UserError(f"cached on device {device}: this backend's two workers share the CPU; use device cpu")
        first, second = divided(options.threads or torch.get_num_threads())
        self._plan = plan_of_share(parts_of(packed, context, cache_type or "f32"), options.cached or 0.0)
        self._placing = placing_of(packed, options, self._plan, slow)
        shape = self._placing.shape
        self._known = options.links or measured
        links, self._links = links_of(options, measured, ("equal", HALVES))
        hidden, slots = packed.architecture.hidden, self._plan.slots
        self._mlps = DividedMlps(operations, beside(second), shape, hidden, slots, links)
        self._boundaries = Boundaries(self._placing.follows, self._mlps, self._mlps.count_anew)
        super().__init__(packed, self._mlps, device, context, first, cache_type)
        self._both = first + second
        self.reset()

    @property
    def threads(self) -> int:
        return self._both

    @property
    def description(self) -> str:
        return f"{self.threads} threads in two workers, {self._placing.description}, {self._links}"

    @property
    def ways(self) -> Ways:
        traffic = replace(self._mlps.traffic, managed=self._boundaries.seconds)
        return Ways(traffic, self.hit_counts, self._plan, self._known)

    @property
    def hit_counts(self) -> HitCounts:
        return self._boundaries.counts

    def reset(self) -> None:
        super().reset()
        self._boundaries.begin_text()

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        self._boundaries.begin_pass()
        logits = super().prefill(sequence, ids)
        self._boundaries.passed(self._mlps.needed(), len(ids))
        return logits

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        self._boundaries.begin_pass()
        logits = super().step(ids, sparse)
        self._boundaries.passed(self._mlps.needed(), 0)
        return logits

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        self._boundaries.begin_pass()
        logits = super().teacher_forced(ids, sparse_from, sparse)
        self._boundaries.passed(self._mlps.needed(), sparse_from)
        return logits
