"""What the environment says of the workers of which this process is one. Nothing heavy is imported."""

import os

LAUNCHED = "SPARSEPACK_LAUNCHED_BY"
"""The process that started the workers (`--devices`), by its number; torchrun sets no such variable."""


def several() -> bool:
    """Whether this process was started as one of several workers."""
    named = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return named and workers_count() > 1


def worker_number() -> int:
    """The number of this worker, from 0."""
    return int(os.environ["RANK"])


def workers_count() -> int:
    """How many workers there are."""
    return int(os.environ["WORLD_SIZE"])


def number_here() -> int:
    """The number of this worker among those of its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))
