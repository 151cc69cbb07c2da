"""What a zigzag GGUF of a given architecture must hold: names and shapes, for the writer and the reader alike."""

import re
from collections.abc import Mapping
from typing import Any

from sparsepack.artifacts.manifest import NEURONS
from sparsepack.models.architecture import Architecture
from sparsepack.models.families import FAMILIES

NUMBERS = "sparsepack.architecture"

RULE_VECTORS = (".threshold", ".offset")
"""How the names of tensors end that hold a site's rule."""

_RESERVED = re.compile(r"blk\.\d+\.(attention\.[a-z0-9_.]+|mlp\.order)")
_RESERVED_SINCE = 2


def reserved(name: str, manifest: Mapping[str, Any]) -> bool:
    """Whether a tensor's name is one that the file's schema keeps for what no engine here runs yet.

    blk.I.attention.*  -- vectors of attention
    blk.I.mlp.order    -- the order in which the MLP's neurons are stored
    """
    return manifest["schema"] >= _RESERVED_SINCE and _RESERVED.fullmatch(name) is not None


def not_yet_run(manifest: Mapping[str, Any], names: Mapping[str, Any]) -> str | None:
    """What a file has that changes how it must be run, and that no engine here knows."""
    keys = [f"{NEURONS} in its manifest"] if manifest.get(NEURONS) is not None else []
    return next(iter(keys + [f"the tensor {name}" for name in names if reserved(name, manifest)]), None)


def site_shapes(architecture: Architecture) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of each site: output rows of its projections in stacking order, and input columns."""
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    return {
        "attn_in": ((queries, keys, keys), architecture.hidden),
        "attn_out": ((architecture.hidden,), queries),
        "mlp_in": ((architecture.intermediate, architecture.intermediate), architecture.hidden),
        "mlp_mid": ((architecture.hidden,), architecture.intermediate),
    }


def norm_widths(architecture: Architecture) -> dict[str, int]:
    """Of each norm of a block: how many channels it scales."""
    per_head = {"q_norm", "k_norm"}
    return {
        name: architecture.head_dim if name in per_head else architecture.hidden
        for name in FAMILIES[architecture.model_type].norms
    }
