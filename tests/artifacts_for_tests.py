"""Artifacts written as `pack` writes them, from what a test has at hand."""

import shutil
from pathlib import Path
from typing import Any

import torch
from models_for_tests import edit_config

from sparsepack.formats.plan import Plan, PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.activity import NeuronCounts
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.sites import Rules


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


def neuron_counts(checkpoint: Checkpoint, seed: int = 0) -> NeuronCounts:
    """Counts as of a calibration, at random, with a neuron that is never active and one that always is."""
    shape = (checkpoint.layers, checkpoint.config.intermediate_size)
    active = torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(seed))
    active[:, 0], active[:, -1] = 0, 1000
    return NeuronCounts(active, 1000, "ab" * 32)


def plan_neurons(checkpoint: Checkpoint, rules: Rules | None = None, **inside: Any) -> Plan:
    """A neuron GGUF, not written yet; `inside` as `PlanRequest` takes it."""
    inside = {"neurons": neuron_counts(checkpoint), **inside}
    return FORMATS["neuron-q4_k"].plan(checkpoint, PlanRequest(rules or {}, **inside))


def tiny_by_neurons(folder: Path, **inside: Any) -> Path:
    """The tiny model by neurons, as if it had been trained with ReLU, in a folder. Its text makes no sense."""
    shutil.copytree(open_checkpoint("shipped:tiny").path, folder / "relu")
    edit_config(folder / "relu", hidden_act="relu")
    plan_neurons(open_checkpoint(folder / "relu"), **inside).write(folder / "m.gguf")
    return folder / "m.gguf"


def write_plain(checkpoint: Checkpoint, path: Path, type: str = "q4_k", **inside: Any) -> tuple[str, ...]:
    """Write a plain GGUF; returns its notes."""
    plan = FORMATS[type].plan(checkpoint, PlanRequest(**inside))
    plan.write(path)
    return plan.notes
