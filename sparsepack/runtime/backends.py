"""The table of backends: what can run a packed model, a row for each. Importing it costs nothing: the command line
takes its choices from here. docs/backends.md says how to add one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from sparsepack.errors import UserError

if TYPE_CHECKING:
    import torch

    from sparsepack.models.packed import PackedModel
    from sparsepack.runtime.decoder import BatchDecoder, Decoder
    from sparsepack.runtime.hybrid.decoder import Places
    from sparsepack.runtime.operations import Operations
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
    neurons     -- whether it runs models whose MLPs are stored by neurons
    places      -- whether some of these neurons can have places of their own
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
    neurons: bool = False
    places: bool = False

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

    def check_model(self, packed: PackedModel) -> None:
        """Raise `UserError` for a model that it does not run."""
        if packed.by_neurons and not self.neurons:
            able = " and ".join(row.name for row in BACKENDS.values() if row.neurons)
            raise UserError(
                f"the {self.name} backend does not run models by neurons, {able} do; "
                "use one of these, or pack the model as zigzag-q4_k"
            )

    def checked_cache_type(self, asked: str | None) -> str:
        """The type of keys and values to keep; raises `UserError` for one that it does not have."""
        if asked is not None and asked not in self.cache_types:
            raise UserError(f"cache type {asked!r}: the {self.name} backend has {', '.join(self.cache_types)}")
        return asked or self.cache_types[0]

    def check_offloads(self) -> None:
        """Raise `UserError` where keys and values cannot lie away from the device."""
        if not self.offloads:
            others = " or ".join(row.devices[0] for row in BACKENDS.values() if row.offloads)
            raise UserError(
                f"offload: the {self.name} backend keeps keys and values where it computes; use device {others}, or "
                "leave it out"
            )

    def offloading(self, packed: PackedModel, asked: bool) -> dict[str, bool]:
        """What its decoders are given for offload, nothing where it is not asked for.

        Raises `UserError` where the backend or the model has none.
        """
        if not asked:
            return {}
        self.check_offloads()
        check_selects(packed)
        return {"offload": True}

    def check_places(self, packed: PackedModel) -> None:
        """Raise `UserError` where neurons cannot have places of their own."""
        if not self.places:
            able = " or ".join(row.name for row in BACKENDS.values() if row.places)
            raise UserError(f"cached: the {self.name} backend gives neurons no places; use backend {able}")
        if not packed.by_neurons:
            raise UserError("cached: the model's MLPs are not stored by neurons; pack it with --format neuron-q4_k")


class BackendModule(Protocol):
    """What a backend's module offers.

    operations -- its products and caches
    """

    operations: Operations

    def usable(self, device: torch.device) -> None:
        """Raise `UserError` where it cannot run on a device, saying what is missing."""

    def decoder(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        threads: int | None,
        cache_type: str,
        *,
        offload: bool = False,
        places: Places | None = None,
    ) -> Decoder:
        """What runs one text. Raises `UserError` as `usable`, and for a model that the backend does not know.

        offload -- keys and values lie in the host's memory; given to backends alone whose row `offloads`
        places  -- who has places; given to backends alone whose row has `places`. It is a `HybridDecoder` then
        """

    def batch_decoder(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        sequences: int,
        cache_type: str,
        *,
        offload: bool = False,
    ) -> BatchDecoder:
        """What runs several texts together. Asked of backends alone whose row has more than one of `sequences`."""

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
        """Measure how fast neurons with places and without are computed, for records of so many channels, keep it, and
        return it as JSON-able values. Asked of backends alone whose row `tunes` and has `places`."""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        row.name: row
        for row in (
            Backend(
                "reference",
                says="plain torch on matrices decoded to float32, made to be right, not to be fast",
                hardware="any device of torch's",
                devices=(),
                module="sparsepack.runtime.reference_backend",
                cache_types=("f32",),
                neurons=True,
                places=True,
            ),
            Backend(
                "cpu",
                says="native kernels on the stored 4.5 bits a weight, multiplied in 16 bits within tiles of columns",
                hardware="the CPU",
                devices=("cpu",),
                module="sparsepack.runtime.cpu.backend",
                cache_types=("f16",),
                tunes=True,
                neurons=True,
                places=True,
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
"""By name."""


def backend_named(name: str) -> Backend:
    """A backend's row; raises `UserError` naming the known ones."""
    if name not in BACKENDS:
        raise UserError(f"backend {name!r}: unknown; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def backend_for(device: torch.device | str) -> Backend:
    """The backend that is made for a device, by the device's type; the reference where there is none."""
    kind = str(device).partition(":")[0]
    return next((row for row in BACKENDS.values() if kind in row.devices), BACKENDS["reference"])


def batch_backend(sequences: int, device: torch.device | str, asked: str | None = None) -> Backend:
    """The backend that decodes so many texts together on a device; raises `UserError` where none does."""
    most = most_sequences()
    if not 2 <= sequences <= most:
        raise UserError(f"a batch of {sequences} sequences: expected 2 to {most}; one runs in an Engine")
    row = backend_for(device) if asked is None else backend_named(asked)
    if sequences > row.sequences:
        batching = [other for other in BACKENDS.values() if other.sequences >= sequences]
        raise UserError(
            f"a batch of {sequences} by the {row.name} backend on device {device}: several sequences run together on "
            f"{' and '.join(other.hardware for other in batching)} alone; "
            f"use --device {' or '.join(other.devices[0] for other in batching)}, or run one after the other"
        )
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
    if not any(channels is not None and policy.selects_within(window) for channels, window in layers):
        raise UserError(
            f"offload: every layer reads all that it sees, which is fewer than {policy.min_context} tokens "
            "(--min-context); pack the model with fewer, or leave it out"
        )


def tuning_backend(device: torch.device | str) -> Backend:
    """The backend that `sparsepack tune` measures on a device; raises `UserError` where there is nothing to measure."""
    row = backend_for(device)
    if not row.tunes:
        others = " or ".join(other.devices[0] for other in BACKENDS.values() if other.tunes)
        raise UserError(f"device {device}: the {row.name} backend has nothing to tune; use device {others}")
    return row
