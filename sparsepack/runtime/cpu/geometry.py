"""How a zigzag matrix lies in memory while it runs: the parameters that layout.h leaves open."""

from dataclasses import dataclass

QUAD_ROWS = 1024


@dataclass(frozen=True)
class Geometry:
    """span -- quads (1024 rows) that lie together; tile -- columns that are multiplied together."""

    span: int
    tile: int


def geometry(rows: int, columns: int) -> Geometry:
    """What suits a matrix of this shape."""
    quads = -(-rows // QUAD_ROWS)
    return Geometry(span=min(quads, 4), tile=64)
