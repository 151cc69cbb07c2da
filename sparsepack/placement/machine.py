"""How fast a machine would decode: a model of its time, in which memory is read and nothing else takes time.

A token reads attention, the keys and values, and the gates of all neurons from the GPU's memory, or from host memory
what of them has no room there; of the active neurons the up row and the down column, from the GPU's memory where they
have slots, otherwise from host memory. That the processor reads, or the processor and the GPU over the bus together;
only the output matrix, where it has no room, the GPU reads alone. It is a bound: kernels and launches come on top.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from sparsepack.errors import PlacementError
from sparsepack.placement.budget import SPARE, Parts, Plan, work_of


@dataclass(frozen=True)
class BandwidthProfile:
    """Speeds in neurons per second.

    resident -- of the device, for neurons in its slots
    bus      -- of the device, for records that lie in the host's memory
    worker   -- of the processor beside the device, for records in the host's memory
    handover -- seconds that handing inputs over to that processor and its results back takes

    Of matrices that every token reads, in bytes per second; 0: nobody has measured it

    near       -- of the device, where they lie in its memory
    far_bus    -- of the device, where they lie in the host's
    far_worker -- of the processor, while the device reads others
    """

    resident: float
    bus: float
    worker: float
    handover: float = 0.0
    near: float = 0.0
    far_bus: float = 0.0
    far_worker: float = 0.0

    def offloaded_speeds(self, record_bytes: int) -> tuple[float, float]:
        """How fast the device and the processor read such matrices: as fast as records, where that was not measured."""
        return self.far_bus or self.bus * record_bytes, self.far_worker or self.worker * record_bytes

    def of_columns(self, column_bytes: int) -> "BandwidthProfile":
        """The speeds of columns of such matrices in the place of neurons; all three must have been measured."""
        here, bus, worker = (speed / column_bytes for speed in (self.near, self.far_bus, self.far_worker))
        return replace(self, resident=here, bus=bus, worker=worker)

    def seconds(self, resident: int, offloaded: int, bus: int) -> float:
        """How long a block takes, of whose offloaded neurons the device computes `bus` and the worker all others."""
        on_cpu = offloaded - bus
        own = resident / self.resident + bus / self.bus
        return max(own, (self.handover + on_cpu / self.worker) if on_cpu else 0.0)


def over_the_bus(resident: int, offloaded: int, bandwidth: BandwidthProfile) -> int:
    """How many of a block's offloaded neurons the device reads itself, so that device and worker end together.

    resident, offloaded -- active neurons with slots and without

    Returns 0 to `offloaded`; of several that take as long, the fewest.
    """
    even = (bandwidth.handover + offloaded / bandwidth.worker - resident / bandwidth.resident) / (
        1 / bandwidth.bus + 1 / bandwidth.worker
    )
    least = min(max(int(even), 0), offloaded)
    candidates = sorted({least, min(least + 1, offloaded), offloaded})  # all of them: then nothing is handed over
    return min(candidates, key=lambda bus: bandwidth.seconds(resident, offloaded, bus))


HBM, DRAM, SCATTERED = 0.7, 0.9, 0.85
"""Kernels reach these shares of the bandwidth of the GPU's memory, of the host's memory, and of the host's where they
read scattered records."""
_MOST = 1e9
"""A machine has at most this many GB/s or microseconds: more are a slip, and too many have no place in a float."""


@dataclass(frozen=True)
class Rates:
    """What kernels reach: the bandwidth profile, and bytes a second of the GPU's memory, of the bus and of the host's
    memory."""

    bandwidth: BandwidthProfile
    card: float
    bus: float
    host: float


def measured_rates(bandwidth: BandwidthProfile, record_bytes: int) -> Rates:
    """What kernels reach by a measured bandwidth profile: matrices are read as fast as records where their speed was
    not measured, and the host's memory serves processor and bus at the speeds that were measured while both read it."""
    slots, bus, worker = (speed * record_bytes for speed in (bandwidth.resident, bandwidth.bus, bandwidth.worker))
    return Rates(
        bandwidth,
        bandwidth.near or slots,
        bandwidth.offloaded_speeds(record_bytes)[0],
        max(bus + worker, sum(bandwidth.offloaded_speeds(record_bytes))),
    )


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

    def rates(self, record_bytes: int) -> Rates:
        """What kernels reach of these bandwidths, for records of so many bytes."""
        hbm, dram, bus = HBM * self.hbm * 1e9, DRAM * self.dram * 1e9, self.pcie * 1e9
        most = (self.cpu or self.dram) * 1e9
        worker = min(SCATTERED * dram, most) / record_bytes
        handover = self.handover_us * 1e-6
        bandwidth = BandwidthProfile(
            hbm / record_bytes, bus / record_bytes, worker, handover, hbm, bus, min(dram, most)
        )
        return Rates(bandwidth, hbm, bus, dram)


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
    """A model in numbers.

    intermediate -- neurons of a block; of a mixture those of an expert
    heads, kv_heads -- of 128 channels, whose keys and values take 16 bits; heads None: as many as the hidden state has
    bits         -- of a weight
    experts, used -- of a block, and of these for a token; 0: it is no mixture
    """

    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    context: int
    vocabulary: int = 32_000
    bits: float = 4.5
    heads: int | None = None
    experts: int = 0
    used: int = 0

    @property
    def unit(self) -> str:
        """What has slots: "neurons", or "experts"."""
        return "experts" if self.experts else "neurons"

    @property
    def row_bytes(self) -> float:
        """The bytes of a gate row, an up row or a down column."""
        return self.hidden * self.bits / 8

    @property
    def record_bytes(self) -> int:
        """What a slot takes: an up row and a down column, or all of an expert."""
        return int(3 * self.intermediate * self.row_bytes if self.experts else 2 * self.row_bytes)

    @property
    def units(self) -> int:
        """The number of neurons of a block, or of experts."""
        return self.experts or self.intermediate

    @property
    def neurons(self) -> int:
        """The number of neurons of all blocks, or of experts."""
        return self.layers * self.units

    @property
    def attention(self) -> float:
        """Bytes of q, k, v and o of a block."""
        heads = self.hidden if self.heads is None else 128 * self.heads
        return (2 * heads + 256 * self.kv_heads) * self.row_bytes

    @property
    def cache(self) -> float:
        """Bytes of keys and values of a full context."""
        return 4.0 * 128 * self.kv_heads * self.layers * self.context

    @property
    def gates(self) -> float:
        """Bytes of the gates of a block; of a mixture of the router, in 32 bits."""
        return 4.0 * self.experts * self.hidden if self.experts else self.intermediate * self.row_bytes

    @property
    def parts(self) -> Parts:
        """What such a model takes, as `placement.budget` plans it; its embedding is not its output."""
        words = int(self.vocabulary * self.row_bytes)
        mlp = self.gates + self.units * self.record_bytes
        weights = 2 * words + int(self.layers * (self.attention + mlp))
        work, least_work = (
            work_of(
                hidden=max(self.hidden, 128 * (self.heads or 0)),
                intermediate=self.intermediate * max(self.used, 1),
                blocks=self.layers,
                vocabulary=self.vocabulary,
                sequences=1,
                record=self.record_bytes,
                model=model,
            )
            for model in (weights, 0)
        )
        return Parts(
            embedding=words,
            output=words,
            attention=(int(self.attention),) * self.layers,
            gates=(int(self.gates),) * self.layers,
            record=self.record_bytes,
            neurons=self.units,
            cache=int(self.cache),
            work=work,
            least_work=least_work,
            spare=self.used or SPARE,
        )


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "7b": Shape(32, 4096, 11_008, 32, 2048),
        "13b": Shape(40, 5120, 13_824, 40, 2048),
        "70b": Shape(80, 8192, 28_672, 8, 4096),
        "30b-a3b": Shape(48, 2048, 768, 4, 4096, vocabulary=151_936, heads=32, experts=128, used=8),
        "8x7b": Shape(32, 4096, 14_336, 8, 4096, experts=8, used=2),
    }
)


DEFAULT_SHAPES: Mapping[str, str] = MappingProxyType({"neurons": "70b", "experts": "30b-a3b"})
"""The shape that is modelled where none is named, by what has slots."""


def shape_of(name: str | None, unit: str) -> str:
    """The name of a shape whose slots are for such units, "neurons" or "experts"; None: the one of DEFAULT_SHAPES.

    Raises `PlacementError` for one of the others.
    """
    fitting = [each for each, shape in SHAPES.items() if shape.unit == unit]
    if name is None:
        return DEFAULT_SHAPES[unit]
    if name not in fitting:
        raise PlacementError(
            f"--shape {name}: a model whose {SHAPES[name].unit} have slots, and the trace is of {unit}; "
            f"give {', '.join(fitting[:-1])} or {fitting[-1]}"
        )
    return name


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


@dataclass(frozen=True)
class Listed:
    """What copies of gates list as maybe active.

    density  -- share of the neurons of a block that a token lists
    hit_rate -- share of these that have slots
    """

    density: float
    hit_rate: float


@dataclass(frozen=True)
class TokenSeconds:
    """What a token takes by the model of time: seconds for each part, of which `slots` and `host` go on at once.

    card     -- reading what is always read from the GPU's memory; far: what of it lies in the host's
    slots    -- reading active neurons out of slots; host: out of host memory, both ways together
    handover -- of inputs and results, all blocks and matrices
    """

    card: float
    far: float
    slots: float
    host: float
    handover: float

    @property
    def together(self) -> float:
        """What the whole token takes."""
        return self.card + self.far + max(self.slots, self.host) + self.handover

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1 / self.together

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return asdict(self)


def seconds_per_token(
    rates: Rates,
    plan: Plan,
    density: float,
    hit_rate: float,
    moved: float,
    over_the_bus: bool,
    listed: Listed | None = None,
    kept: float = 1.0,
) -> TokenSeconds:
    """What a token takes of a model of which a plan says what lies where.

    density -- share of the neurons that a token needs; hit_rate -- share of these that have slots
    moved   -- share of all neurons that come to the GPU with a token
    over_the_bus -- the GPU and the processor share what lies in host memory: what has no slot, and matrices that every
                    token reads, but for the output matrix; else each reads what is its own
    listed  -- of blocks whose gates are copied, for which it must be given: whose gates are read, where they lie
    kept    -- share of the columns of attention and gates that a token reads
    """
    bandwidth, parts = rates.bandwidth, plan.parts
    needed, moves = density * parts.all_neurons, moved * parts.all_neurons * plan.slot / parts.record
    offloaded, resident = needed * (1 - hit_rate), needed * hit_rate
    if plan.copied:
        assert listed is not None
        gates = listed.density * parts.neurons * plan.copied * parts.gate / parts.record  # as many records
        offloaded, resident = offloaded + gates * (1 - listed.hit_rate), resident + gates * listed.hit_rate
    alone = max(offloaded / bandwidth.worker, moves / bandwidth.bus)
    together = max((offloaded + moves) / (bandwidth.worker + bandwidth.bus), moves / bandwidth.bus)
    from_host = (offloaded + moves) * parts.record / rates.host
    host = max(together if over_the_bus else alone, from_host)
    card, bus = plan.always_read(kept)
    divided = (bus - plan.host["output"]) if over_the_bus else 0
    far = (bus - divided) / rates.bus + divided / min(sum(bandwidth.offloaded_speeds(parts.record)), rates.host)
    asking = parts.blocks - (plan.downs if parts.together else 0) if offloaded else 0
    handovers = asking + (plan.offloaded_products if over_the_bus else 0)
    slots = resident / bandwidth.resident
    return TokenSeconds(card / rates.card, far, slots, host, handovers * bandwidth.handover)


def dense_split(rates: Rates, parts: Parts, vram: float) -> float:
    """Tokens per second of a dense model of whose weights as many as fit are on the GPU, the rest on the processor."""
    weights = parts.weights - parts.embedding
    on_device = max(0.0, min(weights, vram - parts.cache - parts.work_within(int(vram)).bytes))
    return 1 / ((on_device + parts.cache) / rates.card + (weights - on_device) / rates.host)
