"""A model that is larger than one GPU, over several: accelerate's device map. The GPUs take turns: that is for memory,
and makes nothing faster.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.progress import say
from sparsepack.workers.launch import several

ROOM = 0.8
"""A model takes at most this share of a GPU's free memory; the rest is for what it computes."""

Places = Mapping[str, int | str]
"""The device of each module, by its name or by that of one that it is in: what accelerate calls a device map."""


def places_of(model: Any, device: str, dtype: torch.dtype) -> Places | None:
    """Say where each part of a model goes that does not fit on `device`, a GPU; None: all of it goes to `device`.

    model -- a stock model on the meta device
    device -- "cuda" stands for all GPUs; another is that device alone

    Raises `UserError` for a model that all GPUs together cannot hold, and where this process is one of several workers,
    each of which has one GPU.
    """
    if not device.startswith("cuda"):
        return None
    free = _free()
    own = torch.device(device).index or 0
    need = sum(value.numel() for value in model.parameters()) * dtype.itemsize  # a tied matrix is counted once
    if need <= free[own] * (1 if several() else ROOM):
        return None
    if several():
        raise UserError(
            f"{_size(need)} in {_name(dtype)} do not fit on {device}, which has {_size(free[own])} free, and each "
            "worker holds the whole model; run it in one process with --device cuda, which spreads it over all GPUs"
        )
    if device != "cuda" or len(free) == 1:
        return None  # what the allocator has to say of it is known
    places = _places(model, free, dtype)
    cards = sorted({place for place in places.values() if isinstance(place, int)})
    if any(not isinstance(place, int) for place in places.values()):
        raise UserError(
            f"{_size(need)} in {_name(dtype)} do not fit on {len(free)} GPUs, which have {_size(sum(free.values()))} "
            "free; end what else uses them, or use --device cpu, which reads texts' windows block by block"
        )
    say(
        f"note: {_size(need)} in {_name(dtype)} are more than one GPU has room for: spread over {len(cards)} GPUs by "
        "accelerate's device map, which take turns"
    )
    return places


def place_of(name: str, places: Places) -> int | str:
    """The device of a parameter or module."""
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def spread(model: Any, places: Places) -> None:
    """Let each part of a model compute where it is placed, and take what it is given there."""
    from accelerate import dispatch_model

    dispatch_model(model, dict(places), force_hooks=True)


def _free() -> dict[int, int]:
    """The free memory of each GPU, in bytes."""
    return {number: torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}


def _places(model: Any, free: Mapping[int, int], dtype: torch.dtype) -> dict[str, int | str]:
    from accelerate import infer_auto_device_map

    most = {number: int(ROOM * nbytes) for number, nbytes in free.items()}
    whole = sorted(model._no_split_modules or ())
    found: dict[str, int | str] = infer_auto_device_map(model, most, no_split_module_classes=whole, dtype=dtype)
    return found


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
