"""What Apple says of the memory of its chips."""

import torch

_CHIPS: dict[str, float | dict[int, float]] = {
    "Apple M1": 68,
    "Apple M1 Pro": 200,
    "Apple M1 Max": 400,
    "Apple M1 Ultra": 800,
    "Apple M2": 100,
    "Apple M2 Pro": 200,
    "Apple M2 Max": 400,
    "Apple M2 Ultra": 800,
    "Apple M3": 100,
    "Apple M3 Pro": 150,
    "Apple M3 Max": {30: 300, 40: 400},
    "Apple M3 Ultra": 819,
    "Apple M4": 120,
    "Apple M4 Pro": 273,
    "Apple M4 Max": {32: 410, 40: 546},
    "Apple M5": 153,
}
"""Gigabytes a second by name, and where chips of one name differ by the cores of their GPU. Source: "memory bandwidth"
in the technical specifications of Macs, support.apple.com/en-us/docs/mac."""


def stated_bandwidth(chip: str, cores: int | None) -> float | None:
    """Bytes a second that Apple states for a chip, by its name and the cores of its GPU (None: not known); None where
    the table does not have it."""
    found = _CHIPS.get(chip)
    if isinstance(found, dict):
        found = found.get(cores or 0)
    return None if found is None else found * 1e9


def gpu_cores() -> int | None:
    """The cores of this machine's Apple GPU; None where torch does not tell."""
    ask = getattr(torch.backends.mps, "get_core_count", None)  # torch 2.9 and later
    return None if ask is None else int(ask())
