"""The manifest inside an artifact: what it was made from, how, and what shapes it really holds, as one JSON string."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sparsepack import __version__
from sparsepack.artifacts.formats import FORMATS
from sparsepack.errors import ArtifactError
from sparsepack.models.checkpoint import Checkpoint

SCHEMA = 2
"""Since 2 there is room for what changes how a model runs: `ATTENTION` and `NEURONS`."""

ATTENTION, NEURONS = "attention", "neurons"
"""Reserved keys: a policy for sparse attention, and an order of the MLP's neurons. Absent so far."""

_OWN = ("schema", "kind", "sparsepack", "model", "tensors", "notes", "versions", ATTENTION, NEURONS)
_LIBRARIES = ("torch", "transformers", "gguf", "numpy")


def make_manifest(
    kind: str,
    checkpoint: Checkpoint,
    provenance: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
    notes: Iterable[str],
) -> dict[str, Any]:
    """The manifest of an artifact of `kind` made from `checkpoint`.

    provenance -- named parts that the caller knows, each JSON-able: calibration, recipe, thresholds, ...
    tensors    -- logical shape and padding of each matrix: {"shape": [rows, columns], "padding_rows": n}
    notes      -- where the artifact differs from what was asked, a sentence each
    """
    if taken := set(provenance) & set(_OWN):
        raise ValueError(f"provenance {sorted(taken)}: the manifest has keys of its own by that name")
    return {
        "schema": SCHEMA,
        "kind": kind,
        "sparsepack": __version__,
        "model": {
            "name": checkpoint.name,
            "sha256": checkpoint.sha256,
            "model_type": checkpoint.family.model_type,
        },
        **provenance,
        "tensors": {name: dict(shape) for name, shape in tensors.items()},
        "notes": list(notes),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def read_manifest(stored: Any, where: str) -> dict[str, Any]:
    """The manifest from its JSON text or value (None: there is none), which stands at `where`.

    Raises `ArtifactError` where there is none, it does not hold together, or a newer sparsepack wrote it.
    """
    try:
        manifest = stored if isinstance(stored, dict) else json.loads(stored)
        schema, kind = manifest["schema"], manifest["kind"]
        if not isinstance(schema, int):
            raise TypeError(f"schema {schema!r}")
        if schema > SCHEMA:
            raise ArtifactError(
                f"{where} has schema {schema} (sparsepack {manifest.get('sparsepack')}), "
                f"this sparsepack {__version__} knows {SCHEMA}; update sparsepack"
            )
        if kind not in FORMATS:
            raise ArtifactError(f"{where}: unknown kind {kind!r}; expected one of {', '.join(FORMATS)}")
        for name, expected in (("model", dict), ("tensors", dict), ("notes", list)):
            if not isinstance(manifest[name], expected):
                raise TypeError(f"{name} is {type(manifest[name]).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where} is missing or not understood ({error!r}); pack it again") from error
    return dict(manifest)
