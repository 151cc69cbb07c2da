"""What some backends have and others lack, a row for each feature, and which backend is taken for what was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsepack.errors import UserError
from sparsepack.formats.kinds import PLAIN_NEURONS
from sparsepack.models.blocks import XIELU
from sparsepack.runtime.backends import BACKENDS, Backend, backend_for, find_backend, most_sequences, traits_of
from sparsepack.runtime.options import EngineOptions, usual_context

if TYPE_CHECKING:
    from sparsepack.formats.packed import PackedModel


@dataclass(frozen=True)
class Feature:
    """Something that some backends have and others lack.

    is_requested       -- whether options, or the model where one is given, need it
    is_supported       -- whether a backend has enough of it for them
    refusal     -- the error where it does not, with fields for the row, the options, the model, its traits that the
                   backend lacks, and for names, devices and hardware of the rows that do
    check_model -- raises `UserError` for a model that has no use for it
    """

    is_requested: Callable[[EngineOptions, PackedModel | None], bool]
    is_supported: Callable[[Backend, EngineOptions, PackedModel | None], bool]
    refusal: str
    check_model: Callable[[PackedModel], None] | None = None

    def check(self, row: Backend, options: EngineOptions, packed: PackedModel | None = None) -> None:
        """Raise `UserError` where a backend lacks it."""
        if self.is_supported(row, options, packed):
            return
        able = [other for other in BACKENDS.values() if self.is_supported(other, options, packed)]
        names, hardware = (" or ".join(getattr(a, field) for a in able) for field in ("name", "hardware"))
        devices = " or ".join(device for other in able for device in other.devices[:1])
        lacking = ", ".join(trait for trait in required_traits(options, packed) if trait not in row.traits)
        values = {"row": row, "options": options, "packed": packed, "traits": lacking}
        raise UserError(self.refusal.format(**values, names=names, hardware=hardware, devices=devices))


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


def check_threshold_control(packed: PackedModel) -> None:
    """Raise `UserError` for a model without thresholds, or whose target is not known."""
    from sparsepack.runtime.threshold_controller import new_controller  # it brings torch

    new_controller(packed)


def not_by_neurons(packed: PackedModel) -> str:
    """What people are told who give slots to neurons in a model that is not stored by them, and what to do."""
    if packed.architecture.experts is not None:
        return (
            "the model's MLPs are mixtures of experts, which no engine gives slots; `place`, `trace` and `simulate` "
            "take experts"
        )
    from sparsepack.formats.neuron import EXACT_ZEROS  # it brings torch

    activation = packed.architecture.activation
    if activation not in EXACT_ZEROS:
        return (
            f"the model's MLPs are not stored by neurons, and with the activation {activation!r} none is exactly "
            f"inactive; slots are for models with {', '.join(EXACT_ZEROS)}, packed with --format neuron-q4_k"
        )
    return "the model's MLPs are not stored by neurons; pack it with --format neuron-q4_k"


PLAIN = "neurons without a gate are not divided between a GPU and the host yet; leave it out"


def check_by_count(name: str) -> Callable[[PackedModel], None]:
    """What raises `UserError` for a model whose MLPs have no neurons that could have slots. name -- of the option"""

    def check(packed: PackedModel) -> None:
        if not packed.mlp_kind.by_count:
            raise UserError(f"{name}: {not_by_neurons(packed)}")
        if packed.mlp_kind is PLAIN_NEURONS:
            raise UserError(f"{name}: {PLAIN}")

    return check


def check_divides(packed: PackedModel) -> None:
    """Raise `UserError` for a model of which no part can lie in the host's memory."""
    if packed.architecture.experts is not None:
        raise UserError(f"vram: {not_by_neurons(packed)}")
    if packed.mlp_kind is PLAIN_NEURONS:
        raise UserError(f"vram: {PLAIN}")
    if packed.architecture.state_layers:
        raise UserError("vram: models that keep a state are not divided between a GPU and the host yet; leave it out")
    if any(block.mixer is None or block.mlp is None for block in packed.architecture.blocks):
        raise UserError(
            "vram: models whose blocks are attention or an MLP alone are not divided between a GPU and the host yet; "
            "leave it out"
        )
    if packed.architecture.blocks[0].layer_norms:
        raise UserError("vram: models with LayerNorm are not divided between a GPU and the host yet; leave it out")
    of_middle = packed.architecture.activation == XIELU
    if of_middle or any(block.sub_norms or block.parallel for block in packed.architecture.blocks):
        raise UserError(
            "vram: models with norms before attn_out, with xIELU, or whose MLP reads what attention reads are not "
            "divided between a GPU and the host yet; leave it out"
        )
    if packed.architecture.global_heads:
        raise UserError(
            "vram: models with heads of two sizes are not divided between a GPU and the host yet; leave it out"
        )
    if packed.architecture.kv_sources or packed.architecture.per_layer:
        raise UserError(
            "vram: models with an input of each layer, or layers that read keys and values of another, are not divided "
            "between a GPU and the host yet; leave it out"
        )
    if packed.block != "Q4_K" and packed.plane_bits is None:
        raise UserError(f"vram: matrices of {packed.block} are not divided yet; leave it out, or pack as zigzag-q4_k")


def required_traits(options: EngineOptions, packed: PackedModel | None) -> list[str]:
    """The traits of a model, if one is given, in the context that options ask for."""
    if packed is None:
        return []
    architecture = packed.architecture
    return traits_of(architecture, options.context or usual_context(architecture.context))


SEQUENCES = Feature(
    is_requested=lambda options, packed: (options.sequences or 1) > 1,
    is_supported=lambda row, options, packed: row.sequences >= (options.sequences or 1),
    refusal="a batch of {options.sequences} by the {row.name} backend: it runs at most {row.sequences} together; "
    "use backend {names}, or fewer",
)
TUNING = Feature(
    is_requested=lambda options, packed: False,  # by the verb alone
    is_supported=lambda row, options, packed: bool(row.tunes),
    refusal="device {options.device}: the {row.name} backend has nothing to tune; use device {devices}",
)
FEATURES = (
    SEQUENCES,
    Feature(
        is_requested=lambda options, packed: packed is not None,
        is_supported=lambda row, options, packed: packed is None or packed.mlp_kind in row.mlps,
        refusal="the {row.name} backend does not run models by {packed.mlp_kind.name}; "
        "use backend {names}{packed.mlp_kind.instead}",
    ),
    Feature(
        is_requested=lambda options, packed: packed is not None,
        is_supported=lambda row, options, packed: packed is None or packed.block in row.blocks,
        refusal="the {row.name} backend has no kernels for zigzag matrices of {packed.block}; use backend {names}, or "
        "pack the model as zigzag-q4_k",
    ),
    Feature(
        is_requested=lambda options, packed: packed is not None and packed.attention is not None,
        is_supported=lambda row, options, packed: row.selects,
        refusal="the {row.name} backend reads every cached token, and the model was packed to read a part of them; "
        "use backend {names}, or pack the model without --attention",
    ),
    Feature(
        is_requested=lambda options, packed: bool(required_traits(options, packed)),
        is_supported=lambda row, options, packed: row.traits.issuperset(required_traits(options, packed)),
        refusal="the {row.name} backend does not compute all of this model ({traits}); use backend {names}",
    ),
    Feature(
        is_requested=lambda options, packed: options.offload,
        is_supported=lambda row, options, packed: row.offloads,
        refusal="offload: the {row.name} backend keeps keys and values where it computes; use device {devices}, or "
        "leave it out",
        check_model=check_selects,
    ),
    Feature(
        is_requested=lambda options, packed: options.cached is not None,
        is_supported=lambda row, options, packed: row.slots,
        refusal="cached: the {row.name} backend gives neurons no slots; use backend {names}",
        check_model=check_by_count("cached"),
    ),
    Feature(
        is_requested=lambda options, packed: options.vram is not None,
        is_supported=lambda row, options, packed: row.budgets,
        refusal="vram {options.vram}: the {row.name} backend has no memory of a GPU to divide; use device {devices}",
        check_model=check_divides,
    ),
    Feature(
        is_requested=lambda options, packed: options.policy is not None,
        is_supported=lambda row, options, packed: row.slots,
        refusal="policy {options.policy}: the {row.name} backend gives neurons no slots; use backend {names}",
        check_model=check_by_count("policy"),
    ),
    Feature(
        is_requested=lambda options, packed: options.gate_copy is not None,
        is_supported=lambda row, options, packed: row.gate_copies,
        refusal="gate_copy {options.gate_copy:g}: the {row.name} backend has no copies of gates; use device {devices}, "
        "or leave it out",
        check_model=check_by_count("gate_copy"),
    ),
    Feature(
        is_requested=lambda options, packed: options.hold,
        is_supported=lambda row, options, packed: row.scales_thresholds,
        refusal="hold: the {row.name} backend does not scale thresholds; use backend {names}, or leave it out",
        check_model=check_threshold_control,
    ),
    TUNING,
)
"""`check_features` looks for these features, in this order."""


def check_features(row: Backend, options: EngineOptions, packed: PackedModel | None = None) -> None:
    """Raise `UserError` where options, or a model if one is given, ask for a feature that a backend lacks, or that the
    model has no use for."""
    for feature in FEATURES:
        if feature.is_requested(options, packed):
            feature.check(row, options, packed)
            if packed is not None and feature.check_model is not None:
                feature.check_model(packed)


def lacks(row: Backend, options: EngineOptions, packed: PackedModel) -> bool:
    """Whether a backend lacks a feature that options or a model ask for."""
    return any(each.is_requested(options, packed) and not each.is_supported(row, options, packed) for each in FEATURES)


def requested_backend(options: EngineOptions) -> Backend:
    """The backend that is asked for, or that of the device; raises `UserError` where no backend decodes so many
    sequences together, or this backend lacks a feature that the options ask for."""
    most = most_sequences()
    if options.sequences is not None and not 1 <= options.sequences <= most:
        raise UserError(f"a batch of {options.sequences} sequences: expected 1 to {most}")
    row = backend_for(options.device) if options.backend is None else find_backend(options.backend)
    check_features(row, options)
    return row


def tuning_backend(options: EngineOptions) -> Backend:
    """The backend that `sparsepack tune` measures on a device; raises `UserError` where there is nothing to measure."""
    row = backend_for(options.device)
    TUNING.check(row, options)
    return row
