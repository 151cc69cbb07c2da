"""A decoder of models by neurons, whose hot neurons lie in places of their own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel
from sparsepack.placement.placement import budget_of
from sparsepack.placement.policies import POLICIES, Policy, Start
from sparsepack.runtime.hybrid.measure import divided
from sparsepack.runtime.hybrid.mlps import DividedMlps
from sparsepack.runtime.hybrid.options import PlacesOptions
from sparsepack.runtime.hybrid.served import Served
from sparsepack.runtime.hybrid.split import HALVES, Links
from sparsepack.runtime.operations import NeuronFfn, Operations
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.sampling import Sampler


@dataclass(frozen=True)
class Places:
    """How many neurons have places, what moves them, and how fast the links are.

    cached -- share of the neurons of all blocks
    policy -- a name in `placement.names.ONLINE`, or a policy
    links  -- None: as measured on this machine, or else `HALVES`
    """

    cached: float
    policy: str | Policy = "slow"
    links: Links | None = None


def places_of(options: PlacesOptions | None) -> Places | None:
    """What was asked for; None: no neuron has a place of its own."""
    return None if options is None or options.cached is None else Places(options.cached, options.mover)


class HybridDecoder:
    """See `runtime.decoder.Decoder`: an `OperationsDecoder` on `DividedMlps`, and between tokens the policy.

    A text begins with the placement by the artifact's frequencies. After each token the policy sees who was active and
    says who has places from then on; of a prompt it sees one token after the other when all have passed. The same text
    since a `reset` thus gives the same bits, with the same threads and links. `truncate` takes back no moves.

    operations -- of a backend on the CPU
    beside     -- given a number of threads, its `neuron_ffn` on threads of its own
    threads    -- for both workers together, a half each and at least one
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
        threads: int | None,
        cache_type: str | None,
        places: Places,
        measured: Links | None = None,
    ) -> None:
        neurons = [layer.neurons for layer in packed.layers if layer.neurons is not None]
        if device.type != "cpu":
            raise UserError(f"cached on device {device}: two workers share the CPU so far; use device cpu")
        first, second = divided(threads or torch.get_num_threads())
        self._order = torch.stack([block.order for block in neurons]).numpy()
        self._frequency = self._by_model(torch.stack([block.frequency for block in neurons]).double().numpy())
        self._count = budget_of(places.cached, self._frequency)
        shape: tuple[int, int] = self._frequency.shape
        links = places.links or measured or HALVES
        self._links = "given" if places.links else "measured" if measured else "assumed equal"
        self._mlps = DividedMlps(operations, beside(second), shape, packed.architecture.hidden, self._count, links)
        self._decoder = OperationsDecoder(packed, self._mlps, device, context, first, cache_type)
        self._places, self.threads = places, first + second
        self._begin = POLICIES[places.policy].begin if isinstance(places.policy, str) else places.policy
        self.reset()

    @property
    def description(self) -> str:
        name = f", {self._places.policy}" if isinstance(self._places.policy, str) else ""
        return (
            f"{self.threads} threads in two workers, {100 * self._places.cached:g} % of the neurons with places{name}, "
            f"links {self._links}"
        )

    @property
    def served(self) -> Served:
        """What decoded tokens needed."""
        return self._served

    @property
    def resident(self) -> np.ndarray:
        """Who has places now: bool [blocks, neurons], by the model's numbers."""
        return self._by_model(self._mlps.residency.resident)

    @property
    def attention_from(self) -> int | None:
        return self._decoder.attention_from

    @property
    def cache_type(self) -> str:
        return self._decoder.cache_type

    @property
    def position(self) -> int:
        return self._decoder.position

    @property
    def stepped(self) -> int:
        return self._decoder.stepped

    def active(self) -> dict[tuple[int, str], int]:
        return self._decoder.active()

    def reset(self) -> None:
        self._decoder.reset()
        nothing = np.zeros((0, *self._frequency.shape), np.uint8)
        placement, self._move = self._begin(Start(self._frequency, self._count, nothing, prompt=0))
        self._mlps.place(self._as_stored(placement.resident), anew=True)
        self._served, self._seen = Served(), 0

    def truncate(self, length: int) -> None:
        self._decoder.truncate(length)

    def prefill(self, ids: Tensor) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.prefill(ids)
        self._token_boundary(prompt=len(ids))
        return logits

    def step(self, id: int, sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.step(id, sparse)
        self._token_boundary(prompt=0)
        return logits

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        return sampler.choose(self.step(id, sparse))

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        self._mlps.forget()
        logits = self._decoder.teacher_forced(ids, sparse_from, sparse)
        self._token_boundary(prompt=sparse_from)
        return logits

    def _token_boundary(self, prompt: int) -> None:
        """Count what the positions of a pass needed, ask the policy, and move. `prompt`: of these, not decoded."""
        before = self.resident
        resident, now = before, self._served
        tokens, needed, hits, moves = now.tokens, now.needed, now.hits, now.moves
        for number, row in enumerate(map(self._by_model, self._mlps.needed())):
            decoded = number >= prompt
            if decoded:
                tokens += 1
                needed += int(np.count_nonzero(row))
                hits += int(np.count_nonzero(row[resident]))
            if self._move is not None:
                after = self._move(self._seen, row, resident)
                moves += int(np.count_nonzero(after & ~resident)) if decoded else 0
                resident = after
            self._seen += 1
        self._served = Served(tokens, needed, hits, moves)
        if not np.array_equal(resident, before):
            self._mlps.place(self._as_stored(resident), anew=False)

    def _by_model(self, stored: np.ndarray) -> np.ndarray:
        """What is known of each neuron by the model's numbers, as in traces: policies break ties by these."""
        known = np.empty_like(stored)
        np.put_along_axis(known, self._order, stored, axis=1)
        return known

    def _as_stored(self, known: np.ndarray) -> np.ndarray:
        """The inverse of `_by_model`."""
        return np.take_along_axis(known, self._order, axis=1)
