"""What one process does of a piece of work: its share of the windows of text, what it exchanges with the others that do
the rest, and the state from which a run goes on that was killed.

Windows are dealt in parts that are the same for every number of workers.

    part 0        part 1        part 2        part 3
    |-- size --|  |-- size --|  |-- size --|  |-- rest --|         of `rows` rows
    worker 0      worker 1      worker 0      worker 1             of two workers

A part is one batch, of what is run at one time, or several. In round r the workers have the parts r * world_size ... of
them, in their order: what is found there is added in the order of the workers, so all together in the order of the
parts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import WorkersError
from sparsepack.files.side_files import make_folder
from sparsepack.progress import EVERY, Advance, Shorter, progress, say
from sparsepack.workers import PARTS
from sparsepack.workers.exchange import Exchange
from sparsepack.workers.state import BLOCKS, State, state_beside

BEHIND = 4
"""What so many blocks have found is kept behind the run: of some it is more than can be written while one is run."""


@dataclass
class Shard(Exchange):
    """A worker's share of rows, such as windows, and the state of its run.

    rows    -- of all workers
    batch   -- rows that are run at one time
    batches -- batches in a part
    folder  -- where states are kept; None: nowhere
    device  -- where this worker computes
    state   -- of the run; the first worker keeps it and tells the others its values. Hidden states are those of all
               windows, so another number of workers may go on
    """

    rows: int = 0
    batch: int = 1
    batches: int = 1
    folder: Path | None = None
    device: str = "cpu"
    state: State = field(default_factory=lambda: State(None, ""))
    _before_commit: Callable[[], object] | None = None
    _after: dict[str, tuple[Mapping[str, Tensor], bool]] = field(default_factory=dict)  # the block at hand, by name
    _thread: Executor | None = None  # keeps what blocks have found
    _behind: deque[Future[None]] = field(default_factory=deque)

    def split(self, rows: int, batch: int, batches: int = 1) -> "Shard":
        """This worker's share of other rows."""
        return replace(self, rows=rows, batch=batch, batches=batches)

    def split_for_sums(self, rows: int, batch: int) -> "Shard":
        """Its share of rows in `PARTS` parts at most, whatever the number of workers: what is summed over a part is
        exchanged, not what is found in each batch."""
        return self.split(rows, batch, max(1, -(-rows // (batch * PARTS))))

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
        return sum(self._runs(part) for part in self._of(self.rank))

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.rows // self.size)

    @property
    def own_rounds(self) -> int:
        """How many parts this worker has."""
        return len(self._of(self.rank))

    @property
    def rounds(self) -> int:
        """How many parts the first worker has, of whom none has more."""
        return -(-self.parts // self.world_size)

    def check(self, option: str) -> None:
        """Raise `WorkersError` where a worker would have nothing to do.

        option -- the one that says how many windows there are
        """
        if self.world_size > self.parts:
            kind = "batches" if self.batches == 1 else "parts"
            more = f", or give more {option} or a smaller --batch" if self.parts < PARTS else ""
            raise WorkersError(
                f"{self.world_size} workers for {self.parts} {kind} of {self.size} windows: some would be idle; "
                f"start {self.parts} at most{more}"
            )

    def having(self, round: int) -> int:
        """How many workers have a part in a round: so many of the first ones."""
        return min(self.world_size, self.parts - round * self.world_size)

    def after_each(
        self, run: Callable[[int], object], part_done: Callable[[int], object] | None = None
    ) -> Callable[[], None]:
        """A function to call after each of this worker's batches, which calls `run` with how many workers have run one
        meanwhile, and before that, after the last batch of a part, `part_done` with how many have such a part. A
        worker that has none in the last round calls that in it, too."""

        def all_of_them() -> Iterator[None]:
            for round in range(self.own_rounds):
                there = [self._runs(round * self.world_size + worker) for worker in range(self.having(round))]
                last = there[self.rank]
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
        if self.world_size == 1:
            return whole
        return torch.cat([whole[self._at(part)] for part in self._of(self.rank)])

    def gather(self, own: Tensor) -> Tensor | None:
        """The tensor [rows, ...] of which every worker gives its own rows, at the first worker; elsewhere None."""
        if self.world_size == 1:
            return own
        own = own.cpu()  # workers' rows may lie on GPUs or not
        if not self.first:
            self.send([own], 0)
            return None
        whole = torch.empty(self.rows, *own.shape[1:], dtype=own.dtype)
        for other in range(self.world_size):
            theirs = own
            if other != 0:
                theirs = own.new_empty(self._rows(other), *own.shape[1:])
                self.receive([theirs], other)
            for part, found in zip(self._of(other), torch.split(theirs, self.size), strict=True):
                whole[self._at(part)] = found
        return whole

    def all_gather_rows(self, own: Tensor) -> Tensor:
        """The tensor [rows, ...] of which every worker gives its own rows, at all of them."""
        whole = self.gather(own)
        return self.broadcast_tensors({} if whole is None else {"": whole})[""]

    def scatter(self, whole: Tensor | None) -> Tensor | None:
        """This worker's rows of a tensor [rows, ...] that the first worker has; None where it has none."""
        if self.world_size == 1:
            return whole
        kind = self.broadcast(None if whole is None else [list(whole.shape[1:]), str(whole.dtype)])
        if kind is None:
            return None
        if self.first:
            assert whole is not None
            for other in range(1, self.world_size):
                self.send([torch.cat([whole[self._at(part)] for part in self._of(other)])], other)
            return self.own(whole)
        shape, dtype = kind
        mine = torch.empty(self._rows(self.rank), *shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        self.receive([mine], 0)
        return mine

    def _of(self, worker: int) -> range:
        return range(worker, self.parts, self.world_size)

    def _at(self, part: int) -> slice:
        return slice(part * self.size, min((part + 1) * self.size, self.rows))

    def _runs(self, part: int) -> int:
        return -(-min(self.size, self.rows - part * self.size) // self.batch)

    def _rows(self, worker: int) -> int:
        return sum(self._at(part).stop - self._at(part).start for part in self._of(worker))

    @contextmanager
    def saved_beside(self, output: Path) -> Iterator["Shard"]:
        """Within the context states are kept in the folder of `state_beside`, by the first worker alone."""
        with state_beside(output) if self.first else nullcontext() as folder:
            yield replace(self, folder=folder)

    def resume(
        self,
        fingerprint: str | Callable[[], str],
        layers: int | None = None,
        before_commit: Callable[[], object] | None = None,
        within: str = "",
    ) -> "Shard":
        """Go on from the state of a run, if there is one.

        fingerprint, layers -- see `State`
        before_commit       -- called by all workers before a block is committed first
        within              -- a folder for this state within that of the run

        Raises `OutputError` where the disk refuses the state.
        """
        path = self.folder if self.first else None
        if path is not None and within:
            make_folder(path)
        state = State(path and path / within, fingerprint, layers)
        state.parts = self.broadcast(state.parts)
        return replace(self, state=state, _before_commit=before_commit, _after={}, _behind=deque())

    @contextmanager
    def blocks(
        self,
        label: str,
        steps: int = 1,
        first: int = 1,
        shorter: Shorter | None = None,
        bound: Callable[[float, float], str] | None = None,
    ) -> Iterator[tuple[range, Advance]]:
        """Yield the decoder blocks that are not finished, and what reports a step of the work on one. The work is done
        within the context, and what is found is kept on a thread of its own.

        steps -- of each block; first, shorter -- see `progress`
        bound -- says from its seconds, and those of saving, what bounded work that took long
        """
        began, layers = time.perf_counter(), self.state.layers or 0
        with (
            progress(label, layers * steps, self.done * steps, first, shorter) as advance,
            ThreadPoolExecutor(1, "finished-blocks") as thread,
        ):
            self._thread = thread
            yield range(self.done, layers), advance
            self.wait()
        self._thread = None
        seconds = time.perf_counter() - began
        if bound is not None and seconds >= EVERY:
            say(f"{label}: {bound(seconds, self.state.seconds)}")

    @property
    def done(self) -> int:
        """How many decoder blocks are finished."""
        return int(self.state.parts.get(BLOCKS, {}).get("done", 0))

    def value(self, name: str, otherwise: Any = None) -> Any:
        """A value that was committed with the last finished block."""
        return self.state.parts.get(BLOCKS, {}).get(name, otherwise)

    def block(self, layer: int) -> dict[str, Tensor]:
        """What was found at one finished decoder block, at the first worker; nothing where nothing was."""
        return self.state.kept(f"block-{layer:05}")

    def kept_after(self, name: str) -> dict[str, Tensor]:
        """What `keep_after` has kept after the last finished block, at the first worker."""
        return self.state.kept(f"{name}-{self.done:05}")

    def hidden(self) -> Tensor | None:
        """The hidden states after the last finished block, if there is one: this worker's rows, or where none are dealt
        all of them."""
        whole = self.state.load(f"hidden-{self.done:05}") if self.done and self.first else {}
        return self.scatter(whole.get("hidden")) if self.rows else self.broadcast_tensors(whole).get("hidden")

    def begin_blocks(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Commit tensors with which every decoder block is made, before the first one is."""
        self.keep_with_blocks(name, tensors)
        self.state.commit(BLOCKS, done=0)

    def keep_with_blocks(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that count from the next `save_block` on; should they be lost, all blocks are made anew."""
        self.state.keep(BLOCKS, name, tensors)

    def keep_behind(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """`keep_with_blocks` of tensors that stay as they are, within `blocks` while the run goes on."""
        assert self._thread is not None
        self._behind.append(self._thread.submit(self.keep_with_blocks, name, tensors))

    def keep_after(self, name: str, tensors: Mapping[str, Tensor], dealt: bool = False) -> None:
        """Keep tensors that belong to the end of the block that is being finished, if there are any, in place of those
        kept under this name before, from the next `save_block` on that commits.

        dealt -- whether each worker has its own rows of them; else the first one has all
        """
        self._after[name] = tensors, dealt
        self.state.expect((self.world_size if dealt else 1) * sum(value.nbytes for value in tensors.values()))

    @property
    def stale(self) -> bool:
        """Whether another state is worth its time, as the first worker says."""
        return bool(self.broadcast(self.state.stale))

    def save_block(
        self,
        layer: int,
        found: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]],
        hidden: Tensor | None = None,
        **values: Any,
    ) -> None:
        """Keep a finished block - tensors found there, or what gives them, and values - and the hidden states after it
        where the run needs them: this worker's rows, or where none are dealt the first one's.

        It is committed now and then, and the last one always: a run that was killed goes on after the last one that
        was. Within `blocks`, tensors are kept while the run goes on, of `BEHIND` blocks at most.
        """
        with self.state.timed():
            if self._thread is not None:
                self.wait(BEHIND - 1)
                self._behind.append(self._thread.submit(self._keep_found, layer, found))
            else:
                self._keep_found(layer, found)
            if hidden is not None:
                self.keep_after("hidden", {"hidden": hidden}, dealt=self.rows > 0)
            if self.broadcast(layer + 1 == self.state.layers or self.state.stale):
                if self._before_commit is not None:
                    self._before_commit()
                    self._before_commit = None
                self.wait()
                for name, (tensors, dealt) in self._after.items():
                    whole = {key: self.gather(value) if dealt else value for key, value in tensors.items()}
                    if whole and self.first:
                        self.keep_with_blocks(
                            f"{name}-{layer + 1:05}", {key: value for key, value in whole.items() if value is not None}
                        )
                    self.state.drop(f"{name}-{self.done:05}")
                self.state.commit(BLOCKS, done=layer + 1, **values)
            self._after.clear()

    def _keep_found(self, layer: int, found: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]) -> None:
        if tensors := found() if callable(found) else found:
            self.keep_with_blocks(f"block-{layer:05}", tensors)

    def wait(self, left: int = 0) -> None:
        """Wait until all blocks that were saved are kept but so many. Raises what keeping one raised."""
        while len(self._behind) > left:
            self._behind.popleft().result()


ALONE = Shard()
"""One process that does all of the work. `resume` gives each run a state of its own."""
