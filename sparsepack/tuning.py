"""`tune`: measure once which layout suits this machine, and how fast it computes neurons, and remember it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.formats.kinds import DENSE
from sparsepack.formats.open import read_packed
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import Backend
from sparsepack.runtime.decoder import load_backend_module
from sparsepack.runtime.features import tuning_backend
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import GATES, SHAPES, zigzag_matrices


def tune(paths: Sequence[Path] = (), device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Measure the matrices of these artifacts, or without any those of Llamas of 1 and 8 billion parameters.

    Of artifacts whose neurons may have slots, or whose matrices may lie in the host's memory, on this device also how
    fast each side computes what is divided, as `links`; `threads` are then on a GPU those of the processor beside it.
    Few who run a model of sites divide it: where other work hides these speeds, `links_hidden` says so for these.

    What was found is kept below ~/.cache and returned, JSON-able. Raises `UserError` without kernels for the device,
    and where speeds are hidden by which neurons are divided, or of which the threads are given; `OutputError` where
    what was found cannot be kept.
    """
    backend = tuning_backend(EngineOptions(device))
    models = [read_packed(path, verify=False) for path in paths]
    blocks = sorted({packed.block for packed in models}) or ["Q4_K"]
    if others := [block for block in blocks if block not in backend.tunes]:
        raise UserError(
            f"tune measures products with {' or '.join(backend.tunes)} on device {device}, a file has {others[0]}: "
            "leave it out, nothing to tune"
        )
    if len(blocks) > 1:
        raise UserError(f"files with {' and '.join(blocks)}: tune those of each type by themselves")
    divided = [packed for packed in models if _divides(packed, backend)]
    widths = [packed.architecture.hidden for packed in divided]
    if threads is not None and device != "cpu" and not widths:
        raise UserError(
            f"threads {threads}: on device {device} they compute what has no room there; give a file that can be "
            "divided so, or leave it out"
        )
    module = load_backend_module(backend)
    sites = [(name, (matrix.rows, matrix.columns)) for packed in models for name, matrix in zigzag_matrices(packed)]
    shapes = [shape for _, shape in sites] or SHAPES
    gates = {shape for name, shape in sites if name == "mlp_in"} if sites else GATES
    found = module.tune(shapes, torch.device(device), threads, gates, blocks[0])
    if widths:
        try:
            found["links"] = module.tune_bandwidth(widths, torch.device(device), threads)
        except UserError as hidden:
            if threads is not None or any(packed.mlp_kind.by_count for packed in divided):
                raise
            found["links_hidden"] = str(hidden)
    return found


def _divides(packed: PackedModel, backend: Backend) -> bool:
    """Whether a model can lie on two sides by a backend."""
    if packed.mlp_kind.by_count:
        return backend.slots
    return backend.budgets and packed.mlp_kind is DENSE and packed.architecture.hidden % BAND_ROWS == 0
