"""How sparse the neurons are, how unevenly they are used, and whether it pays to keep some of them nearer than others.

A slot near the processor is worth what its neuron is used more than others. Where all are used alike, slots for 30 %
of the neurons have 30 % of what is needed, whoever has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from sparsepack.calibrate.statistics import Activity

Unit = Literal["neurons", "experts"]

SHARES = (0.1, 0.2, 0.3, 0.5)
"""The report says which share of what is needed these shares of the neurons are, the ones most often active."""
JUDGED = 0.3
"""This one of the shares says whether placement pays, and how far documents differ."""
PAYS = 4 / 3
"""Placement pays where the neurons most often active have at least this many times what as many slots at random have:
2.1 times in books-26m-relu, 1.1 times in books-26m-silu's larger half."""
DENSE = 0.9
"""A model with more of its neurons active than this has nothing to skip."""


def activity_report(sessions: Sequence[Sequence[Activity]], unit: Unit = "neurons") -> dict[str, Any]:
    """Neurons, or experts, in a few numbers, JSON-able; shares are between 0 and 1.

    sessions -- of each, or of one text as a whole, the activity of every block
    unit     -- what is active

    tokens, density -- of all blocks; shares -- SHARES
    hottest -- for each of `shares`, the share of all activations that is of so many of the neurons most often active,
        where they may be of any block
    drift   -- of the JUDGED neurons most often active in each document: `own`, their share of its activations;
        `others`, the share of those most often active in all other documents. Means over documents; None where there
        is one
    layers  -- density; spread: its standard deviation over tokens; hottest and drift, among the block's own neurons
    pays, verdict -- whether to give slots to the neurons most often active, and why, in a sentence
    """
    layers = [added([session[layer] for session in sessions]) for layer in range(len(sessions[0]))]
    whole = _joined(layers)
    most_active = [_of_most_active(whole, share) for share in SHARES]
    drift = _drift([_joined(session) for session in sessions])
    verdict = _verdict(whole.density, most_active[SHARES.index(JUDGED)], drift, unit)
    return {
        "unit": unit,
        "tokens": whole.tokens,
        "density": whole.density,
        "shares": list(SHARES),
        "hottest": most_active,
        "drift": drift,
        "layers": [
            {
                "density": layer.density,
                "spread": layer.spread,
                "hottest": [_of_most_active(layer, share) for share in SHARES],
                "drift": _drift([session[number] for session in sessions]),
            }
            for number, layer in enumerate(layers)
        ],
        "pays": verdict[0],
        "verdict": verdict[1],
    }


def _verdict(density: float, most_active: float, drift: Mapping[str, float] | None, unit: Unit) -> tuple[bool, str]:
    """Judge by other documents than those that chose the neurons, where there are several: the neurons most often
    active for a few tokens are much of what these few had active, whatever the model."""
    if density > DENSE:
        return False, (
            f"placement cannot pay: {100 * density:.1f} % of the {unit} are active for every token, there is nothing "
            "to leave out"
        )
    covered = most_active if drift is None else drift["others"]
    elsewhere = "" if drift is None else " of all other documents"
    where = "" if drift is None else " in one"
    found = (
        f"the hottest {100 * JUDGED:.0f} % of the {unit}{elsewhere} are {100 * covered:.0f} % of what is active{where}"
    )
    if covered < PAYS * JUDGED:
        return False, f"placement cannot pay: {found}; any other {100 * JUDGED:.0f} % would be nearly as many"
    return True, f"placement can pay: {found}"


def _of_most_active(activity: Activity, share: float) -> float:
    return _of_all(activity.active, activity.active, share)


def _of_all(active: torch.Tensor, ranked_by: torch.Tensor, share: float) -> float:
    """The share of `active` that is of the neurons which `ranked_by` has as its largest ones."""
    order = ranked_by.argsort(descending=True, stable=True)[: round(share * len(active))]
    return int(active[order].sum()) / max(int(active.sum()), 1)


def _drift(sessions: Sequence[Activity]) -> dict[str, float] | None:
    if len(sessions) < 2:
        return None
    total = torch.stack([session.active for session in sessions]).sum(0)
    own = [_of_most_active(session, JUDGED) for session in sessions]
    others = [_of_all(session.active, total - session.active, JUDGED) for session in sessions]
    return {"own": sum(own) / len(own), "others": sum(others) / len(others)}


def added(parts: Sequence[Activity]) -> Activity:
    """The activity over several texts together."""
    active = torch.stack([part.active for part in parts]).sum(0)
    return Activity(active, sum(part.tokens for part in parts), sum(part.squares for part in parts))


def _joined(layers: Sequence[Activity]) -> Activity:
    """The neurons of all blocks side by side; how many a token has active together is not known: 0 squares."""
    return Activity(torch.cat([layer.active for layer in layers]), layers[0].tokens, 0)
