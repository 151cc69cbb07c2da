"""What verbs lack for some families, a row for each verb: errors say it, and the table of README is made of it, too
(`tools/families_table.py`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparsepack.errors import CheckpointError
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import Family, ResidualStream


@dataclass(frozen=True)
class Verb:
    """What is done with a model.

    lacks   -- what is in the way in models of a family; empty: nothing
    refusal -- the error where something is, with fields for the `model_type` and what `lacks` says
    instead -- what to say then of other verbs
    """

    lacks: Callable[[Family], str]
    refusal: str
    instead: str = ""


def _experts(family: Family) -> str:
    return "" if family.experts is None else "mixtures of experts"


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "rotate": Verb(lambda family: family.unrotatable, "{model_type} models cannot be rotated ({lacks})"),
        "refit": Verb(
            _experts, "fitting weights to their inputs does not take {model_type} models yet, whose MLPs are {lacks}"
        ),
        "distil": Verb(_experts, "distil does not take {model_type} models yet, whose MLPs are {lacks}"),
        "pack": Verb(
            lambda family: family.unpackable,
            "no format holds and no engine runs {model_type} models ({lacks})",
            "; calibrate, trace, simulate, thresholds, prune and eval work with it",
        ),
    }
)
"""The verbs that not every family is taken by."""


def taken_by(verb: str) -> tuple[str, ...]:
    """The model types that a verb takes."""
    return tuple(name for name, family in FAMILIES.items() if not VERBS[verb].lacks(family))


def check_taken(verb: str, family: Family, where: str) -> None:
    """Raise `CheckpointError` where a verb does not take a family, saying what is in the way."""
    row = VERBS[verb]
    if lacks := row.lacks(family):
        told = row.refusal.format(model_type=family.model_type, lacks=lacks)
        raise CheckpointError(f"{where}: {told}; expected one of {', '.join(taken_by(verb))}{row.instead}")


def stream_of(family: Family, where: str) -> ResidualStream:
    """Return the sites that read and write the residual stream. Raises `CheckpointError` for a model that cannot be
    rotated."""
    check_taken("rotate", family, where)
    assert family.residual is not None  # `unrotatable` says why where there is none
    return family.residual
