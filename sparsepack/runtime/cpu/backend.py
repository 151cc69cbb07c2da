"""The CPU's backend; see `runtime.backend_module.BackendModule`."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import backend_named
from sparsepack.runtime.cpu import dispatch, operations
from sparsepack.runtime.cpu.decoder import NativeDecoder
from sparsepack.runtime.cpu.links import measure as measure_links
from sparsepack.runtime.cpu.links import measured_links
from sparsepack.runtime.cpu.tune import measure
from sparsepack.runtime.hybrid.decoder import HybridDecoder
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape

__all__ = ["decoder", "describe", "operations", "synchronise", "tune", "tune_links", "usable"]


def usable(device: torch.device) -> None:
    backend_named("cpu").check_device(device)
    dispatch.native()


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> NativeDecoder | HybridDecoder:
    if options.cached is not None:
        measured = measured_links(options.threads or torch.get_num_threads(), packed.architecture.hidden)
        beside = operations.neuron_ffn_beside
        slow = operations.slow_policy()
        return HybridDecoder(packed, operations, beside, device, context, cache_type, options, measured, slow)
    return NativeDecoder(packed, device, context, options.threads, sequences=options.sequences or 1)


def synchronise(device: torch.device) -> None:
    """Nothing is ever under way when a call has returned."""


def describe(device: torch.device) -> str:
    return ""


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape]
) -> dict[str, Any]:
    """See `cpu.tune.measure`. What follows a product does not matter here."""
    usable(device)
    return measure(shapes, threads or torch.get_num_threads())


def tune_links(widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
    """See `cpu.links.measure`."""
    usable(device)
    return measure_links(widths, threads or torch.get_num_threads())
