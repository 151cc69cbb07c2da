"""Tensors into files, each at its place: several groups side by side, hashed on the way, by one process or several."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from sparsepack.errors import WorkersError
from sparsepack.files.tensors import parallel_map
from sparsepack.files.transfer import host_pieces
from sparsepack.formats.plan import PlannedGroup, PlannedTensor, TensorFile
from sparsepack.progress import progress
from sparsepack.workers.forked import can_fork, forked_map
from sparsepack.workers.shard import ALONE, Shard

_Job = tuple[Path, PlannedGroup, list[int]]
"""A job is the file, the group that goes into the file, and where the group's tensors begin there, in bytes."""


FORKED_FROM = 1 << 28
"""Files with fewer bytes of tensors are made before processes of their own would gain anything."""

HELD = 4
"""What processes make at a time takes at most this part of the machine's memory: one over so many."""


def write_planned(files: Sequence[TensorFile], at_once: int, shard: Shard = ALONE) -> dict[str, str]:
    """Write the first worker's files, wherever the others would have them; see `write_files`."""
    paths = shard.broadcast([str(file.path.absolute()) for file in files])
    files = [replace(file, path=Path(path)) for file, path in zip(files, paths, strict=True)]
    groups = sum(len(file.groups) for file in files)
    with progress("packing", -(-groups // shard.world_size)) as advance:
        return write_files(files, at_once, advance, shard)


def write_files(
    files: Sequence[TensorFile], at_once: int, done: Callable[[], object] = lambda: None, shard: Shard = ALONE
) -> dict[str, str]:
    """Write files; returns the SHA-256 of each tensor by its name.

    `at_once` groups are made, hashed and written at a time; `done` is called after each. One at a time, as encoders on
    a CPU take them, means as many as torch has threads, each in a process of its own, where the files are large; else
    one is written while the next one is made. Their order is the first of each file, then the second, and so on: a
    system lets one thread write to a file at a time. Raises the first error in this order.

    Several workers have these files, under the same names: the first one begins them, each makes and writes some
    groups, in turn, and all return all hashes. Raises `WorkersError` where a worker does not reach the files.
    """
    if shard.first:
        for file in files:
            file.path.write_bytes(file.header)
            os.truncate(file.path, file.offsets[-1])  # what is not written, the padding, is zeros
    shard.broadcast("begun")
    if not all(file.path.is_file() for file in files):
        raise WorkersError(
            f"{files[0].path.parent}: {shard.names[shard.rank]} does not find there what {shard.names[0]} "
            "writes; name a folder with -o that all machines share"
        )
    in_turn = zip_longest(*(_jobs(file) for file in files))
    jobs: list[_Job] = [job for of_each in in_turn for job in of_each if job is not None][
        shard.rank :: shard.world_size
    ]
    processes = torch.get_num_threads()
    if at_once == 1 and processes > 1 and _worth_forking(files):
        sizes = [sum(map(_held, group.tensors)) for _, group, _ in jobs]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        hashes = forked_map(
            lambda job: _write(*job, shared=shard.world_size > 1), jobs, sizes, processes, memory // HELD, done
        )
    elif at_once == 1:
        hashes = _written_behind(jobs, shard.world_size > 1, done)
    else:
        hashes = parallel_map(lambda job: _write(*job, shared=shard.world_size > 1), jobs, at_once, done)
    own = {name: digest for of_group in hashes for name, digest in of_group.items()}
    return {name: digest for of_worker in shard.all_gather(own) for name, digest in of_worker.items()}


def _held(tensor: PlannedTensor) -> int:
    """Bytes of memory while a tensor is made: those that are stored, and four for each weight; of experts, which are
    made one at a time, of one and the next."""
    experts = tensor.shape[0] // 2 if len(tensor.shape) == 4 else 1
    return tensor.nbytes + 4 * math.prod(tensor.shape) // max(experts, 1)


def _worth_forking(files: Sequence[TensorFile]) -> bool:
    """Whether processes can make the files, and gain by it. A process that uses CUDA cannot be forked."""
    large = sum(file.offsets[-1] for file in files) >= FORKED_FROM
    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return large and can_fork() and not cuda


def _jobs(file: TensorFile) -> Iterator[_Job]:
    begins = iter(file.offsets)
    for group in file.groups:
        yield file.path, group, [next(begins) for _ in group.tensors]


def _written_behind(jobs: Sequence[_Job], shared: bool, done: Callable[[], object]) -> list[dict[str, str]]:
    """`_write` of each job; while one is hashed and written, which takes one core, all make the next one."""
    hashes: list[dict[str, str]] = []
    behind: list[Future[dict[str, str]]] = []

    def wait() -> None:
        for job in behind:
            hashes.append(job.result())
            done()
        behind.clear()

    def put(path: Path, group: PlannedGroup, starts: list[int], made: list[Sequence[torch.Tensor]]) -> dict[str, str]:
        return _put(path, group, starts, made.pop(), shared)  # that nobody holds what is written

    with ThreadPoolExecutor(1, "written-behind") as writer:
        for path, group, starts in jobs:
            made: list[Sequence[torch.Tensor]] = []
            try:
                made.append(group.data())
            finally:
                wait()  # an error of the job before is the first one
            behind.append(writer.submit(put, path, group, starts, made))
        wait()
    return hashes


def _write(path: Path, group: PlannedGroup, starts: Sequence[int], shared: bool) -> dict[str, str]:
    """Make the tensors of a group and write each where it begins; returns their SHA-256."""
    return _put(path, group, starts, group.data(), shared)


def _put(
    path: Path, group: PlannedGroup, starts: Sequence[int], made: Sequence[torch.Tensor], shared: bool
) -> dict[str, str]:
    hashes = {}
    with path.open("r+b") as file:
        for tensor, data, start in zip(group.tensors, made, starts, strict=True):
            digest = hashlib.sha256()
            file.seek(start)
            for piece in host_pieces(data):
                digest.update(piece)
                file.write(piece)
            hashes[tensor.name] = digest.hexdigest()
        if shared:
            file.flush()
            os.fsync(file.fileno())  # whoever seals it may be on another machine
    return hashes
