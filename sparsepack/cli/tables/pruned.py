"""What `prune` did, as text for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.records.pruned import Pruned, PrunedMatrix


def pruned_table(pruned: "Pruned") -> str:
    """What was pruned: a row per block, of each site the error of its outputs, and what was asked."""
    blocks: dict[str, dict[str, list[PrunedMatrix]]] = {}
    for row in pruned.matrices:
        _, layer, site = row.site.split(".")
        blocks.setdefault(layer, {}).setdefault(site, []).append(row)
    sites = list(dict.fromkeys(site for block in blocks.values() for site in block))
    body = [[layer, *(_pruned_cell(block.get(site, [])) for site in sites)] for layer, block in blocks.items()]
    options = pruned.options
    patterns = dict.fromkeys(f"keep {row.keep} of {row.of}" for row in pruned.matrices)
    tails = {row.tail for row in pruned.matrices if row.tail}
    more = f"; last groups of {', '.join(map(str, sorted(tails)))} inputs hold as many" if tails else ""
    density = sum(row.density for row in pruned.matrices) / max(len(pruned.matrices), 1)
    return (
        f"{markdown(Table(['block', *sites], body))}\n\nrelative error of the outputs; * inputs in another order\n"
        f"{', '.join(patterns)}, by {options['method']}: of the weights of {len(pruned.matrices)} matrices "
        f"{100 * density:.1f} % are not zero{more}"
    )


def _pruned_cell(rows: "Sequence[PrunedMatrix]") -> str:
    """The largest error of a site's matrices."""
    if not rows:
        return "-"
    return f"{max(row.error for row in rows):.3f}{'*' if any(row.permuted for row in rows) else ''}"
