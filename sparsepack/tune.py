"""`tune`: measure once which layout of the matrices suits this machine, and remember it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparsepack.artifacts.open import read_packed
from sparsepack.codecs.matrices import ZIGZAG
from sparsepack.runtime.backends import tuning_backend
from sparsepack.runtime.tuning import GATES, SHAPES


def tune(paths: Sequence[Path] = (), device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Measure the matrices of these artifacts, or without any those of Llamas of 1 and 8 billion parameters.

    What was found is kept below ~/.cache and returned, JSON-able. Raises `UserError` without kernels for the device,
    `OutputError` where it cannot be kept.
    """
    backend = tuning_backend(device)
    sites = [
        (name, (matrix.rows, matrix.columns))
        for path in paths
        for layer in read_packed(path, verify=False).layers
        for name, matrix in layer.matrices.items()
        if matrix.type == ZIGZAG
    ]
    shapes = [shape for _, shape in sites] or SHAPES
    gates = {shape for name, shape in sites if name == "mlp_in"} if sites else GATES
    return backend.open().tune(shapes, torch.device(device), threads, gates)
