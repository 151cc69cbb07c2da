"""A process finds the other workers: as torchrun, or `sparsepack ... --devices`, started them.

Both say who they are in the environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, LOCAL_RANK and
LOCAL_WORLD_SIZE.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError, WorkerLost, WorkersError
from sparsepack.files.hashing import combine_digests, sha256_bytes
from sparsepack.progress import be_quiet, say
from sparsepack.version import __version__
from sparsepack.workers.alive import signs_of_life, store_answers
from sparsepack.workers.exchange import LIMIT
from sparsepack.workers.launch import (
    LAUNCHED,
    missing,
    number_here,
    several,
    several_machines,
    worker_number,
    workers_count,
)
from sparsepack.workers.shard import Shard

JOIN = 120.0
"""All workers must have come within so many seconds of the first."""

_VALUE = 1 << 20  # a store of torch.distributed takes values of 8 MiB at most: libuv's MAX_PAYLOAD_LEN


@contextmanager
def joined(device: str = "cpu") -> Iterator[Shard]:
    """What this process does of the work, until it is done: all of it, where it was not started as one of several
    workers. Only the first worker tells how it goes on.

    device -- where this one computes, `Shard.device` then has the index of its GPU; where each has a GPU of its own,
              they exchange tensors from GPU to GPU

    An error that leaves the context is told to the others, which then end, too. Raises `WorkersError` where workers
    are missing or have other versions.
    """
    if not several():
        yield Shard(device=device)
        return
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    if names := missing():
        raise WorkersError(
            f"WORLD_SIZE says that there are {workers_count()} workers, but {', '.join(names)} are not set; start them "
            "by torchrun or --devices, or unset WORLD_SIZE"
        )
    if device == "cuda":
        device = f"cuda:{number_here() % torch.cuda.device_count()}"
    if device.startswith("mps") and not os.environ.get(LAUNCHED):
        raise WorkersError("--device mps: a machine has one; run this command without torchrun")
    number, count = worker_number(), workers_count()
    if distributed.is_initialized():
        raise WorkersError(
            "this process has a group of torch.distributed already, which may not be one that sends tensors of the "
            "CPU; call destroy_process_group() before"
        )
    if number not in range(count):
        raise WorkersError(
            f"RANK is {os.environ['RANK']!r}: expected the number of this worker, from 0 to {count - 1}; start the "
            "workers by torchrun or --devices"
        )
    try:
        store = next(iter(rendezvous("env://", number, count, timeout=timedelta(seconds=JOIN))))[0]
    except (RuntimeError, ValueError, KeyError) as error:
        raise _nobody(error) from error
    store.set_timeout(timedelta(seconds=LIMIT))
    link = _Link(c10d.PrefixStore("sparsepack", store))
    other = _Link(c10d.PrefixStore("sparsepack", store.clone()))
    with ExitStack() as stack:
        stack.enter_context(store_answers(f"worker 0 of {count} (whose store is at {_address()})", [link, other]))
        link.set(f"here/{number}", json.dumps(f"worker {number} of {count} on {socket.gethostname()}"))
        shard = Shard(number, count, link, _names(link, number, count), device=device)
        stack.enter_context(signs_of_life(shard, other))
        try:
            shard.agree(_versions())
            shard.gpu = _own_gpu(shard, device)
            try:
                distributed.init_process_group(
                    "gloo" if shard.gpu is None else "cpu:gloo,cuda:nccl",
                    store=c10d.PrefixStore("gloo", store),
                    rank=number,
                    world_size=count,
                    timeout=timedelta(seconds=LIMIT),
                    device_id=shard.gpu,
                )
            except RuntimeError as error:  # a machine's name that does not resolve, or no way between them
                reason = " ".join(str(error).split())[:200]
                settings = "GLOO_SOCKET_IFNAME" + ("" if shard.gpu is None else " and NCCL_SOCKET_IFNAME")
                raise WorkersError(
                    f"{shard.names[number]} cannot open connections to the others ({reason}); set "
                    f"{settings} to the network interface by which the machines reach each other"
                ) from error
            if not shard.first:
                be_quiet(True)
            yield shard
            shard.leave()  # nobody ends while another one may still ask
        except BaseException as error:
            with suppress(Exception):
                shard.failed(_line(error))
                if several_machines():  # on one machine the first worker's own line is seen
                    shard.seen_by_all()
            if isinstance(error, WorkerLost) and LAUNCHED in os.environ:
                time.sleep(2.0)  # whoever started this one tells it, and ends it
            raise
        finally:
            with suppress(Exception):
                distributed.destroy_process_group()


class _Link:
    """A store of torch.distributed, and the default group's sending and receiving."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def _call(self, name: str, *given: Any) -> Any:
        """Call the store, as `alive.Calls` counts it."""
        self.calls += 1
        try:
            return getattr(self._store, name)(*given)
        finally:
            self.calls += 1

    def set(self, key: str, value: str) -> None:
        data = value.encode()
        parts = [data[at : at + _VALUE] for at in range(0, len(data), _VALUE)]
        for number, part in enumerate(parts):
            self._call("set", f"{key}/part {number}", part)
        self._call("set", key, str(len(parts)))  # last: whoever finds it finds the parts

    def forget(self, key: str) -> None:
        parts = range(int(self._call("get", key)))
        for name in (key, *(f"{key}/part {number}" for number in parts)):
            self._call("delete_key", name)

    def get(self, key: str) -> str | None:
        if not self._call("check", [key]):
            return None
        parts = range(int(self._call("get", key)))
        return b"".join(self._call("get", f"{key}/part {number}") for number in parts).decode()

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        import torch.distributed as distributed

        _exchange(distributed.isend, tensors, to)

    def receive(self, into: Sequence[Tensor], sender: int) -> None:
        import torch.distributed as distributed

        _exchange(distributed.irecv, into, sender)


def _exchange(what: Callable[..., Any], tensors: Sequence[Tensor], other: int) -> None:
    """Send or receive tensors in their order: those on a GPU in one call, before those on the CPU."""
    import torch.distributed as distributed

    on_gpu = [distributed.P2POp(what, tensor, other) for tensor in tensors if tensor.is_cuda]
    for begun in distributed.batch_isend_irecv(on_gpu) if on_gpu else []:
        begun.wait()  # the stream waits, not this process
    for tensor in tensors:
        if not tensor.is_cuda:
            what(tensor, other).wait()


_NCCL = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""No multicast, whose sums nobody needs here and which not every machine lets a program use; and no threads of torch
that end the process with many lines: `signs_of_life` does so with one."""


def _own_gpu(shard: Shard, device: str) -> torch.device | None:
    """This worker's GPU where each of them has one of its own, else None: NCCL takes no two workers on one."""
    card = None
    if torch.device(device).type == "cuda":
        card = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]
    cards = shard.all_gather(card)
    if card is None or None in cards:
        return None
    if (count := len({tuple(each) for each in cards})) < len(cards):
        if shard.first:
            shared = f"{len(cards)} workers share {count} GPU{'s' if count > 1 else ''}"
            say(f"note: {shared}, which makes nothing faster: they exchange tensors over the CPU's memory")
        return None
    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)
    index = torch.device(device).index
    gpu = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    torch.cuda.set_device(gpu)
    return gpu


def _names(link: _Link, number: int, count: int) -> tuple[str, ...]:
    """The names of all workers, which have come when all of them are known. Raises `WorkersError` for missing ones."""
    end = time.monotonic() + JOIN
    found: dict[int, str] = {}
    while len(found) < count:
        try:
            for other in set(range(count)) - found.keys():
                if (name := link.get(f"here/{other}")) is not None:
                    found[other] = json.loads(name)
        except RuntimeError as error:
            raise _nobody(error) from error
        absent = sorted(set(range(count)) - found.keys())
        if absent and time.monotonic() > end:
            raise WorkersError(
                f"of {count} workers {len(found)} have come within {JOIN:.0f} seconds, worker "
                f"{', '.join(map(str, absent))} has not; start all of them"
            )
        if absent:
            time.sleep(0.05)
    return tuple(found[other] for other in range(count))


def _nobody(error: Exception) -> WorkersError:
    reason = " ".join(str(error).split())[:200]
    return WorkersError(f"the other workers cannot be reached at {_address()} ({reason}); start all of them alike")


def _address() -> str:
    return ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))


def _versions() -> dict[str, str]:
    """What must be the same everywhere before anything is computed."""
    import transformers

    return {
        "version of sparsepack": __version__,
        "code of sparsepack": _code(),
        "version of torch": str(torch.__version__),
        "version of transformers": transformers.__version__,
        "version of Python": platform.python_version(),
    }


@cache
def _code() -> str:
    """The hash of all of this package's own Python code."""
    root = Path(__file__).parents[1]
    return combine_digests(sha256_bytes(path.read_bytes()) for path in sorted(root.rglob("*.py")))


def _line(error: BaseException) -> str:
    if isinstance(error, UserError | WorkerLost):
        return " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
