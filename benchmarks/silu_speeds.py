"""Tokens per second of large models whose neurons are active by a rule, from what was recorded of a small one; used by
`placement_silu.py`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparsepack.eval.standard_error import mean
from sparsepack.placement.budget import Parts, Plan, plan_within
from sparsepack.placement.machine import MACHINES, SCATTERED, SHAPES, Rates, dense_split, seconds_per_token
from sparsepack.placement.placement import HitCounts
from sparsepack.placement.policies import POLICIES, Start, play
from sparsepack.tables import Table, markdown

GATE, BOTH = "gate", "gate and up"
ANY = "any"
PLACED = ("static", "slow", "oracle-static")
BUDGETS = {"13b": (4, 6.5, 8.2, 9), "70b": (12, 24, 32, 40)}
"""Gigabytes of the GPU's memory."""

RECORD_ROWS = {GATE: 2, BOTH: 1}
"""So many rows of the three of a neuron are read where it is active alone; the others are always read."""


def parts_of(name: str, rule: str) -> Parts:
    """What a shape of the model of time takes, neurons divided as the rule has it; `gates` is what is always read."""
    known, rows = SHAPES[name].parts, RECORD_ROWS[rule]
    always = (3 - rows) * known.gates[0]
    return replace(known, gates=(always,) * known.blocks, record=known.record * rows // RECORD_ROWS[GATE])


@dataclass(frozen=True)
class Played:
    """One rule with its share: how often neurons were active in other text, and the sessions."""

    rule: str
    share: float
    frequency: np.ndarray
    sessions: Sequence[np.ndarray]
    prompt: int

    @property
    def density(self) -> float:
        """The share of the neurons that a decoded token needs."""
        return float(np.mean([session[self.prompt :].mean() for session in self.sessions]))

    def outcome(self, policy: str, share: float) -> dict[str, Any]:
        """What a share of the neurons with slots serves."""
        slots = round(share * self.frequency.size)
        each = [
            play(POLICIES[policy].begin, Start(self.frequency, slots, needed, self.prompt)) for needed in self.sessions
        ]
        total = sum(each, HitCounts())
        rates = mean(torch.tensor([of.hit_rate for of in each]))
        return {
            "hit_rate": {"value": total.hit_rate, "stderr": rates["stderr"]},
            "moves": total.moves / total.tokens,
        }


def split_by_layers(rates: Rates, parts: Parts, vram: float, beside: float, mlp: float) -> float:
    """Tokens per second where as many weights as fit are on the GPU and the rest on the processor, as in `dense_split`,
    and both sides read these shares of the weights beside the MLPs and of the MLPs."""
    whole = sum(parts.gates) + parts.records
    weights = parts.weights - parts.embedding
    near = max(0.0, min(weights, vram - parts.least))
    read = (beside * (weights - whole) + mlp * whole) / weights
    gpu = (near * read + parts.cache) / rates.card
    return 1 / (gpu + (weights - near) * read / (SCATTERED * rates.host))


def far_last(rates: Rates, parts: Parts, vram: float, density: float) -> float:
    """Tokens per second where records are what is far away first, and of those on either side `density` is read."""
    whole = parts.weights - parts.embedding - parts.records
    room = max(0.0, vram - parts.least)
    near_whole = min(whole, room)
    near = min(parts.records, room - near_whole)
    gpu = (near_whole + density * near + parts.cache) / rates.card
    host = (whole - near_whole + density * (parts.records - near) / SCATTERED) / rates.host
    return 1 / (gpu + host + (parts.blocks * rates.links.handover if near < parts.records else 0.0))


def speeds(played: Played, columns: float) -> Iterator[dict[str, Any]]:
    """Tokens per second of each shape, budget and machine; `columns` is the share of columns of the same accuracy."""
    density, rows = played.density, RECORD_ROWS[played.rule]
    mlp = (3 - rows + density * rows) / 3
    for name, budgets in BUDGETS.items():
        parts = parts_of(name, played.rule)
        for gigabytes in budgets:
            vram = round(1e9 * gigabytes)
            plan = plan_within(parts, vram)
            found: dict[str, dict[str, Any]] = {}
            if plan.gates == parts.blocks:
                found = {ANY: {"hit_rate": {"value": plan.share}, "moves": 0.0}}
                found |= {policy: played.outcome(policy, plan.share) for policy in PLACED}
            for machine_name, machine in MACHINES.items():
                rates = machine.rates(parts.record)
                yield {
                    "rule": played.rule,
                    "share": played.share,
                    "shape": name,
                    "vram": gigabytes,
                    "machine": machine_name,
                    "slots": plan.share if found else None,
                    "llama.cpp": dense_split(rates, parts, vram),
                    "columns, by layers": split_by_layers(rates, parts, vram, columns, columns),
                    "rule, by layers": split_by_layers(rates, parts, vram, 1.0, mlp),
                    "rule, far last": far_last(rates, parts, vram, density),
                    **_placed(rates, plan, density, found, played.frequency.size),
                }


def _placed(
    rates: Rates, plan: Plan, density: float, found: Mapping[str, Mapping[str, Any]], neurons: int
) -> dict[str, float | None]:
    """Tokens per second with slots, by policy."""
    speeds: dict[str, float | None] = dict.fromkeys((ANY, *PLACED, "slow and bus"))
    for policy, bus in [(policy, False) for policy in found] + [("slow", True)] * bool(found):
        hit_rate, moved = found[policy]["hit_rate"]["value"], found[policy]["moves"] / neurons
        token = seconds_per_token(rates, plan, density, hit_rate, moved, bus)
        speeds[f"{policy} and bus" if bus else policy] = token.rate
    return speeds


def speeds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One rule's speeds."""
    named = ("llama.cpp", "columns, by layers", "rule, by layers", "rule, far last", ANY, *PLACED, "slow and bus")
    over = ("llama.cpp", "columns, by layers", "rule, far last", ANY)
    cells = [
        [
            row["shape"],
            f"{row['vram']} GB",
            row["machine"],
            "-" if row["slots"] is None else f"{100 * row['slots']:.0f} %",
            *("-" if row[name] is None else f"{row[name]:.1f}" for name in named),
            *("-" if row["slow"] is None else f"{row['slow'] / row[of]:.2f}" for of in over),
        ]
        for row in rows
    ]
    return markdown(Table(["shape", "GPU", "machine", "slots", *named, *(f"slow, x {of}" for of in over)], cells))
