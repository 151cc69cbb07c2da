"""How many texts fit side by side into the memory of a device."""

import torch

from sparsepack.models.architecture import Architecture
from sparsepack.runtime.free_memory import free_host_bytes

SHARE = 0.5
"""Keys and values of several texts take at most this share of the free memory, unless so many texts are asked for."""

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def cache_bytes(architecture: Architecture, context: int, cache_type: str) -> int:
    """The bytes of a text's keys and values."""
    a = architecture
    return 2 * a.layers * a.kv_heads * a.head_dim * context * _BYTES[cache_type]


def free_bytes(device: torch.device) -> int | None:
    """The memory that can be had on a device, in bytes; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() if device.type == "cpu" else None


def texts_with_room(most: int, bytes_of_one: int, free: int | None) -> int:
    """How many texts, at least one and at most `most`, take no more than `SHARE` of the free memory."""
    return most if free is None else max(1, min(most, int(SHARE * free) // bytes_of_one))
