"""`simulate`: the sessions of a trace under several policies and numbers of slots, with errors, as one result.

Neurons may move in groups of one block, which are formed by a row of `ORDERS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.statistics import has_experts
from sparsepack.calibrate.trace_file import Trace, calibration_or_trace, load, neuron_counts
from sparsepack.errors import PlacementError
from sparsepack.eval.results import mean
from sparsepack.placement.budget import Plan, plan_of_share, plan_within
from sparsepack.placement.machine import SHAPES, Machine, dense_split, machine_of, seconds_per_token, shape_of
from sparsepack.placement.policies import POLICIES, Start, bound, play
from sparsepack.placement.traffic import HitCounts
from sparsepack.progress import progress
from sparsepack.simulation.options import SimulateOptions

_SEED = 0  # of groups at random


def _at_random(frequency: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(_SEED)
    blocks, neurons = frequency.shape
    return np.stack([random.permutation(neurons) for _ in range(blocks)])


ORDERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"frequency": lambda frequency: np.argsort(-frequency, axis=1, kind="stable"), "random": _at_random}
)
"""How often each neuron is active, float64 [blocks, neurons], to an order of them: those of a group side by side."""


def groups_of(frequency: np.ndarray, order: str, size: int) -> np.ndarray:
    """The neurons of each block by groups: int64 [blocks, groups, neurons of a group].

    Groups are in the order of their first neurons. Raises `PlacementError` where a block does not divide into groups.
    """
    blocks, neurons = frequency.shape
    if neurons % size:
        raise PlacementError(f"--group {size}: {neurons} neurons of a block do not divide into such groups")
    groups = np.sort(ORDERS[order](frequency).reshape(blocks, -1, size), axis=2)
    return np.stack([rows[rows[:, 0].argsort()] for rows in groups])


def grouped_frequency(frequency: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The mean frequency of each group's neurons: float64 [blocks, groups]."""
    found: np.ndarray = np.take_along_axis(frequency[:, None], groups, axis=2).mean(2)
    return found


def needed_of(trace: Trace, session: int, groups: np.ndarray) -> np.ndarray:
    """How many neurons of each group were active: uint8 [tokens, blocks, groups]."""
    blocks = [trace.active(session, block)[:, groups[block]].sum(2, dtype=np.uint8) for block in range(trace.layers)]
    return np.stack(blocks, axis=1)


PRICES = (1.0, 0.25)
"""Bounds are computed for moves at these prices, in neurons that the processor would compute otherwise."""


@dataclass(frozen=True)
class _Setting:
    """What is played: the policies, for so many slots."""

    policies: tuple[str, ...]
    shares: tuple[float, ...]
    group: int


def simulate(
    trace: Trace | Path, calibration: Calibration | Trace | Path, options: SimulateOptions | None = None
) -> dict[str, Any]:
    """Play a trace; JSON-able.

    calibration -- says how often each neuron is active; or another trace does, of other text and the same model

    results -- for each share of `cached` and each policy: places, how many slots; hit_rate, the share of the active
        neurons that had slots, of all sessions together, with its standard error over sessions; difference, of the
        sessions' hit rates from those of the first policy; per token: needed, moves, unused (moves that were taken back
        before they were of use), host_reads (neurons read from host memory: what had no slot, and moves; with its
        standard error over sessions); with a machine tokens_per_second, where the processor reads what has no slot, and
        where the GPU helps over the bus
    bounds -- for each share and price of a move: what hits less `price` times moves cannot exceed, as a share of the
        active neurons; of single neurons only

    Of a trace of experts all that is said of neurons is of experts. The model of time then takes as many of them for a
    token as the shape has, and from the trace the share of these that has slots, and of moves for each that is needed.

    Raises `PlacementError`, `CalibrationError`: they are not of one model, the calibration has not counted neurons, or
    has counted others than the trace has, which is of those above thresholds; it is a trace of sessions that are
    played; or the shape is of neurons and the trace of experts, or the other way round.
    """
    options = options or SimulateOptions()
    options.check()
    machine = None if options.machine is None else machine_of(options.machine)
    vram = options.vram_bytes
    trace = trace if isinstance(trace, Trace) else load(trace)
    name = shape_of(options.shape, trace.unit)
    shape = SHAPES[name]
    parts = shape.parts
    plans = [plan_of_share(parts, share) for share in options.shares] if vram is None else [plan_within(parts, vram)]
    shares = options.shares if vram is None else tuple(plan.share for plan in plans)
    plan_of = dict(zip(shares, plans, strict=True))
    setting = _Setting(options.policies, shares, options.group)
    source = calibration if isinstance(calibration, Calibration | Trace) else calibration_or_trace(calibration)
    frequency = _frequency(trace, source)
    if isinstance(source, Trace):
        _check_apart(trace, source)
    groups = groups_of(frequency, options.order, options.group)
    outcomes, limits = _played(trace, grouped_frequency(frequency, groups), groups, setting)
    total = _total(next(iter(outcomes.values())))
    density = total.needed / total.tokens / frequency.size  # the share of the neurons that a decoded token needs
    modelled = shape.used / shape.experts if shape.experts else density
    results = [
        {"cached": share, "places": round(share * frequency.size), "policy": policy}
        | _summary(found, outcomes[share, setting.policies[0]], options.group)
        | _speeds(machine, plan_of[share], modelled, found, options.group)
        for (share, policy), found in outcomes.items()
    ]
    return {
        "kind": "simulation",
        "trace": {"name": str(trace.path), "sha256": trace.sha256, "sessions": len(trace.sessions)},
        "calibration": {"sha256": source.sha256},
        "model": trace.manifest["model"],
        "unit": trace.unit,
        "neurons": frequency.size,
        "density": density,
        "group": {"neurons": options.group, "order": options.order},
        "policies": {name: POLICIES[name].summary for name in setting.policies},
        "results": results,
        "bounds": [{"cached": share, "price": price, "value": value} for (share, price), value in limits.items()],
        "machine": _machine(machine, name, options, plans),
    }


def _frequency(trace: Trace, calibration: Calibration | Trace) -> np.ndarray:
    """How often each neuron is active: float64 [blocks, neurons]."""
    trace.check_same_model(calibration.manifest["model"]["sha256"], "the calibration")
    counted = {"active": "routed" if isinstance(calibration, Calibration) and has_experts(calibration) else "nonzero"}
    rule = calibration.manifest["rule"] if isinstance(calibration, Trace) else counted
    if rule != trace.manifest["rule"]:
        raise PlacementError(
            f"{trace.path}: who is active there is decided otherwise than in the calibration, which gives out the "
            "slots; give as --calibration a trace of other text that was made with the same --share and thresholds"
        )
    counts = neuron_counts(calibration)
    blocks, neurons = counts.active.shape
    if (blocks, neurons) != (trace.layers, trace.neurons):
        raise PlacementError(
            f"{trace.path}: {trace.layers} blocks of {trace.neurons} {trace.unit}, the calibration has {blocks} of "
            f"{neurons}; trace and calibrate again"
        )
    return counts.frequency.numpy()


def _check_apart(trace: Trace, calibration: Trace) -> None:
    """Raise `PlacementError` where the counts that give out slots are of sessions that are played."""
    if not _ids(trace).isdisjoint(_ids(calibration)):
        raise PlacementError(
            f"--calibration {calibration.path}: a session of {trace.path} is in it too, and would be played with slots "
            "that were given out by it; give a trace of other text, or a folder made by `sparsepack calibrate`"
        )


def _ids(trace: Trace) -> set[bytes]:
    """The tokens of each session."""
    return {trace.ids(session).tobytes() for session in range(len(trace.sessions))}


def _played(
    trace: Trace, frequency: np.ndarray, groups: np.ndarray, setting: _Setting
) -> tuple[dict[tuple[float, str], list[HitCounts]], dict[tuple[float, float], float]]:
    """Every session for each share and policy, and the bound for each share and price."""
    outcomes: dict[tuple[float, str], list[HitCounts]] = {
        (share, name): [] for share in setting.shares for name in setting.policies
    }
    prices = PRICES if setting.group == 1 else ()
    limits = {(share, price): 0.0 for share in setting.shares for price in prices}
    with progress("simulating", len(trace.sessions) * (len(outcomes) + len(limits))) as advance:
        for number, session in enumerate(trace.sessions):
            needed = needed_of(trace, number, groups)
            decoded = needed[session.prompt :].reshape(session.tokens - session.prompt, -1)
            for share, name in outcomes:
                start = Start(frequency, round(share * frequency.size), needed, session.prompt, setting.group)
                outcomes[share, name].append(play(POLICIES[name].begin, start))
                advance()
            for share, price in limits:
                limits[share, price] += bound(decoded, round(share * frequency.size), price)
                advance()
    total = _total(next(iter(outcomes.values())))
    return outcomes, {key: value / max(total.needed, 1) for key, value in limits.items()}


def _total(outcomes: Sequence[HitCounts]) -> HitCounts:
    """All sessions together."""
    return sum(outcomes, HitCounts())


def _summary(outcomes: Sequence[HitCounts], first: Sequence[HitCounts], group: int) -> dict[str, Any]:
    total = _total(outcomes)
    rates, others = (torch.tensor([each.hit_rate for each in found]) for found in (outcomes, first))
    tokens, moves = total.tokens, group * total.moves
    reads = torch.tensor([(each.needed - each.hits + group * each.moves) / each.tokens for each in outcomes])
    return {
        "hit_rate": {"value": total.hit_rate, "stderr": mean(rates)["stderr"]},
        "difference": mean(rates - others),
        "needed": total.needed / tokens,
        "moves": moves / tokens,
        "unused": group * total.unused / tokens,
        "host_reads": {
            "value": (total.needed - total.hits + moves) / tokens,
            "stderr": mean(reads)["stderr"],
        },
    }


def _speeds(
    machine: Machine | None, plan: Plan, density: float, outcomes: Sequence[HitCounts], group: int
) -> dict[str, Any]:
    """By the model of time; density -- share of its neurons, or experts, that a token needs."""
    if machine is None:
        return {}
    total = _total(outcomes)
    moved = density * group * total.moves / max(total.needed, 1)
    by = {"processor": False, "and_bus": True}
    given = (machine.rates(plan.parts.record), plan, density, total.hit_rate, moved)
    return {"tokens_per_second": {name: seconds_per_token(*given, over).rate for name, over in by.items()}}


def _machine(
    machine: Machine | None, shape: str, options: SimulateOptions, plans: Sequence[Plan]
) -> dict[str, Any] | None:
    if machine is None:
        return None
    parts = SHAPES[shape].parts
    vram = [options.vram_bytes or plan.card_bytes for plan in plans]
    return {
        "name": options.machine,
        **asdict(machine),
        "shape": shape,
        "vram": vram,
        "dense_split": [dense_split(machine.rates(parts.record), parts, each) for each in vram],
    }
