"""`place`: what of a file lies on a card and what in host memory, for a budget; how fast it would decode."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepack.calibrate.trace_file import calibration_or_trace, neuron_counts
from sparsepack.errors import PlacementError, UserError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import NeuronMlp, PackedModel
from sparsepack.placement.budget import DRIVER_BYTES, Parts, plan_within
from sparsepack.placement.machine import (
    Listed,
    Rates,
    dense_split,
    machine_of,
    measured_rates,
    seconds_per_token,
)
from sparsepack.placement.options import DEFAULT_MACHINE, PlaceOptions
from sparsepack.placement.placement import across_blocks
from sparsepack.runtime.backends import backend_for, find_backend
from sparsepack.runtime.decoder import load_backend_module
from sparsepack.runtime.engine import choose_context
from sparsepack.runtime.hybrid.plan import context_within, parts_of, parts_of_experts


def place(path: Path, options: PlaceOptions, calibration: Path | None = None) -> dict[str, Any]:
    """What lies where, JSON-able; nothing is written, and no GPU is needed.

    calibration -- a folder that says how often each expert is used: of a calibration or a trace. A file by neurons says
                   that of its neurons itself

    What is said of neurons is, of a file with experts, said of these, and of one whose MLPs are sites of the columns of
    the down matrices: those of a block lie together, and a token is taken to need as many columns of each site as the
    file was packed for.

    card, host -- bytes by what they are; driver: bytes that the driver takes beside the budget, at most
    blocks     -- attention, gates: of so many blocks, the first ones, they lie on the card; copied: of so many after
                  those copies of the gates do; records, of a file whose MLPs are sites: down matrices; planes, of a
                  file with planes: so many of every matrix lie on the card, and one more of those blocks
    slots      -- of each block, for the neurons that the file's frequencies say are active most often
    unit       -- what has slots: "neurons", or "experts"; "columns" of down matrices have none, and lie there or here
    density    -- share of the neurons that a token needs; hit_rate: of these, the share with slots, both by these
                  frequencies, so that a policy that moves neurons is not counted in
    listed     -- share of the neurons that a token lists by copies of gates, at most; None: there are no copies
    tokens_per_second -- by the model of time, which is a bound: `processor`, where it computes what has no slot;
                  `and_bus`, where the GPU reads a part of that from host memory; `dense_split`, of a dense model of
                  which as much as fits is on the card and the processor computes the rest

    Raises `PlacementError` for a file of another model than the calibration, and a budget below the least;
    `ArtifactError` for a file that is damaged; `CalibrationError`; `UserError` for a device that was not measured.
    """
    packed = read_packed(path, verify=False)
    row = backend_for("cuda")
    cache_type = row.choose_cache_type(None)
    context = choose_context(options.context, packed.architecture.context)
    if options.context is None:
        context = context_within(packed, context, cache_type, 1, options.budget)
    experts = packed.architecture.experts is not None
    if experts and options.gate_copy is not None:
        raise PlacementError("--gate-copy: it is for files of the format neuron-q4_k, not for experts; leave it out")
    parts = (
        parts_of_experts(packed, context, cache_type)
        if experts
        else parts_of(packed, context, cache_type, gate_copies=options.gate_copy is not None)
    )
    plan = plan_within(parts, options.budget)
    kept = 1 - packed.sparsity if parts.together else 1.0
    if parts.together:
        _no_calibration(calibration, "the file's matrices lie on the card or in host memory as a whole")
        slots = tuple(round(parts.neurons * plan.card_share("records", block)) for block in range(parts.blocks))
        density, hit_rate = kept, plan.hit_rate(kept)
    else:
        frequency = _frequency_of_experts(path, packed, calibration) if experts else _frequency(packed, calibration)
        placed = across_blocks(frequency, plan.slots)
        slots = placed.slots
        density, hit_rate = _density_and_hits(frequency, placed.resident)
    listed = None
    if plan.copied:
        assert options.gate_copy is not None
        listed = Listed(*_density_and_hits(np.minimum(1, options.gate_copy * frequency), placed.resident))
    name, rates = _rates(options, packed.architecture.hidden, parts)
    reckon = partial(seconds_per_token, rates, plan, density, hit_rate, 0.0, listed=listed, kept=kept)
    return {
        "kind": "placement",
        "file": path.name,
        "vram": options.budget,
        "context": context,
        "cache_type": cache_type,
        "card": dict(plan.card),
        "host": dict(plan.host),
        "driver": DRIVER_BYTES,
        "least": parts.least,
        "blocks": {
            **{"all": parts.blocks, "attention": plan.attention, "gates": plan.gates, "copied": plan.copied},
            **({"records": plan.downs} if parts.together else {}),
            **({"planes": plan.planes} if len(parts.levels) > 1 else {}),
        },
        "unit": "experts" if experts else "columns" if parts.together else "neurons",
        "neurons": parts.neurons,
        "slots": list(slots),
        "density": density,
        "listed": None if listed is None else listed.density,
        "hit_rate": hit_rate,
        "machine": name,
        "tokens_per_second": {
            "processor": reckon(over_the_bus=False).rate,
            "and_bus": reckon(over_the_bus=True).rate,
            "dense_split": dense_split(rates, parts, options.budget),
        },
    }


def _density_and_hits(shares: np.ndarray, resident: np.ndarray) -> tuple[float, float]:
    """The mean of the shares of tokens that take each neuron, and how much of it falls to residents."""
    taken = float(shares.sum())
    return taken / shares.size, float(shares[resident].sum()) / taken if taken else 1.0


def _frequency(packed: PackedModel, calibration: Path | None) -> np.ndarray:
    """The share of tokens at which each neuron was active, as stored: float64 [blocks, neurons]."""
    _no_calibration(calibration, "the file has the frequencies of its neurons")
    mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, NeuronMlp)]
    return np.stack([mlp.frequency.double().numpy() for mlp in mlps])


def _no_calibration(calibration: Path | None, why: str) -> None:
    """Raise `PlacementError` where a calibration is given that nothing is read of."""
    if calibration is not None:
        raise PlacementError(f"calibration {calibration}: {why}; leave it out")


def _frequency_of_experts(path: Path, packed: PackedModel, calibration: Path | None) -> np.ndarray:
    """The share of tokens that each expert was given: float64 [blocks, experts]."""
    if calibration is None:
        raise PlacementError(
            f"{path}: its MLPs are mixtures of experts, and it does not say how often each is used; give --calibration"
        )
    made = calibration_or_trace(calibration)
    counted, packed_from = made.manifest["model"], packed.manifest["model"]
    if counted["sha256"] != packed_from["sha256"]:
        raise PlacementError(
            f"{calibration}: of {counted['name']} ({counted['sha256'][:12]}), {path} is of {packed_from['name']} "
            f"({packed_from['sha256'][:12]}); expected both of one model"
        )
    return neuron_counts(made).frequency.numpy()


def _rates(options: PlaceOptions, hidden: int, parts: Parts) -> tuple[str, Rates]:
    """The name of the machine whose speed is modelled, and how fast it is. Raises `UserError` for a device that has not
    been measured."""
    if options.device != "cpu":
        from sparsepack.runtime.hybrid.bandwidth import load_profile

        device = torch.device(options.device)
        find_backend("cuda").check_device(device)
        bandwidth = load_profile(None, hidden, device)
        if bandwidth is None:
            raise UserError(
                f"device {device}: its links were not measured for records of {hidden} channels; run `sparsepack tune "
                f"FILE --device {device}` first, or give --machine"
            )
        bandwidth = bandwidth.of_columns(parts.record) if parts.together else bandwidth
        return f"this machine, {load_backend_module(find_backend('cuda')).describe(device)}", measured_rates(
            bandwidth, parts.record
        )
    name = options.machine or DEFAULT_MACHINE
    return name, machine_of(name).rates(parts.record)
