"""The table of backends: what can run a packed model, a row for each. Importing it costs nothing: the command line
takes its choices from here. docs/backends.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from sparsepack.errors import UserError
from sparsepack.formats.mlp_kinds import DENSE, NEURONS, MlpKind

if TYPE_CHECKING:
    import torch

    from sparsepack.formats.packed import PackedModel
    from sparsepack.runtime.decoder import Decoder
    from sparsepack.runtime.options import EngineOptions
    from sparsepack.runtime.tuning import Shape


@dataclass(frozen=True)
class Backend:
    """One way to run a packed model.

    name        -- as `--backend` takes it
    says        -- what runs, for people
    hardware    -- what it runs on, for people
    devices     -- torch's types of devices that it is made for, and taken for unless told otherwise; none: any device
    module      -- what offers the functions of `BackendModule`
    cache_types -- of keys and values, of "f32", "f16" and "bf16": the first unless told otherwise
    sequences   -- texts that it decodes together at most
    offloads    -- whether keys and values can lie in the host's memory, away from the device
    tunes       -- whether `sparsepack tune` can measure what suits the machine
    mlps        -- the kinds of MLPs that it runs
    slots       -- whether some of these neurons can have slots of their own
    """

    name: str
    says: str
    hardware: str
    devices: tuple[str, ...]
    module: str
    cache_types: tuple[str, ...]
    sequences: int = 1
    offloads: bool = False
    tunes: bool = False
    mlps: tuple[MlpKind, ...] = (DENSE,)
    slots: bool = False

    def open(self) -> BackendModule:
        """The module that does the work."""
        return cast(BackendModule, import_module(self.module))

    def check_device(self, device: torch.device | str) -> None:
        """Raise `UserError` for a device of a type that it is not made for."""
        if self.devices and str(device).partition(":")[0] not in self.devices:
            raise UserError(
                f"device {device}: the {self.name} backend runs on {self.hardware}; "
                f"use device {self.devices[0]} or the reference backend"
            )

    def checked_cache_type(self, asked: str | None) -> str:
        """The type of keys and values to keep; raises `UserError` for one that it does not have."""
        if asked is not None and asked not in self.cache_types:
            raise UserError(f"cache type {asked!r}: the {self.name} backend has {', '.join(self.cache_types)}")
        return asked or self.cache_types[0]

    def check(self, options: EngineOptions, packed: PackedModel | None = None) -> None:
        """Raise `UserError` where options, or a model if one is given, ask for a feature that it lacks, or that the
        model has no use for."""
        for feature in FEATURES:
            if feature.asked(options, packed):
                feature.check(self, options, packed)
                if packed is not None and feature.check_model is not None:
                    feature.check_model(packed)


@dataclass(frozen=True)
class Feature:
    """Something that some backends have and others lack.

    asked       -- whether options, or the model where one is given, need it
    there       -- whether a backend has enough of it for them
    refusal     -- the error where it does not, with fields for the row, the options, the model, and for names, devices
                   and hardware of the rows that do
    check_model -- raises `UserError` for a model that has no use for it
    """

    asked: Callable[[EngineOptions, PackedModel | None], bool]
    there: Callable[[Backend, EngineOptions, PackedModel | None], bool]
    refusal: str
    check_model: Callable[[PackedModel], None] | None = None

    def check(self, row: Backend, options: EngineOptions, packed: PackedModel | None = None) -> None:
        """Raise `UserError` where a backend lacks it."""
        if self.there(row, options, packed):
            return
        able = [other for other in BACKENDS.values() if self.there(other, options, packed)]
        names, hardware = (" or ".join(texts) for texts in zip(*((a.name, a.hardware) for a in able), strict=True))
        devices = " or ".join(device for other in able for device in other.devices[:1])
        values = {"row": row, "options": options, "packed": packed}
        raise UserError(self.refusal.format(**values, names=names, hardware=hardware, devices=devices))


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
        """What runs one text or several. Raises `UserError` as `usable`, and for a model that it does not know.

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

    def tune_links(self, widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
        """Measure how fast neurons with slots and without are computed, for records of so many channels, keep it, and
        return it as JSON-able values. Asked of backends alone whose row `tunes` and has `slots`."""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        row.name: row
        for row in (
            Backend(
                "reference",
                says="plain torch on matrices decoded to float32, made to be right, not to be fast",
                hardware="any device of torch's",
                devices=(),
                module="sparsepack.runtime.reference.backend",
                cache_types=("f32",),
                mlps=(DENSE, NEURONS),
                slots=True,
            ),
            Backend(
                "cpu",
                says="native kernels on the stored 4.5 bits a weight, multiplied in 16 bits within tiles of columns",
                hardware="the CPU",
                devices=("cpu",),
                module="sparsepack.runtime.cpu.backend",
                cache_types=("f16",),
                tunes=True,
                mlps=(DENSE, NEURONS),
                slots=True,
            ),
            Backend(
                "cuda",
                says="CUDA kernels on the stored 4.5 bits a weight, a token a CUDA graph; prefill in float16 on tensor "
                "cores",
                hardware="NVIDIA GPUs",
                devices=("cuda",),
                module="sparsepack.runtime.cuda.backend",
                cache_types=("bf16", "f16", "f32"),
                sequences=8,
                offloads=True,
                tunes=True,
            ),
        )
    }
)
"""Each backend stands under its name."""


def backend_named(name: str) -> Backend:
    """A backend's row; raises `UserError` naming the known ones."""
    if name not in BACKENDS:
        raise UserError(f"backend {name!r}: unknown; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def backend_for(device: torch.device | str) -> Backend:
    """The backend that is made for a device, by the device's type; the reference where there is none."""
    kind = str(device).partition(":")[0]
    return next((row for row in BACKENDS.values() if kind in row.devices), BACKENDS["reference"])


def backend_of_sequences(options: EngineOptions) -> Backend:
    """The backend that is asked for, or that of the device; raises `UserError` where none decodes so many texts
    together, or this one does not."""
    most = most_sequences()
    if not 1 <= options.sequences <= most:
        raise UserError(f"a batch of {options.sequences} sequences: expected 1 to {most}")
    row = backend_for(options.device) if options.backend is None else backend_named(options.backend)
    SEQUENCES.check(row, options)
    return row


def most_sequences() -> int:
    """Texts that any backend decodes together at most."""
    return max(row.sequences for row in BACKENDS.values())


def check_selects(packed: PackedModel) -> None:
    """Raise `UserError` for a model none of whose layers selects what it reads: over the bus that would take too
    long."""
    attention, windows = packed.attention, packed.architecture.sliding_windows
    if attention is None:
        raise UserError(
            "offload: the model reads every token at each step, which takes too long from the host's memory; pack it "
            "with --attention double, or leave it out"
        )
    layers, policy = zip(attention.channels, windows, strict=True), attention.policy
    if not any(channels is not None and policy.sparse_from.within(window) for channels, window in layers):
        raise UserError(
            f"offload: every layer reads all that it sees, which is fewer than {policy.min_context} tokens "
            "(--min-context); pack the model with fewer, or leave it out"
        )


def check_by_count(packed: PackedModel) -> None:
    """Raise `UserError` for a model whose MLPs have no neurons that could have slots."""
    if not packed.mlp_kind.by_count:
        raise UserError("cached: the model's MLPs are not stored by neurons; pack it with --format neuron-q4_k")


def tuning_backend(options: EngineOptions) -> Backend:
    """The backend that `sparsepack tune` measures on a device; raises `UserError` where there is nothing to measure."""
    row = backend_for(options.device)
    TUNING.check(row, options)
    return row


SEQUENCES = Feature(
    asked=lambda options, packed: options.sequences > 1,
    there=lambda row, options, packed: row.sequences >= options.sequences,
    refusal="a batch of {options.sequences} by the {row.name} backend on device {options.device}: several sequences "
    "run together on {hardware} alone; use --device {devices}, or run one after the other",
)
TUNING = Feature(
    asked=lambda options, packed: False,  # by the verb alone
    there=lambda row, options, packed: row.tunes,
    refusal="device {options.device}: the {row.name} backend has nothing to tune; use device {devices}",
)
FEATURES = (
    SEQUENCES,
    Feature(
        asked=lambda options, packed: packed is not None,
        there=lambda row, options, packed: packed is None or packed.mlp_kind in row.mlps,
        refusal="the {row.name} backend does not run models by {packed.mlp_kind.name}; "
        "use backend {names}, or pack the model as zigzag-q4_k",
    ),
    Feature(
        asked=lambda options, packed: options.offload,
        there=lambda row, options, packed: row.offloads,
        refusal="offload: the {row.name} backend keeps keys and values where it computes; use device {devices}, or "
        "leave it out",
        check_model=check_selects,
    ),
    Feature(
        asked=lambda options, packed: options.cached is not None,
        there=lambda row, options, packed: row.slots,
        refusal="cached: the {row.name} backend gives neurons no slots; use backend {names}",
        check_model=check_by_count,
    ),
    TUNING,
)
"""What `Backend.check` looks for, in this order."""
