"""A decoder of models by neurons, whose resident neurons lie in slots of their own."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.models.records.sparse_attention import SparseFrom
from sparsepack.placement.counts import HitCounts
from sparsepack.placement.links import HALVES, Links
from sparsepack.placement.placement import budget_of
from sparsepack.placement.policies import POLICIES, Start
from sparsepack.placement.policy_run import PolicyRun
from sparsepack.runtime.hybrid.measure import divided
from sparsepack.runtime.hybrid.mlps import DividedMlps
from sparsepack.runtime.operations import NeuronFfn, Operations
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.options import DEFAULT_POLICY, EngineOptions
from sparsepack.runtime.sampling import Sampler


class HybridDecoder:
    """See `runtime.decoder.Decoder`: an `OperationsDecoder` on `DividedMlps`, and between tokens the policy.

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
        links = options.links or measured or HALVES
        self._links = "given" if options.links else "measured" if measured else "assumed equal"
        self._mlps = DividedMlps(operations, beside(second), shape, packed.architecture.hidden, self._count, links)
        self._decoder = OperationsDecoder(packed, self._mlps, device, context, first, cache_type)
        self.threads = first + second
        self._policy = None if options.begin else options.policy or DEFAULT_POLICY
        self._begin = options.begin or POLICIES[options.policy or DEFAULT_POLICY].begin
        self.reset()

    @property
    def description(self) -> str:
        name = f", {self._policy}" if self._policy else ""
        return (
            f"{self.threads} threads in two workers, {100 * self._cached:g} % of the neurons with slots{name}, "
            f"links {self._links}"
        )

    @property
    def served(self) -> HitCounts:
        """What decoded tokens needed."""
        return self._run.counts

    @property
    def resident(self) -> np.ndarray:
        """Who has slots now: bool [blocks, neurons], by the model's numbers."""
        return self._by_model(self._mlps.residency.resident)

    @property
    def sparse_from(self) -> SparseFrom | None:
        return self._decoder.sparse_from

    @property
    def cache_type(self) -> str:
        return self._decoder.cache_type

    @property
    def positions(self) -> tuple[int, ...]:
        return self._decoder.positions

    @property
    def stepped(self) -> int:
        return self._decoder.stepped

    def active(self) -> dict[tuple[int, str], int]:
        return self._decoder.active()

    def reset(self) -> None:
        self._decoder.reset()
        nothing = np.zeros((0, *self._frequency.shape), np.uint8)
        self._run = PolicyRun(self._begin, Start(self._frequency, self._count, nothing, prompt=0))
        self._mlps.place(self._as_stored(self._run.resident), anew=True)

    def truncate(self, sequence: int, length: int) -> None:
        self._decoder.truncate(sequence, length)

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.prefill(sequence, ids)
        self._token_boundary(prompt=len(ids))
        return logits

    def step(self, ids: Sequence[int], sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.step(ids, sparse)
        self._token_boundary(prompt=0)
        return logits

    def decode_next(self, ids: Sequence[int], sparse: bool, samplers: Sequence[Sampler]) -> list[int]:
        return [samplers[0].choose(self.step(ids, sparse)[0])]

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.teacher_forced(ids, sparse_from, sparse)
        self._token_boundary(prompt=sparse_from)
        return logits

    def _token_boundary(self, prompt: int) -> None:
        """Count what the positions of a pass needed, ask the policy, and move. `prompt`: of these, not decoded."""
        before = self._run.resident
        self._run.advance(map(self._by_model, self._mlps.needed()), prompt)
        if not np.array_equal(self._run.resident, before):
            self._mlps.place(self._as_stored(self._run.resident), anew=False)

    def _by_model(self, stored: np.ndarray) -> np.ndarray:
        """What is known of each neuron by the model's numbers, as in traces: policies break ties by these."""
        known = np.empty_like(stored)
        np.put_along_axis(known, self._order, stored, axis=1)
        return known

    def _as_stored(self, known: np.ndarray) -> np.ndarray:
        """The inverse of `_by_model`."""
        return np.take_along_axis(known, self._order, axis=1)
