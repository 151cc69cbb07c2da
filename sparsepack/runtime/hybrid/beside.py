"""A decoder on a GPU with the processor beside it: the steps of both sides."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats import packed as stored
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import MACHINES, BandwidthProfile
from sparsepack.progress import format_count
from sparsepack.runtime.cuda.attention.kv_cache import NewCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp
from sparsepack.runtime.cuda.decoder.sites import CudaSite
from sparsepack.runtime.cuda.driver.host_memory import Place
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.hybrid.handover import HandOver, next_number

ASSUMED = "pcie5"
"""Nothing was measured: the machine is taken for this one of `placement.machine.MACHINES`, whose bus is as fast as
large copies are."""
RECORDS_OVER_THE_BUS = 0.85
"""Kernels read records over the bus at this share of the speed of large copies: measured on an H200
(benchmarks/RESULTS.md)."""
MATRICES_OVER_THE_BUS = 0.9
"""Products read matrices over the bus at this share, likewise."""

Result = TypeVar("Result")


class Processor(Protocol):
    """What computes beside the GPU: `runtime/cpu/operations.py`."""

    def load_neurons(self, records: PackedMatrix) -> Any: ...

    def load_zigzag(self, matrix: PackedMatrix) -> Any: ...

    def load_gates(self, gates: PackedMatrix) -> Any: ...

    def cold_worker(
        self,
        records: Sequence[Any],
        memory: np.ndarray,
        layout: HandOver,
        threads: int | None = None,
        *,
        products: Sequence[Any] = (),
        gates: Sequence[Any] = (),
    ) -> Any: ...


class Shared(Protocol):
    """What the parts of a model share with the processor.

    layout, memory -- the hand-over, as the processor sees it
    """

    layout: HandOver
    memory: np.ndarray

    def load_mlp(
        self, mlp: stored.Mlp, device: torch.device, kernels: Kernels, place: Place, of_down: Place
    ) -> CudaMlp:
        """The next block's MLP."""

    def load_attention(
        self, sites: Mapping[str, stored.PackedSite], device: torch.device, kernels: Kernels, place: Place
    ) -> Mapping[str, CudaSite]:
        """The sites of the next block's attention."""

    def begin_text(self, number: int) -> None:
        """Count anew; the step that ran last has this number. No step may run."""

    def keep_traffic(self) -> Tensor:
        """What `forget_step` takes to forget the next step."""

    def forget_step(self, traffic: Tensor) -> None:
        """The step that ran last was none of the text."""


class CudaBesideDecoder(CudaDecoder):
    """A `CudaDecoder` whose steps ask the processor for what lies in the host's memory.

    A step begins when the one before has ended on both sides.

    shared     -- what the model's parts share with the processor
    load_mlp   -- loads a block's MLP: `shared.load_mlp`, or what calls it
    new_worker -- makes the processor's side, when the model is loaded
    texts      -- of a step

    Raises `UserError` as `CudaDecoder`, and where the host has no memory to be pinned.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        texts: int,
        cache_type: str,
        kernels: Kernels,
        new_cache: NewCache,
        plan: Plan,
        shared: Shared,
        load_mlp: Callable[..., CudaMlp],
        new_worker: Callable[[], Any],
    ) -> None:
        self._shared, self._texts, self._plan = shared, texts, plan
        super().__init__(
            packed,
            device,
            context,
            texts,
            cache_type,
            kernels,
            new_cache,
            load_mlp,
            runs_ahead=False,
            plan=plan,
            load_attention=shared.load_attention,
        )
        self._worker = new_worker()
        self._number = 0  # of the step that ran last

    @property
    def threads(self) -> int:
        return int(self._worker.threads)

    @property
    def description(self) -> str:
        return f"{super().description}, {format_count(self.threads, 'thread')} beside it"

    def _count_anew(self) -> None:
        self._kernels.synchronize(self._device)  # should a step have been interrupted
        self._shared.begin_text(self._number)

    def _make_graph(self, sparse: bool) -> torch.cuda.CUDAGraph:
        traffic = self._shared.keep_traffic()
        graph = self._answered(partial(super()._make_graph, sparse))
        self._shared.forget_step(traffic)
        return graph

    def _begin(self, ids: list[int], sparse: bool) -> None:
        if self._graph(sparse) is None:
            self._make_graph(sparse)
        self._answered(lambda: self._run_step(ids, sparse))

    def _run_step(self, ids: list[int], sparse: bool) -> None:
        """Put a step on the current stream, and do what can be done meanwhile."""
        super()._begin(ids, sparse)

    def _answered(self, run: Callable[[], Result]) -> Result:
        """Run a step, once, and wait until both sides have ended it."""
        self._number = next_number(self._number)
        try:
            self._of_worker(lambda number: self._worker.begin(number, self._texts))
            result = run()
            # First the GPU, which waits for the worker within a limit: what a kernel did wrong is raised at once, where
            # the worker would wait for a request that never comes. Copies for moves may go on.
            self._kernels.wait_for_step()
            self._of_worker(self._worker.end)
            return result
        except BaseException:
            with suppress(RuntimeError):
                self._kernels.synchronize(self._device)
            raise

    def _of_worker(self, call: Callable[[int], None]) -> None:
        try:
            call(self._number)
        except RuntimeError as error:
            raise UserError(f"the processor beside the GPU: {error}") from error


def assumed_links(record: int) -> BandwidthProfile:
    """The links where none were measured, for records of so many bytes."""
    links = MACHINES[ASSUMED].rates(record).links
    return replace(links, bus=RECORDS_OVER_THE_BUS * links.bus, far_bus=MATRICES_OVER_THE_BUS * links.far_bus)
