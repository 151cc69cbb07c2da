"""The speeds at which neurons are computed where they lie, and which link computes how many of those that are not
resident."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Links:
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

    def far(self, record_bytes: int) -> tuple[float, float]:
        """How fast the device and the processor read such matrices: as fast as records, where that was not measured."""
        return self.far_bus or self.bus * record_bytes, self.far_worker or self.worker * record_bytes

    def of_columns(self, column_bytes: int) -> "Links":
        """The speeds of columns of such matrices in the place of neurons; all three must have been measured."""
        here, bus, worker = (speed / column_bytes for speed in (self.near, self.far_bus, self.far_worker))
        return replace(self, resident=here, bus=bus, worker=worker)

    def seconds(self, resident: int, offloaded: int, bus: int) -> float:
        """How long a block takes, of whose offloaded neurons the device computes `bus` and the worker all others."""
        beside = offloaded - bus
        own = resident / self.resident + bus / self.bus
        return max(own, (self.handover + beside / self.worker) if beside else 0.0)


def over_the_bus(resident: int, offloaded: int, links: Links) -> int:
    """How many of a block's offloaded neurons the device reads itself, so that device and worker end together.

    resident, offloaded -- active neurons with slots and without

    Returns 0 to `offloaded`; of several that take as long, the fewest.
    """
    even = (links.handover + offloaded / links.worker - resident / links.resident) / (1 / links.bus + 1 / links.worker)
    least = min(max(int(even), 0), offloaded)
    candidates = sorted({least, min(least + 1, offloaded), offloaded})  # all of them: then nothing is handed over
    return min(candidates, key=lambda bus: links.seconds(resident, offloaded, bus))
