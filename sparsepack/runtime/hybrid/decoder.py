"""A decoder of models by neurons, whose resident neurons lie in slots of their own."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.budget import plan_of_share
from sparsepack.placement.counts import HitCounts
from sparsepack.placement.division import Division, Traffic
from sparsepack.placement.links import HALVES, Links
from sparsepack.placement.placement import budget_of
from sparsepack.placement.policies import POLICIES, Start
from sparsepack.placement.policy_run import PolicyRun
from sparsepack.runtime.hybrid.measure import divided
from sparsepack.runtime.hybrid.mlps import DividedMlps
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.operations import NeuronFfn, Operations
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.options import DEFAULT_POLICY, EngineOptions


class HybridDecoder(OperationsDecoder):
    """An `OperationsDecoder` on `DividedMlps`, and between tokens the policy.

    A text begins with the placement by the artifact's frequencies. After each token the policy sees who was active and
    says who has slots from then on; of a prompt it sees one token after the other when all have passed. The same text
    since a `reset` thus gives the same bits, with the same threads and links. `truncate` takes back no moves.

    operations -- of a backend on the CPU
    beside     -- given a number of threads, its `neuron_ffn` on threads of its own
    options    -- share, policy and links; `threads` are for both workers together, a half each and at least one
    measured   -- the links as they were measured on this machine for this model's records and these threads

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
    ) -> None:
        mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
        if device.type != "cpu":
            raise UserError(f"cached on device {device}: two workers share the CPU so far; use device cpu")
        first, second = divided(options.threads or torch.get_num_threads())
        self._order = torch.stack([mlp.order for mlp in mlps]).numpy()
        self._frequency = self._by_model(torch.stack([mlp.frequency for mlp in mlps]).double().numpy())
        self._cached = options.cached or 0.0
        self._count = budget_of(self._cached, self._frequency)
        shape: tuple[int, int] = self._frequency.shape
        self._known = options.links or measured
        self._plan = plan_of_share(parts_of(packed, context, cache_type or "f32"), self._cached)
        links = self._known or HALVES
        self._links = "given" if options.links else "measured" if measured else "assumed equal"
        self._mlps = DividedMlps(operations, beside(second), shape, packed.architecture.hidden, self._count, links)
        super().__init__(packed, self._mlps, device, context, first, cache_type)
        self._both = first + second
        self._policy = None if options.begin else options.policy or DEFAULT_POLICY
        self._begin = options.begin or POLICIES[options.policy or DEFAULT_POLICY].begin
        self.reset()

    @property
    def threads(self) -> int:
        return self._both

    @property
    def description(self) -> str:
        name = f", {self._policy}" if self._policy else ""
        return (
            f"{self.threads} threads in two workers, {100 * self._cached:g} % of the neurons with slots{name}, "
            f"links {self._links}"
        )

    @property
    def division(self) -> Division:
        return Division(self._mlps.traffic, self._plan, self._known)

    @property
    def hit_counts(self) -> HitCounts:
        return self._moves.counts

    def reset(self) -> None:
        super().reset()
        nothing = np.zeros((0, *self._frequency.shape), np.uint8)
        self._mlps.traffic = Traffic()
        self._moves = PolicyRun(self._begin, Start(self._frequency, self._count, nothing, prompt=0))
        self._mlps.place(self._as_stored(self._moves.resident), anew=True)

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        self._mlps.forget()
        logits = super().prefill(sequence, ids)
        self._token_boundary(prompt=len(ids))
        return logits

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = super().step(ids, sparse)
        self._token_boundary(prompt=0)
        return logits

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = super().teacher_forced(ids, sparse_from, sparse)
        self._token_boundary(prompt=sparse_from)
        return logits

    def _token_boundary(self, prompt: int) -> None:
        """Count what the positions of a pass needed, the first `prompt` of them not decoded; ask the policy; move."""
        before = self._moves.resident
        self._moves.advance(map(self._by_model, self._mlps.needed()), prompt)
        if not np.array_equal(self._moves.resident, before):
            self._mlps.place(self._as_stored(self._moves.resident), anew=False)

    def _by_model(self, stored: np.ndarray) -> np.ndarray:
        """Values of the neurons in the model's order, as traces have them: policies break ties by it."""
        known = np.empty_like(stored)
        np.put_along_axis(known, self._order, stored, axis=1)
        return known

    def _as_stored(self, known: np.ndarray) -> np.ndarray:
        """Values of the neurons in the order in which they are stored: the inverse of `_by_model`."""
        return np.take_along_axis(known, self._order, axis=1)
