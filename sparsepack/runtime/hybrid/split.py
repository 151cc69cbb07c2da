"""Which link computes how many of the neurons without places: a pure function of counts and measured links."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """How fast neurons are computed, in neurons per second.

    hot      -- by the device with the places, out of these
    bus      -- by the same device, out of the host's memory
    worker   -- by the processor beside it, out of the host's memory
    handover -- seconds from the device to that processor and back
    """

    hot: float
    bus: float
    worker: float
    handover: float = 0.0

    def seconds(self, hot: int, cold: int, bus: int) -> float:
        """What a block takes, whose cold neurons the device computes `bus` of and the worker all others."""
        beside = cold - bus
        return max(hot / self.hot + bus / self.bus, (self.handover + beside / self.worker) if beside else 0.0)


HALVES = Links(1.0, 1.0, 1.0)
"""Two halves of one processor: all memory is the same, and handing over takes nothing."""


def over_the_bus(hot: int, cold: int, links: Links) -> int:
    """How many of the cold neurons of a block the device reads itself, so that it and the worker end together.

    hot, cold -- active neurons with places and without

    Returns 0 to cold; of several that take as long, the fewest.
    """
    even = (links.handover + cold / links.worker - hot / links.hot) / (1 / links.bus + 1 / links.worker)
    least = min(max(int(even), 0), cold)
    candidates = sorted({least, min(least + 1, cold), cold})  # all: then nothing is handed over
    return min(candidates, key=lambda bus: links.seconds(hot, cold, bus))
