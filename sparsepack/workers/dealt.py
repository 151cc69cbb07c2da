"""How windows of text are dealt to workers: in parts that are the same for every number of workers.

    part 0        part 1        part 2        part 3
    |-- size --|  |-- size --|  |-- size --|  |-- rest --|         of `rows` rows
    worker 0      worker 1      worker 0      worker 1             of two workers

A part is one batch, of what is run at one time, or several. In round r the workers have the parts r * count ... of
them, in their order: what is found there is added in the order of the workers, so all together in the order of the
parts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import WorkersError
from sparsepack.workers import PARTS
from sparsepack.workers.workers import Workers


@dataclass(frozen=True)
class Dealt:
    """Rows of tensors, dealt to workers.

    batch   -- rows that are run at one time
    batches -- batches in a part
    """

    workers: Workers
    rows: int
    batch: int
    batches: int = 1

    @classmethod
    def for_sums(cls, workers: Workers, rows: int, batch: int) -> "Dealt":
        """Rows in `PARTS` parts at most, whatever the number of workers: what is summed over a part is exchanged, not
        what is found in each batch."""
        return cls(workers, rows, batch, max(1, -(-rows // (batch * PARTS))))

    @property
    def size(self) -> int:
        """Rows in a part."""
        return self.batch * self.batches

    @property
    def runs(self) -> int:
        """How many batches there are."""
        return -(-self.rows // self.batch)

    @property
    def own_runs(self) -> int:
        """How many batches this worker has; the first one has the most."""
        return sum(self._runs(part) for part in self._of(self.workers.number))

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.rows // self.size)

    @property
    def own_rounds(self) -> int:
        """How many parts this worker has."""
        return len(self._of(self.workers.number))

    @property
    def rounds(self) -> int:
        """How many parts the first worker has, of whom none has more."""
        return -(-self.parts // self.workers.count)

    def check(self, option: str) -> None:
        """Raise `WorkersError` where a worker would have nothing to do.

        option -- the one that says how many windows there are
        """
        if self.workers.count > self.parts:
            kind = "batches" if self.batches == 1 else "parts"
            more = f", or give more {option} or a smaller --batch" if self.parts < PARTS else ""
            raise WorkersError(
                f"{self.workers.count} workers for {self.parts} {kind} of {self.size} windows: some would be idle; "
                f"start {self.parts} at most{more}"
            )

    def having(self, round: int) -> int:
        """How many workers have a part in a round: so many of the first ones."""
        return min(self.workers.count, self.parts - round * self.workers.count)

    def after_each(
        self, run: Callable[[int], object], part_done: Callable[[int], object] | None = None
    ) -> Callable[[], None]:
        """A function to call after each of this worker's batches, which calls `run` with how many workers have run one
        meanwhile, and before that, after the last batch of a part, `part_done` with how many have such a part. A
        worker that has none in the last round calls that in it, too."""

        def all_of_them() -> Iterator[None]:
            for round in range(self.own_rounds):
                there = [self._runs(round * self.workers.count + worker) for worker in range(self.having(round))]
                last = there[self.workers.number]
                for number in range(1, last + 1):
                    if part_done is not None and number == last:
                        part_done(len(there))
                        if round + 2 == self.rounds and round + 1 == self.own_rounds:
                            part_done(self.having(round + 1))
                    run(sum(runs >= number for runs in there))
                    yield

        each = all_of_them()
        return lambda: next(each)

    def own(self, whole: Tensor) -> Tensor:
        """This worker's rows of a tensor [rows, ...], in their order."""
        if self.workers.count == 1:
            return whole
        return torch.cat([whole[self._at(part)] for part in self._of(self.workers.number)])

    def gathered(self, own: Tensor) -> Tensor | None:
        """The tensor [rows, ...] of which every worker gives its own rows, at the first worker; elsewhere None."""
        workers = self.workers
        if workers.count == 1:
            return own
        own = own.cpu()  # workers' rows may lie on GPUs or not
        if not workers.first:
            workers.send(own, 0)
            return None
        whole = torch.empty(self.rows, *own.shape[1:], dtype=own.dtype)
        self._place(whole, own, 0)
        for other in range(1, workers.count):
            self._place(whole, workers.received(own.new_empty(self._rows(other), *own.shape[1:]), other), other)
        return whole

    def scattered(self, whole: Tensor | None) -> Tensor | None:
        """This worker's rows of a tensor [rows, ...] that the first worker has; None where it has none."""
        workers = self.workers
        if workers.count == 1:
            return whole
        kind = workers.told_by_first(None if whole is None else [list(whole.shape[1:]), str(whole.dtype)])
        if kind is None:
            return None
        if workers.first:
            assert whole is not None
            for other in range(1, workers.count):
                workers.send(torch.cat([whole[self._at(part)] for part in self._of(other)]), other)
            return self.own(whole)
        shape, dtype = kind
        mine = torch.empty(self._rows(workers.number), *shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        return workers.received(mine, 0)

    def _of(self, worker: int) -> range:
        return range(worker, self.parts, self.workers.count)

    def _at(self, part: int) -> slice:
        return slice(part * self.size, min((part + 1) * self.size, self.rows))

    def _runs(self, part: int) -> int:
        return -(-min(self.size, self.rows - part * self.size) // self.batch)

    def _rows(self, worker: int) -> int:
        return sum(self._at(part).stop - self._at(part).start for part in self._of(worker))

    def _place(self, whole: Tensor, own: Tensor, worker: int) -> None:
        for part, rows in zip(self._of(worker), torch.split(own, self.size), strict=True):
            whole[self._at(part)] = rows
