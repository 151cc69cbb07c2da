"""The choice of one sequence's next token on the device, and the step after it, which does not wait for the host."""

import math

import torch
from torch import Tensor

from sparsepack.runtime.cuda.decoder.step import Step, state_parts
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.generation.sampling import Sampler, Sampling, not_finite

MOST_SAMPLERS = 8
"""The graphs of at most this many ways of sampling are kept."""


class RunAhead:
    """The work of a decoder of one sequence between two steps: most callers append the token that was chosen, so that
    its step begins before the host has read the token.

    step   -- whose logits are chosen from
    stream -- where graphs are captured
    """

    def __init__(self, step: Step, kernels: Kernels, stream: torch.cuda.Stream) -> None:
        self._step, self._kernels, self._stream = step, kernels, stream
        self._sampling_memory = kernels.new_graph_pool()
        self._draw = torch.zeros((), dtype=torch.float64, device=step.logits.device)
        # What a step left, as the host has it.
        self._state = kernels.host_memory(step.state)
        self._active, self._chosen, self._best, self._lasting = state_parts(self._state, 1)
        self._brought = kernels.new_event()
        self._samplers: dict[tuple[float, int | None, float | None], torch.cuda.CUDAGraph] = {}
        # The step that has begun: its token (None until the host has read it) and whether it is sparse.
        self._begun: tuple[int | None, bool] | None = None

    @property
    def running(self) -> bool:
        """Whether a step runs that nobody has asked for yet."""
        return self._begun is not None

    @property
    def active(self) -> Tensor:
        """What `Step.active` was before the step that has begun, as the host has it."""
        return self._active

    @property
    def scales(self) -> tuple[float, ...]:
        """What thresholds were multiplied by in the step that has begun."""
        return tuple(self._lasting[0].tolist())

    def continues(self, id: int, sparse: bool) -> bool:
        """Whether the step that is asked for has begun already. If so, the step no longer counts as ahead."""
        if self._begun != (id, sparse):
            return False
        self._begun = None
        return True

    def undo(self) -> None:
        """Take back what the step that has begun counted, and what it holds."""
        self._begun = None
        self._step.active.copy_(self._active.view_as(self._step.active), non_blocking=True)
        self._step.lasting.copy_(self._lasting, non_blocking=True)

    def choose(self, sampler: Sampler, sparse: bool, following: torch.cuda.CUDAGraph | None) -> int:
        """The token that a sampler chooses from the step's logits.

        following -- the step that appends the token, to begin at once; None: it begins when it is asked for
        sparse    -- whether it is
        """
        how = sampler.sampling
        if how.temperature:
            self._draw.fill_(sampler.draw())
            self._kernels.replay(self._sampler(how))
        self._state.copy_(self._step.state, non_blocking=True)
        self._brought.record()
        if following:
            self._begun = (None, sparse)
            self._kernels.replay(following)
        self._brought.synchronize()
        best = float(self._best)
        if not math.isfinite(best):
            raise not_finite(best)
        chosen = int(self._chosen)
        if following:
            self._begun = (chosen, sparse)
        return chosen

    def _sampler(self, how: Sampling) -> torch.cuda.CUDAGraph:
        """The graph that chooses a token other than the likeliest from a step's logits and the draw."""
        key = (how.temperature, how.top_k, how.top_p)
        if key not in self._samplers:

            def choose() -> None:
                self._step.ids.copy_(self._kernels.sample(self._step.logits[0], self._draw, *key))

            if len(self._samplers) == MOST_SAMPLERS:
                del self._samplers[next(iter(self._samplers))]
            self._samplers[key] = self._kernels.capture_graph(choose, self._stream, self._sampling_memory)
        return self._samplers[key]
