"""Tensors into a file, each at its place: several groups side by side, hashed on the way."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from sparsepack.artifacts.plan import PlannedGroup, PlannedTensor
from sparsepack.artifacts.transfer import host_pieces
from sparsepack.files.parallel import parallel_map


def places(start: int, tensors: Iterable[PlannedTensor], alignment: int = 1) -> list[int]:
    """Where each tensor begins behind `start` bytes, and where the file ends; each begins at a multiple."""
    return list(accumulate(size + -size % alignment for size in (start, *(tensor.nbytes for tensor in tensors))))


def write_groups(
    path: Path,
    header: bytes,
    groups: Sequence[PlannedGroup],
    starts: Sequence[int],
    at_once: int,
    done: Callable[[], object],
) -> list[str]:
    """Write a file: a header, then tensors at their `places`, zeros between them.

    `at_once` groups are made, hashed and written at a time; `done` is called after each. Returns the SHA-256 of each
    tensor, in their order. Raises the first error in the order of the groups.
    """
    path.write_bytes(header)
    *begins, end = starts
    os.truncate(path, end)  # what is not written, the padding, is zeros
    place = iter(begins)
    jobs = [(group, [next(place) for _ in group.tensors]) for group in groups]
    hashes = parallel_map(lambda job: _write(path, *job), jobs, at_once, done)
    return [digest for of_group in hashes for digest in of_group]


def _write(path: Path, group: PlannedGroup, starts: Sequence[int]) -> list[str]:
    """Make the tensors of a group and write each where it begins; returns their SHA-256."""
    hashes = []
    made = group.data()
    with path.open("r+b") as file:
        for data, start in zip(made, starts, strict=True):
            digest = hashlib.sha256()
            file.seek(start)
            for piece in host_pieces(data):
                digest.update(piece)
                file.write(piece)
            hashes.append(digest.hexdigest())
    return hashes
