"""`inspect`: what an artifact holds, without running it."""

import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsepack.formats.artifact import Artifact
from sparsepack.formats.attention import attention_summary
from sparsepack.formats.manifest import (
    DISTILLATION,
    PRUNING,
    REFIT,
    ROTATION,
    SCORE,
    distillation_in_words,
    refit_in_words,
)
from sparsepack.formats.open import open_artifact
from sparsepack.models.activity import bits_read
from sparsepack.models.checkpoint.configuration import segments_summary

_BLOCKS = ("blk.", "model.layers.")
_SHOWN = ("schema", "sparsepack", "model", PRUNING, ROTATION, DISTILLATION, "calibration", "recipe", "versions")


def describe(path: Path) -> dict[str, Any]:
    """What an artifact holds, JSON-able: kind, types, bits per weight, thresholds, attention, provenance, programs.

    Weights are logical ones: padding adds bytes, not weights. Raises `ArtifactError` where the header is damaged or
    it is not ours; the tensors' hashes are `verify`'s business.
    """
    artifact = open_artifact(Path(path))
    refit, distilled = artifact.manifest.get(REFIT), artifact.manifest.get(DISTILLATION)
    tensors = artifact.tensors
    weights = {name: _weights(artifact, name) for name in tensors}
    matrices = [name for name in artifact.manifest["tensors"] if name in tensors]
    sites = [
        name for name in tensors if name.startswith(_BLOCKS) and (name in matrices or name.endswith(artifact.row_scale))
    ]
    return {
        "path": str(path),
        "kind": artifact.manifest["kind"],
        "file_bytes": artifact.total_bytes,
        "tensor_bytes": sum(info.nbytes for info in tensors.values()),
        "types": _types(artifact, weights),
        "weights": sum(weights.values()),
        "bits_per_weight": {
            "blocks": _bits(artifact, sites, weights),
            "matrices": _bits(artifact, matrices, weights),
            "file": 8 * artifact.total_bytes / sum(weights.values()) if any(weights.values()) else None,
        },
        "padding_rows": {
            name: entry["padding_rows"]
            for name, entry in artifact.manifest["tensors"].items()
            if entry.get("padding_rows")
        },
        "sparse_sites": artifact.sparse_sites,
        "thresholds": artifact.manifest.get("thresholds"),
        "bits_read": expected_bits(artifact),
        "pruning": artifact.pruning(),
        "segments": segments_summary([*artifact.bases()]),
        "refit": refit and {**refit, "in_words": refit_in_words(artifact.manifest)},
        "distilled": distilled and {**distilled, "in_words": distillation_in_words(artifact.manifest)},
        "score": artifact.manifest.get(SCORE),
        "attention": attention_summary(artifact.manifest),
        "neurons": artifact.neurons(),
        "runs": artifact.format.runs,
        "provenance": {name: artifact.manifest.get(name) for name in _SHOWN},
        "notes": list(artifact.manifest["notes"]),
        "loads_in": [asdict(program) for program in artifact.programs()],
    }


def expected_bits(artifact: Artifact) -> dict[str, Any] | None:
    """How many bits of a weight a decoded token reads on text like the calibration text, the mean over the blocks:
    `expected` (None: not known), `target`, for which thresholds were made, and `in_words` both. None: there are no
    thresholds, or no planes."""
    format, table = artifact.format, artifact.manifest.get("thresholds")
    if not table or not format.levels:
        return None
    sizes = {(row["layer"], row["site"]): row.get("weights") or 0 for row in table["rows"]}
    total = sum(sizes.values()) + table.get("of_bases", 0)
    sparse = sum(sizes[row["layer"], row["site"]] for row in table["rows"] if row.get("may_be_sparse"))
    target = table["sparsity"] * (sparse / total if total else 1.0)
    expected = None if table.get("expected") is None else table["expected"]["overall"]
    return {
        "expected": None if expected is None else format.bits * (1 - expected),
        "target": format.bits * (1 - target),
        "in_words": bits_read(format.bits, target if expected is None else expected, target),
    }


def _weights(artifact: Artifact, name: str) -> int:
    """How many of the model's weights a tensor holds: none in the rule of a site."""
    return math.prod(artifact.logical_shape(name)) if artifact.holds_weights(name) else 0


def _types(artifact: Artifact, weights: dict[str, int]) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0, "weights": 0})
    for name, info in artifact.tensors.items():
        entry = types[info.type]
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
        entry["weights"] += weights[name]
    return dict(types)


def _bits(artifact: Artifact, names: list[str], weights: dict[str, int]) -> float | None:
    total = sum(weights[name] for name in names)
    return 8 * sum(artifact.tensors[name].nbytes for name in names) / total if total else None
