"""What the module of a backend offers, and which backend can run a model here."""

from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import Backend, backend_for, find_backend
from sparsepack.runtime.decoder import Decoder
from sparsepack.runtime.features import check_features, lacks, requested_backend
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import Shape


class BackendModule(Protocol):
    """What a backend's module offers."""

    def usable(self, device: torch.device) -> None:
        """Raise `UserError` where it cannot run on a device, saying what is missing."""

    def decoder(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        cache_type: str,
        options: EngineOptions,
    ) -> Decoder:
        """What runs one sequence or several. Raises `UserError` as `usable`, and for a model that it does not know.

        device, context, cache_type -- what the engine made of those in the options, of which the others count here
        options                     -- they ask for nothing that the row does not have
        """

    def synchronise(self, device: torch.device) -> None:
        """Wait until the device has done what it was given."""

    def describe(self, device: torch.device) -> str:
        """The accelerator's name; empty for the CPU."""

    def tune(
        self, shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape]
    ) -> dict[str, Any]:
        """Measure what suits the machine for products of these shapes, keep it, and return it as JSON-able values.
        Asked of backends alone whose row `tunes`.

        gates -- of the shapes, those of gate and up
        """

    def tune_bandwidth(self, widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
        """Measure how fast neurons with slots and without are computed, for records of so many channels, keep it, and
        return it as JSON-able values. Asked of backends alone whose row `tunes` and has `slots`."""


def load_backend_module(row: Backend) -> BackendModule:
    """The module that does a backend's work."""
    return cast(BackendModule, import_module(row.module))


def choose_backend(options: EngineOptions, packed: PackedModel) -> tuple[str, tuple[str, ...]]:
    """The name of the backend to run: the one that is asked for, or the one that is made for the device, where what it
    needs is there. Notes say why where that is not the best for the device.

    Raises `UserError`, saying what is missing, where the reference does not do what is asked for.
    """
    if options.backend is not None or (options.sequences or 1) > 1:
        return requested_backend(options).name, ()
    best = backend_for(options.device)
    try:
        check_features(best, EngineOptions(), packed)
        load_backend_module(best).usable(torch.device(options.device))
    except UserError as error:
        reference = find_backend("reference")
        if lacks(reference, options, packed):
            raise
        return reference.name, (f"note: the reference backend runs: {error}",)
    return best.name, ()
