"""Artifacts written as `pack` writes them, from what a test has at hand."""

from pathlib import Path
from typing import Any

from sparsepack.artifacts.formats import FORMATS
from sparsepack.artifacts.plan import Plan, PlanRequest
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.rule import Rules


def plan_zigzag(checkpoint: Checkpoint, rules: Rules, **inside: Any) -> Plan:
    """A zigzag GGUF, not written yet; `inside` as `PlanRequest` takes it."""
    return FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest(rules, **inside))


def write_zigzag(
    checkpoint: Checkpoint, rules: Rules, path: Path, overwrite: bool = False, **inside: Any
) -> tuple[str, ...]:
    """Write a zigzag GGUF; returns its notes."""
    plan = plan_zigzag(checkpoint, rules, **inside)
    plan.write(path, overwrite)
    return plan.notes


def write_plain(checkpoint: Checkpoint, path: Path, type: str = "q4_k", **inside: Any) -> tuple[str, ...]:
    """Write a plain GGUF; returns its notes."""
    plan = FORMATS[type].plan(checkpoint, PlanRequest(**inside))
    plan.write(path)
    return plan.notes
