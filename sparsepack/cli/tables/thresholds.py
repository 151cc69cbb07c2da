"""A table of thresholds, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.models.records.skipped import shown
from sparsepack.tables import Table, markdown


def thresholds_table(summary: Mapping[str, Any]) -> str:
    """A thresholds table: a row per block, of each site what its threshold skips on the calibration text, and that."""
    rows = summary["rows"]
    sites = list(dict.fromkeys(row["site"] for row in rows))
    by_key = {(row["layer"], row["site"]): row for row in rows}
    body = []
    for layer in sorted({row["layer"] for row in rows}):
        cells = [by_key.get((layer, site)) for site in sites]
        body.append([layer, *(_site_cell(cell) if cell else "-" for cell in cells)])
    vectors = [name for name in ("channel_weights", "offset") if any(row.get(name) for row in rows)]
    head = (
        f"{summary['allocation']}, {summary['criterion']}, target {summary['sparsity']}, upstream {summary['upstream']}"
        + (f"; per channel: {', '.join(vectors)}" if vectors else "")
    )
    outlook = summary.get("expected")
    said = "not known, measure it with `sparsepack eval`" if outlook is None else shown(**outlook)
    parts: list[str | Table] = [head, Table(["block", *(f"{site} (skips @ threshold)" for site in sites)], body)]
    parts.append(f"a decoded token skips, on text like the calibration text: {said} of all block weights")
    if notes := _edited(summary):
        parts.append("\n".join(f"note: {note}" for note in notes))
    return markdown(*parts)


def _site_cell(row: Mapping[str, Any]) -> str:
    expected = row.get("expected")
    if expected == 0 and row["threshold"] == 0:
        return "dense"
    return f"{'?' if expected is None else f'{100 * expected:.1f} %'} @ {row['threshold']:.4g}"


_FAR = 0.02
_MOST_NOTES = 8


def _edited(summary: Mapping[str, Any]) -> list[str]:
    """The lines that say which field counts where a table, as after an edit, asks for other than what will happen."""
    notes = [
        f"blk.{row['layer']}.{row['site']}: `threshold` counts, not `sparsity`: {row['threshold']:.4g} skips "
        f"{100 * row['expected']:.1f} %, not {100 * row['sparsity']:.1f} %"
        for row in summary["rows"]
        if row.get("expected") is not None and abs(row["expected"] - row["sparsity"]) > _FAR
    ]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"the same of {len(notes) - _MOST_NOTES} more sites"]
    outlook = summary.get("expected")
    if outlook is not None and abs(outlook["of_sparse_sites"] - summary["sparsity"]) > _FAR:
        notes.append(f"the thresholds count, not the table's `sparsity` of {100 * summary['sparsity']:.1f} %")
    return notes
