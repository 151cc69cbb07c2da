"""The record that a calibration or a trace keeps: its model, its text, and how it was computed."""

from typing import Annotated, Any

import torch
from pydantic import Field

from sparsepack.files.hashing import sha256_bytes
from sparsepack.files.stored import Count, Name, Size, Stored
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.precision import type_name


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


def made_from(checkpoint: Checkpoint, text: Text, device: str, dtype: torch.dtype, batch: int) -> dict[str, Any]:
    """The sections `model`, `tokenizer`, `texts`, `compute` and `versions` of a manifest, JSON-able.

    dtype -- that blocks are computed in; batch -- rows of text at a time
    """
    import transformers

    return {
        "model": {
            "name": checkpoint.name,
            "sha256": checkpoint.sha256,
            "model_type": checkpoint.family.model_type,
            "layers": checkpoint.layers,
        },
        "tokenizer": {"sha256": sha256_bytes(checkpoint.tokenizer_json().encode())},
        "texts": [{"name": text.name, "sha256": text.sha256, "documents": text.count}],
        "compute": {
            "device": device,
            "dtype": type_name(dtype),
            "weights": type_name(checkpoint.dtype),
            "batch": batch,
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
