"""Which of libcusparseLt's algorithms is the fastest for a product: tried once on a kind of GPU, and kept on disk."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparsepack.errors import OutputError
from sparsepack.files.atomic import write_json
from sparsepack.runtime import tuning
from sparsepack.runtime.cuda.slide.cusparselt import Algorithm, MatmulPlan, ProductShape, version

SCHEMA = 1
LARGEST = 16384
"""Algorithms are tried for up to this many tokens; more tokens have the algorithm of so many."""

_known: dict[Path, dict[str, Algorithm]] = {}


def best_algorithm(shape: ProductShape, compressed: torch.Tensor) -> Algorithm:
    """The fastest algorithm for a shape, the same for all numbers of tokens up to the next power of two.

    compressed -- weights of the shape. Where nothing is known, algorithms are tried with them, which takes 10 ms to a
                  second, and what was found is kept below ~/.cache.
    """
    tokens = min(LARGEST, 1 << max(4, (shape.tokens - 1).bit_length()))
    device = compressed.device
    path = tuning.tuned_path("cusparselt", torch.cuda.get_device_name(device), version())
    if path not in _known:
        _known[path] = _read(path)
    key = f"{shape.rows} x {shape.lifted}, {tokens} tokens, {shape.dtype} to {shape.out}".replace("torch.", "")
    if key not in _known[path]:
        _known[path][key] = _search(ProductShape(shape.rows, shape.lifted, tokens, shape.dtype, shape.out), compressed)
        _write(path, _known[path])
    return _known[path][key]


def _search(shape: ProductShape, compressed: torch.Tensor) -> Algorithm:
    # Any inputs do: it is time that counts. Zeros would draw less power, and so run faster.
    size = (shape.tokens, shape.lifted * shape.dtype.itemsize)
    x = torch.randint(0, 64, size, dtype=torch.uint8, device=compressed.device).view(shape.dtype)
    y = torch.empty(shape.tokens, shape.rows, dtype=shape.out, device=compressed.device)
    return MatmulPlan(shape, compressed.device).search(compressed, x, y)


def _read(path: Path) -> dict[str, Algorithm]:
    """The algorithms that an earlier run found. A file that is missing, damaged or of another schema holds nothing."""
    try:
        content: Any = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            return {}
        found = {str(key): Algorithm(**values) for key, values in content["products"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    numbers = (value for algorithm in found.values() for value in asdict(algorithm).values())
    return found if all(type(value) is int for value in numbers) else {}


def _write(path: Path, found: dict[str, Algorithm]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        together = {**_read(path), **found}  # other processes find some, too
        write_json(path, {"schema": SCHEMA, "products": {key: asdict(value) for key, value in together.items()}})
    except (OSError, OutputError):
        pass  # the next run tries again
