"""The CPU's backend; see `runtime.decoder.BackendModule`."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.cpu.decoder import NativeDecoder
from sparsepack.runtime.cpu.tune import measure, tune_new_shapes
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape

__all__ = ["decoder", "describe", "operations", "synchronise", "tune", "usable"]


def usable(device: torch.device) -> None:
    find_backend("cpu").check_device(device)
    machine.native()


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> NativeDecoder:
    threads = options.threads or machine.default_threads()
    tune_new_shapes(packed, threads)
    return NativeDecoder(packed, device, context, threads, sequences=options.sequences or 1)


def synchronise(device: torch.device) -> None:
    """Nothing is ever under way when a call has returned."""


def describe(device: torch.device) -> str:
    return ""


def tune(
    shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape], block: str
) -> dict[str, Any]:
    """See `cpu.tune.measure`. What follows a product does not matter here."""
    usable(device)
    return measure(shapes, threads or machine.default_threads(), block)
