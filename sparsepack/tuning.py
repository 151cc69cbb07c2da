"""`tune`: measure once which layout suits this machine, and how fast it computes neurons, and remember it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.formats.codecs.matrices import ZIGZAG
from sparsepack.formats.open import read_packed
from sparsepack.runtime.backend_module import opened
from sparsepack.runtime.features import tuning_backend
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.tuning import GATES, SHAPES


def tune(paths: Sequence[Path] = (), device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Measure the matrices of these artifacts, or without any those of Llamas of 1 and 8 billion parameters.

    Of artifacts by neurons also how fast neurons with slots and without are computed, as `links`, where the device's
    backend gives slots; `threads` are then on a GPU those of the processor beside it.

    What was found is kept below ~/.cache and returned, JSON-able. Raises `UserError` without kernels for the device,
    `OutputError` where it cannot be kept.
    """
    backend = tuning_backend(EngineOptions(device))
    models = [read_packed(path, verify=False) for path in paths]
    widths = [packed.architecture.hidden for packed in models if packed.mlp_kind.by_count] if backend.slots else []
    if threads is not None and device != "cpu" and not widths:
        raise UserError(
            f"threads {threads}: on device {device} they compute beside it, for files by neurons alone; give such a "
            "file, or leave it out"
        )
    module = opened(backend)
    sites = [
        (name, (matrix.rows, matrix.columns))
        for packed in models
        for layer in packed.layers
        for name, matrix in layer.matrices.items()
        if matrix.type == ZIGZAG
    ]
    shapes = [shape for _, shape in sites] or SHAPES
    gates = {shape for name, shape in sites if name == "mlp_in"} if sites else GATES
    found = module.tune(shapes, torch.device(device), threads, gates)
    if widths:
        found["links"] = module.tune_links(widths, torch.device(device), threads)
    return found
