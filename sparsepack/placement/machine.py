"""How fast a machine would decode: a model of its time, in which memory is read and nothing else takes time.

A token reads attention, the keys and values, and the gates of all neurons from the GPU's memory; of the active neurons
the up row and the down column, from there where they have slots, otherwise from host memory, which the processor
reads, or the processor and the GPU over the bus together. It is a bound: kernels and launches come on top.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

from sparsepack.errors import PlacementError
from sparsepack.placement.links import Links

HBM, DRAM, SCATTERED = 0.7, 0.9, 0.85
"""Kernels reach these shares of the bandwidth of the GPU's memory, of the host's memory, and of the host's where they
read scattered records."""
BUFFERS = 0.8e9
"""Weights and cache cannot have this many bytes of the GPU's memory."""
_MOST = 1e9
"""A machine has at most this many GB/s or microseconds: more are a slip, and too many have no place in a float."""


@dataclass(frozen=True)
class Machine:
    """Bandwidths in GB/s of the GPU's memory, of the host's, and of the bus between them; what handing over takes.

    cpu -- what the processor's kernels reach on scattered records; None: as much as memory allows
    handover_us -- microseconds that handing inputs over to the processor and its results back takes, for each block
    """

    hbm: float
    dram: float
    pcie: float
    cpu: float | None = None
    handover_us: float = 20.0

    def links(self, record_bytes: int) -> Links:
        """What kernels reach of these bandwidths, for records of so many bytes."""
        hbm, dram, bus = HBM * self.hbm * 1e9, DRAM * self.dram * 1e9, self.pcie * 1e9
        worker = min(SCATTERED * dram, (self.cpu or self.dram) * 1e9)
        return Links(hbm / record_bytes, bus / record_bytes, worker / record_bytes, self.handover_us * 1e-6)


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "pcie3": Machine(hbm=900, dram=30, pcie=11),
        "pcie4": Machine(hbm=1000, dram=60, pcie=25),
        "pcie5": Machine(hbm=3350, dram=100, pcie=55),
        "server": Machine(hbm=4800, dram=300, pcie=55),
    }
)


@dataclass(frozen=True)
class Shape:
    """A model in numbers. heads and kv_heads are of 128 channels; bits of a weight; cache in 16 bits."""

    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    context: int
    vocabulary: int = 32_000
    bits: float = 4.5

    @property
    def row_bytes(self) -> float:
        """The bytes of a gate row, an up row or a down column."""
        return self.hidden * self.bits / 8

    @property
    def record_bytes(self) -> int:
        """What a slot takes: an up row and a down column."""
        return int(2 * self.row_bytes)

    @property
    def neurons(self) -> int:
        """The number of neurons of all blocks."""
        return self.layers * self.intermediate

    @property
    def attention(self) -> float:
        """Bytes of q, k, v and o of all blocks, and of the output matrix."""
        return (2 * self.hidden + 256 * self.kv_heads) * self.row_bytes * self.layers + self.vocabulary * self.row_bytes

    @property
    def cache(self) -> float:
        """Bytes of keys and values of a full context."""
        return 4.0 * 128 * self.kv_heads * self.layers * self.context

    @property
    def gates(self) -> float:
        """Bytes of the gates of all blocks."""
        return self.neurons * self.row_bytes

    @property
    def least(self) -> float:
        """Bytes that must be in the GPU's memory, whoever has slots."""
        return self.attention + self.cache + self.gates + BUFFERS


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "7b": Shape(32, 4096, 11_008, 32, 2048),
        "13b": Shape(40, 5120, 13_824, 40, 2048),
        "70b": Shape(80, 8192, 28_672, 8, 4096),
    }
)


def machine_of(name: str) -> Machine:
    """A machine by name, or from a JSON file with the fields of `Machine`. Raises `PlacementError`."""
    if name in MACHINES:
        return MACHINES[name]
    if not name.endswith(".json"):
        raise PlacementError(f"--machine {name}: expected one of {', '.join(MACHINES)}, or a .json file")
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
        machine = Machine(**given)
        values = [value for value in asdict(machine).values() if value is not None]
    except OSError as error:
        raise PlacementError(f"{name}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, RecursionError) as error:
        names = ", ".join(field.name for field in fields(Machine))
        raise PlacementError(f"{name}: no machine; expected a JSON object with numbers for {names}") from error
    if not all(type(value) in (int, float) and 0 <= value <= _MOST for value in values) or 0 in (
        machine.hbm,
        machine.dram,
        machine.pcie,
        machine.cpu,
    ):
        raise PlacementError(
            f"{name}: expected numbers above 0 for bandwidths, at least 0 for handover_us, up to {_MOST:g}"
        )
    return machine


def share_in(vram: float, shape: Shape) -> float:
    """The share of the neurons that have slots in so many bytes. Raises `PlacementError`: too few for the rest."""
    if vram < shape.least:
        raise PlacementError(
            f"--vram {vram / 1e9:g}GB: attention, gates, cache and buffers need {shape.least / 1e9:.1f}GB; "
            "expected at least that"
        )
    return min(1.0, (vram - shape.least) // shape.record_bytes / shape.neurons)


def tokens_per_second(
    machine: Machine, shape: Shape, density: float, hit_rate: float, moved: float, over_the_bus: bool
) -> float:
    """How fast it decodes.

    density -- share of the neurons that a token needs; hit_rate -- share of these that have slots
    moved   -- share of all neurons that come to the GPU with a token
    over_the_bus -- the GPU reads a part of what has no slot from host memory itself, beside the processor
    """
    links = machine.links(shape.record_bytes)
    needed = density * shape.neurons
    offloaded, moves = needed * (1 - hit_rate), moved * shape.neurons
    alone = max(offloaded / links.worker, moves / links.bus)
    together = max((offloaded + moves) / (links.worker + links.bus), moves / links.bus)
    from_host = (offloaded + moves) * shape.record_bytes / (DRAM * machine.dram * 1e9)
    host = max(together if over_the_bus else alone, from_host)
    fixed = (shape.attention + shape.cache + shape.gates) / (HBM * machine.hbm * 1e9)
    handover = shape.layers * links.handover if offloaded else 0.0
    return 1 / (fixed + max(needed * hit_rate / links.resident, host) + handover)


def dense_split(machine: Machine, shape: Shape, vram: float) -> float:
    """Tokens per second of a dense model of whose weights as many as fit are on the GPU, the rest on the processor."""
    weights = shape.attention + 3 * shape.gates
    near = max(0.0, min(weights, vram - shape.cache - BUFFERS))
    return 1 / ((near + shape.cache) / (HBM * machine.hbm * 1e9) + (weights - near) / (DRAM * machine.dram * 1e9))
