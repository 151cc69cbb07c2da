"""What a zigzag GGUF of a given architecture must hold: names and shapes, for the writer and the reader alike."""

from sparsepack.models.architecture import Architecture
from sparsepack.models.families import FAMILIES

ROUTER = "router.weight"
"""The name of the matrix that chooses among the experts of a block's MLP, after the block's own."""

SHARED_GATE = "shared_gate.weight"
"""The name of what says how much of the shared expert a token has."""

NUMBERS = "sparsepack.architecture"

BASIS = "basis.weight"
"""The name of a block's change of basis, after the block's own."""

RULE_VECTORS = (".threshold", ".offset")
"""The names of the tensors that hold a site's rule end so."""


def site_shapes(architecture: Architecture) -> dict[str, tuple[tuple[int, ...], int]]:
    """For each site: output rows of its projections in stacking order, and input columns; of an MLP with experts those
    of each expert."""
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    apart: dict[str, tuple[tuple[int, ...], int]] = {
        "attn_in": ((queries, keys, keys), architecture.hidden),
        "attn_out": ((architecture.hidden,), queries),
        "mlp_in": ((architecture.intermediate, architecture.intermediate), architecture.hidden),
        "mlp_mid": ((architecture.hidden,), architecture.intermediate),
    }
    projections = FAMILIES[architecture.model_type].projections
    return {
        site: (parts if len(projections[site]) == len(parts) else (sum(parts),), columns)
        for site, (parts, columns) in apart.items()
    }


def norm_widths(architecture: Architecture) -> dict[str, int]:
    """For each norm of a block, the number of channels that the norm scales."""
    heads = {"q_norm": 1, "k_norm": 1, "q_row_norm": architecture.heads, "k_row_norm": architecture.kv_heads}
    return {
        name: heads[name] * architecture.head_dim if name in heads else architecture.hidden
        for name in FAMILIES[architecture.model_type].norms
    }
