"""How much a decoded token skips: one definition for everything that measures, judges or shows it.

It is the share of all block weights - of the site matrices of every block, also of those that stay dense - that lie in
inactive columns, or, where an MLP is stored by neurons, in the records of inactive ones. Beside it stands the same
share of the sites that may be sparse: a target is about these. The two differ only where sites were kept dense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it brings torch, and recipes show figures without that
    from sparsepack.models.records.rule import Rules, SiteKey


@dataclass(frozen=True)
class Skipped:
    """Shares from 0 to 1: of all block weights, and of the sites that may be sparse (0 where there are none)."""

    overall: float
    of_sparse_sites: float


def skipped(
    weights: Mapping[SiteKey, float], inactive: Mapping[SiteKey, float], sparse_sites: Collection[Any]
) -> Skipped:
    """What is skipped.

    weights      -- of every site of every block, in any unit
    inactive     -- share of inactive channels, by site; a site that is not named skips nothing
    sparse_sites -- those that may be sparse; one that does skip is counted with them
    """
    saved = sum(weights[key] * share for key, share in inactive.items())
    sparse = sum(weight for key, weight in weights.items() if key in sparse_sites or inactive.get(key))
    return Skipped(saved / sum(weights.values()), saved / sparse if sparse else 0.0)


def shown(overall: float, of_sparse_sites: float) -> str:
    """For people: "43.4 %", or where the two differ "43.4 % (49.6 % of sparse sites)"."""
    beside = "" if abs(overall - of_sparse_sites) < 5e-4 else f" ({100 * of_sparse_sites:.1f} % of sparse sites)"
    return f"{100 * overall:.1f} %{beside}"


def sparse_sites_of(manifest: Mapping[str, Any], rules: Rules) -> set[SiteKey]:
    """The sites of an artifact that may be sparse: those that skip, and those whose share of the target is nothing."""
    table = manifest.get("thresholds")
    rows = table.get("rows") if isinstance(table, Mapping) else None
    listed = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    named = [(row.get("layer"), row.get("site")) for row in listed if row.get("may_be_sparse") is True]
    allowed = {(layer, site) for layer, site in named if isinstance(layer, int) and isinstance(site, str)}
    return allowed | {key for key, rule in rules.items() if not rule.dense}
