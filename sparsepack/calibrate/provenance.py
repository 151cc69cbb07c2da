"""The record that a calibration or a trace keeps: its model, its text, and how it was computed; how a manifest is read
back, and what of two must agree where they are merged."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from sparsepack.errors import UserError
from sparsepack.files.hashing import fingerprint, sha256_bytes
from sparsepack.files.stored import Count, Model, Name, Size, Stored, shown, validate
from sparsepack.files.tensors import type_name
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint


class StoredModel(Stored):
    """`model` of a manifest."""

    name: Name
    sha256: Name
    model_type: Name
    layers: Annotated[Size, Field(le=10_000)]


class StoredTokenizer(Stored):
    """`tokenizer` of a manifest."""

    sha256: Name


class StoredText(Stored):
    """A row of `texts` of a manifest."""

    name: Name
    documents: Count


class StoredCompute(Stored):
    """`compute` of a manifest: where blocks were computed, in which type, and the type of the weights read."""

    device: Name
    dtype: Name
    weights: Name


def made_from(
    checkpoint: Checkpoint, text: Text, device: str, dtype: torch.dtype, batch: int, sha256: str | None = None
) -> dict[str, Any]:
    """The sections `model`, `tokenizer`, `texts`, `compute` and `versions` of a manifest, JSON-able.

    dtype  -- that blocks are computed in; batch -- rows of text at a time
    sha256 -- what stands in the place of the weights' hash, which is not taken; None: that
    """
    import transformers

    return {
        "model": {
            "name": checkpoint.name,
            "sha256": sha256 or checkpoint.sha256,
            "model_type": checkpoint.family.model_type,
            "layers": checkpoint.layers,
        },
        "tokenizer": {"sha256": sha256_bytes(checkpoint.tokenizer_json().encode())},
        "texts": [{"name": text.name, "sha256": text.sha256, "documents": text.count}],
        "compute": {
            "device": torch.device(device).type,  # on which card of several does not matter
            "dtype": type_name(dtype),
            "weights": type_name(checkpoint.dtype),
            "batch": batch,
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def facts(manifest: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What workers must agree on that make something together: all that its manifest says, and their processors."""
    return {
        "model": manifest["model"]["sha256"],
        "tokenizer": manifest["tokenizer"]["sha256"],
        "text": [text["sha256"] for text in manifest["texts"]],
        "processor": processor(device),
        "command": fingerprint(manifest),
    }


def processor(device: str) -> str:
    """What computes, as far as bits depend on it: the name of a GPU, or the instructions of a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.device(device).type}, {torch.backends.cpu.get_cpu_capability()}"


def read_manifest(
    path: Path,
    model: type[Model],
    schema: int,
    error: type[UserError],
    again: str,
    check: Callable[[Model], None] = lambda _: None,
) -> dict[str, Any]:
    """A manifest from its file, checked as `model` and by `check`, which raises ValueError.

    again -- what the user can do about a damaged one: "calibrate again"

    Raises `error` where the file cannot be read, is of another schema or damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["schema"]
        if found != schema:
            raise error(f"{path.parent}: schema {str(found)[:60]}; this sparsepack reads schema {schema}: {again}")
        check(validate(model, manifest))
        fingerprint(manifest)  # of all of it: halves of characters have no bytes to hash
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror})") from failure
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise error(f"{path}: damaged ({shown(failure)}); {again}") from failure
    return manifest


def check_mergeable(
    first: Mapping[str, Any], second: Mapping[str, Any], keys: Iterable[str], error: type[UserError]
) -> None:
    """Raise `error` unless two manifests agree in all of `keys`, such as "model.sha256"."""
    for key in keys:
        ours: Any = first
        theirs: Any = second
        for name in key.split("."):
            ours, theirs = ours[name], theirs[name]
        if ours != theirs:
            shown = [text if len(text) <= 200 else f"{text[:200]}..." for text in (str(ours), str(theirs))]
            raise error(f"cannot merge: {key} is {shown[0]} in the first and {shown[1]} in the second")
