"""How much memory a process can have on this machine: what the system has, and what its container or service leaves.

    cgroup v2   /sys/fs/cgroup/GROUP/          memory.max, memory.current, inactive_file of memory.stat
    cgroup v1   /sys/fs/cgroup/memory/GROUP/   memory.limit_in_bytes, memory.usage_in_bytes, total_inactive_file

A group is limited by the groups around it, too. Pages of files that were not used lately count as used, but are given
back where memory is needed.

How many sequences fit side by side into the memory of a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Attention, Latent

SHARE = 0.5
"""Keys and values of several sequences take at most this share of the free memory, unless so many sequences are asked
for."""

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def cache_bytes(architecture: Architecture, context: int, cache_type: str, latents: Latent | None = None) -> int:
    """The bytes of a sequence's keys and values, and of its state. Layers that read another's have none.

    latents -- that a backend keeps in place of keys and values (`decoder.kept_latents`); None: it keeps these
    """
    mixers = [block.mixer for block in architecture.blocks]
    state = 4 * sum(of.state_floats for of in mixers if not isinstance(of, Attention | None))
    numbers = 0
    for of in mixers:
        if isinstance(of, Attention) and of.source is None:
            numbers += 2 * of.kv_heads * of.head_dim if latents is None else latents.kv_rank + latents.turning
    return numbers * context * _BYTES[cache_type] + state


def free_bytes(device: torch.device) -> int | None:
    """The memory that can be had on a device, in bytes; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() if device.type == "cpu" else None


def count_sequences(most: int, bytes_of_one: int, free: int | None) -> int:
    """How many sequences, at least one and at most `most`, take no more than `SHARE` of the free memory."""
    return most if free is None else max(1, min(most, int(SHARE * free) // bytes_of_one))


ROOT = Path("/")


@dataclass(frozen=True)
class _Names:
    """The files of a group, and what memory.stat calls pages of files that were not used lately."""

    folder: str
    limit: str
    used: str
    inactive: str


_V2 = _Names("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Names("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """The bytes that this process can still take; None where nobody knows, which is so where there is no /proc.

    root -- where /proc and /sys lie
    """
    meminfo = _table(root / "proc/meminfo")
    of_groups = [left for names, group in _groups(root) if (left := _left(group, names)) is not None]
    of_system = [meminfo["MemAvailable:"] * 1024] if "MemAvailable:" in meminfo else []
    return max(0, min(of_system + of_groups)) if of_system else None


def _groups(root: Path) -> Iterator[tuple[_Names, Path]]:
    """The folders of the groups that this process is in, those around them too."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        names = _V2 if number == "0" and not controllers else _V1 if "memory" in controllers.split(",") else None
        if names is not None:
            inner = Path(path.lstrip("/"))
            # What a container calls its own group may lie anywhere: at the top of what it sees at least.
            for group in (inner, *inner.parents):
                yield names, root / names.folder / group


def _left(group: Path, names: _Names) -> int | None:
    """The bytes that a group leaves; None where it sets no limit."""
    limit, used = (_number(group / name) for name in (names.limit, names.used))
    if limit is None or used is None:
        return None
    return limit - used + _table(group / "memory.stat").get(names.inactive, 0)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no number in it: `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file by their names, which stand before them in each line."""
    words = [line.split() for line in _lines(path)]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
