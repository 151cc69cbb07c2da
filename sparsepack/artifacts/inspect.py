"""`inspect`: what a packed file holds, without running it."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsepack.artifacts.artifact import ROTARY_FACTORS, Artifact, open_artifact

_QWEN3_HEAD = 128  # transformers' default, which it keeps whatever the file says
_POLICY = (".threshold", ".offset")
_SHOWN = ("schema", "sparsepack", "model", "calibration", "recipe", "versions")


def describe(path: Path) -> dict[str, Any]:
    """What a GGUF of ours holds, JSON-able: kind, types, bits per weight, thresholds, provenance, who can load it.

    Weights are logical ones: padding adds bytes, not weights. Raises `ArtifactError` where the header is damaged or
    the file is not ours; the tensors' hashes are `verify`'s business.
    """
    artifact = open_artifact(Path(path))
    tensors = artifact.file.tensors
    weights = {name: _weights(artifact, name) for name in tensors}
    matrices = [name for name in artifact.manifest["tensors"] if name in tensors]
    sites = [name for name in matrices if name.startswith("blk.")]
    return {
        "path": str(path),
        "kind": artifact.manifest["kind"],
        "file_bytes": len(artifact.file.raw),
        "tensor_bytes": sum(info.nbytes for info in tensors.values()),
        "types": _types(artifact, weights),
        "weights": sum(weights.values()),
        "bits_per_weight": {
            "blocks": _bits(artifact, sites, weights),
            "matrices": _bits(artifact, matrices, weights),
            "file": 8 * len(artifact.file.raw) / sum(weights.values()),
        },
        "padding_rows": {
            name: entry["padding_rows"]
            for name, entry in artifact.manifest["tensors"].items()
            if isinstance(entry, dict) and entry.get("padding_rows")
        },
        "sparse_sites": sum(name.endswith(".threshold") for name in tensors),
        "thresholds": artifact.manifest.get("thresholds"),
        "provenance": {name: artifact.manifest.get(name) for name in _SHOWN},
        "notes": list(artifact.manifest["notes"]),
        "loads_in": list(_programs(artifact)),
    }


def _weights(artifact: Artifact, name: str) -> int:
    """How many of the model's weights a tensor holds: none in a policy."""
    return 0 if name.endswith(_POLICY) else math.prod(artifact.logical_shape(name))


def _types(artifact: Artifact, weights: dict[str, int]) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0, "weights": 0})
    for name, info in artifact.file.tensors.items():
        entry = types[info.type]
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
        entry["weights"] += weights[name]
    return dict(types)


def _bits(artifact: Artifact, names: list[str], weights: dict[str, int]) -> float | None:
    total = sum(weights[name] for name in names)
    return 8 * sum(artifact.file.tensors[name].nbytes for name in names) / total if total else None


def _programs(artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Which programs can do what with the file."""
    if artifact.zigzag:
        yield _program("sparsepack", True, "runs it, skipping inactive columns while decoding")
        yield _program(
            "gguf-py, GGUF viewers", True, "show and dequantise each tensor; a site's rows lie in bands of 256"
        )
        yield _program("llama.cpp", False, "unknown model architecture 'sparsepack'; pack as q4_k for it")
        yield _program("transformers", False, "unknown architecture; sparsepack gives it the dequantised weights")
        return
    yield _program("llama.cpp", True, "runs it, dense")
    yield _program("gguf-py, GGUF viewers", True, "show and dequantise each tensor")
    lost = _lost_in_transformers(artifact)
    what = f"leaves out {lost}: the model would be another" if lost else "dequantises it on loading (gguf_file=)"
    yield _program("transformers", not lost, what)
    full = artifact.manifest["kind"] != "q4_k"
    why = "reads it as a source model" if full else "reads full-precision GGUFs only; inspects and verifies this one"
    yield _program("sparsepack", full, why)


def _lost_in_transformers(artifact: Artifact) -> str | None:
    """Which of the model's numbers transformers (5.23) does not take from a GGUF."""
    metadata = artifact.file.metadata
    kind = metadata.get("general.architecture")
    if f"{kind}.rope.scaling.type" in metadata or ROTARY_FACTORS in artifact.file.tensors:
        return "the rotary scaling"
    if any(name.endswith("attn_output.bias") for name in artifact.file.tensors):
        return "the biases"
    if kind == "qwen3" and metadata.get(f"{kind}.attention.key_length") != _QWEN3_HEAD:
        return "the head size"
    return None


def _program(name: str, loads: bool, what: str) -> dict[str, Any]:
    return {"program": name, "loads": loads, "what": what}
