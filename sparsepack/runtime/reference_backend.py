"""The reference as a backend: on every device that torch has; see `runtime.backends.BackendModule`."""

import torch

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel
from sparsepack.runtime import reference_operations as operations
from sparsepack.runtime.hybrid.decoder import HybridDecoder, Places
from sparsepack.runtime.operations import NeuronFfn
from sparsepack.runtime.operations_decoder import OperationsDecoder

__all__ = ["decoder", "describe", "operations", "synchronise", "usable"]


def usable(device: torch.device) -> None:
    """Raise `UserError` for a device that torch does not find."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise UserError(
            f"device {device}: torch finds no {device.type.upper()} device of that number on this machine ({reason}); "
            "use cpu"
        ) from error


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    threads: int | None,
    cache_type: str,
    *,
    places: Places | None = None,
) -> OperationsDecoder | HybridDecoder:
    usable(device)
    if places is not None:
        return HybridDecoder(packed, operations, _beside, device, context, threads, cache_type, places)
    return OperationsDecoder(packed, operations, device, context, threads, cache_type)


def _beside(threads: int) -> NeuronFfn:
    """Torch runs for several threads at a time, and has the number of its own from what runs it."""
    return operations.neuron_ffn


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
