"""What work would take that is made of parts, each made by one worker and none waiting for another, such as the blocks
of a model that is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PartsForecast:
    """What was measured of some parts, and what that comes to.

    measured      -- what was measured, in words
    device, workers -- what runs it, and how many
    parts         -- what is dealt, in words
    dealt_seconds -- making all parts, one after the other
    alone_seconds -- what the first worker, or each, does beside that, however many they are
    bytes_read, bytes_written
    memory_bytes  -- of the device while parts were made; on a CPU of this process
    uncounted     -- what was not measured, in words
    """

    measured: str
    device: str
    workers: int
    parts: str
    dealt_seconds: float
    alone_seconds: float
    bytes_read: int
    bytes_written: int
    memory_bytes: int
    uncounted: str

    @property
    def seconds(self) -> float:
        """The whole run; what is `uncounted` comes on top."""
        return self.dealt_seconds / self.workers + self.alone_seconds
