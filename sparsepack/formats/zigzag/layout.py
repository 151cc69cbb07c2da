"""What a zigzag GGUF of a given architecture must hold: names and shapes, for the writer and the reader alike."""

from collections.abc import Sequence

from torch import Tensor

from sparsepack.formats.codecs import zigzag
from sparsepack.formats.plan import PlannedTensor
from sparsepack.models.architecture import Architecture
from sparsepack.models.families import FAMILIES

WEIGHT, TAIL = ".weight", ".tail.weight"
"""The names of the tensors of a matrix in zigzag order, after its own: its bands, and the rows after them."""

ROW_SCALE = ".row_scale"
"""The name of the tensor with what each row of a matrix in zigzag order is multiplied by, after the matrix's own."""

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


def zigzag_tensors(
    name: str, rows: int, columns: int, experts: Sequence[int] = (), tail: bool = True
) -> tuple[PlannedTensor, ...]:
    """The tensors of a matrix in zigzag order: its bands, if it has whole ones, and its tail, if it has one.

    experts -- how many such matrices lie in each, where they are experts'
    tail    -- False: all rows lie in bands, the last of them padded, as files of before schema 5 have it
    """
    last = zigzag.tail_rows(rows) if tail else 0
    whole, found = rows - last, []
    if whole:
        shape = (*experts, zigzag.bands(whole), columns, zigzag.BAND_ROWS)
        padding = -whole % zigzag.BAND_ROWS
        found.append(PlannedTensor(name + WEIGHT, shape, "Q4_K", (*experts, whole, columns), padding_rows=padding))
    if last:
        shape = (*experts, zigzag.tail_blocks(rows, columns), zigzag.BAND_ROWS)
        padding = -last % zigzag.PIECE_ROWS
        found.append(PlannedTensor(name + TAIL, shape, "Q4_K", (*experts, last, columns), padding_rows=padding))
    return tuple(found)


def stored_tensors(name: str, blocks: Tensor, tail: Tensor | None) -> dict[str, Tensor]:
    """The bytes of a matrix in zigzag order by the names of its tensors."""
    bands = {name + WEIGHT: blocks} if len(blocks) or tail is None else {}
    return bands if tail is None else {**bands, name + TAIL: tail}


def norm_widths(architecture: Architecture) -> dict[str, int]:
    """For each norm of a block, the number of channels that the norm scales."""
    heads = {"q_norm": 1, "k_norm": 1, "q_row_norm": architecture.heads, "k_row_norm": architecture.kv_heads}
    return {
        name: heads[name] * architecture.head_dim if name in heads else architecture.hidden
        for name in FAMILIES[architecture.model_type].norms
    }
