"""Groups of neurons that are active together, by METIS, as KAIROX forms them (section 5.2).

Of each block a graph is made: neurons are its nodes, and each is joined with those that are active together with it
most often, by edges that weigh as much as tokens had both active. METIS cuts it into as many parts as there are groups;
a repair makes them equal.
"""

from typing import Any

import numpy as np

from sparsepack.errors import UserError
from sparsepack.progress import progress
from sparsepack.tracing.trace import Trace

EDGES = 16
"""A neuron has this many edges, to the neurons that are active with it most often. Others may choose the neuron,
too."""
_TOKENS = 4096  # at a time
_SEED = 0


def metis_order(trace: Trace, size: int) -> np.ndarray:
    """The neurons of each block, those of a group of `size` side by side: int64 [blocks, neurons].

    size -- divides the neurons of a block

    Raises `UserError` where pymetis is missing, `PlacementError` for a damaged trace.
    """
    metis = _pymetis()
    rows = []
    with progress("grouping", trace.layers) as advance:
        for block in range(trace.layers):
            together = active_together(trace, block)
            part = _parts(metis, together, trace.neurons // size)
            rows.append(np.argsort(repaired(part, together, size), kind="stable"))
            advance()
    return np.stack(rows)


def active_together(trace: Trace, block: int) -> np.ndarray:
    """How many tokens had two neurons active: float32 [neurons, neurons], 0 from a neuron to itself.

    Counts are exact below 2^24.
    """
    together = np.zeros((trace.neurons, trace.neurons), np.float32)
    for session in range(len(trace.sessions)):
        active = trace.active(session, block)
        for first in range(0, len(active), _TOKENS):
            some = active[first : first + _TOKENS].astype(np.float32)
            together += some.T @ some
    np.fill_diagonal(together, 0)
    return together


def strongest(together: np.ndarray, edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A graph in which each neuron has edges to the so many that are active with it most often, in both directions.

    together -- float32 [neurons, neurons], symmetric, 0 on the diagonal; of two that are the same the first counts more

    Where the edges of each neuron begin, int64 [neurons + 1]; to whom they lead, and what they weigh: int64 [edges].
    """
    chosen = np.zeros(together.shape, np.bool_)
    for row, weights in zip(chosen, together, strict=True):
        row[np.argsort(-weights, kind="stable")[:edges]] = True
    chosen &= together > 0
    chosen |= chosen.T
    source, target = np.nonzero(chosen)
    starts = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    return starts, target, together[source, target].astype(np.int64)


def repaired(part: np.ndarray, together: np.ndarray, size: int) -> np.ndarray:
    """Parts of exactly `size` neurons each, with as few changes as there can be: int64 [neurons].

    part     -- of each neuron, from 0 to neurons / size - 1
    together -- float32 [neurons, neurons]

    What a part has too many of are the neurons that are active least with the rest of it. One after the other, first
    those that would lose most, they go to the part with room that they are active with most.
    """
    parts = len(part) // size
    member = np.zeros((len(part), parts), np.float32)
    member[np.arange(len(part)), part] = 1
    bonds = together @ member
    own = bonds[np.arange(len(part)), part]
    by_bond = np.argsort(-own, kind="stable")
    in_parts = by_bond[np.argsort(part[by_bond], kind="stable")]
    counts = np.bincount(part, minlength=parts)
    rank = np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each within its part
    room = np.maximum(size - counts, 0)
    found = part.copy()
    spare = in_parts[rank >= size]
    for neuron in spare[np.argsort(-own[spare], kind="stable")]:
        chosen = int(np.argmax(np.where(room > 0, bonds[neuron], -1)))
        found[neuron] = chosen
        room[chosen] -= 1
    return found


def _parts(metis: Any, together: np.ndarray, parts: int) -> np.ndarray:
    """The part of each neuron: int64 [neurons]. Parts may be unequal, and empty."""
    starts, targets, weights = strongest(together, EDGES)
    graph = metis.CSRAdjacency(starts, targets)
    cut = metis.part_graph(parts, graph, eweights=weights, options=metis.Options(seed=_SEED))
    return np.array(cut.vertex_part, np.int64)


def _pymetis() -> Any:
    """The module. Raises `UserError` where it is missing."""
    try:
        import pymetis
    except ImportError as error:
        raise UserError(
            f"--order metis needs pymetis ({error}); install it with: pip install 'sparsepack[metis]'"
        ) from error
    return pymetis
