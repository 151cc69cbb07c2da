"""What a zigzag GGUF of a given architecture must hold: names and shapes, for the writer and the reader alike."""

from sparsepack.models.architecture import Architecture
from sparsepack.models.families import FAMILIES

ARCHITECTURE = "sparsepack"
CONFIG, TOKENIZER, NUMBERS = "sparsepack.config", "sparsepack.tokenizer", "sparsepack.architecture"


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
