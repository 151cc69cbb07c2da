"""How active a model was: how much a decoded token skips, and how often each neuron of an MLP was active.

What is skipped has one definition for everything that measures, judges or shows it. It is the share of all block
weights - of the site matrices of every block, also of those that stay dense - that lie in inactive columns, or, where
an MLP is stored by neurons, in the records of inactive ones. Beside it stands the same share of the sites that may be
sparse: a target is about these. The two differ only where sites were kept dense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsepack.errors import PackingError

if TYPE_CHECKING:  # torch, without which recipes show figures
    from torch import Tensor

    from sparsepack.models.architecture import Architecture
    from sparsepack.models.sites import Rules, SiteKey


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


def bits_read(bits: float, unread: float, target: float | None = None) -> str:
    """For people, of a format with planes: "3.41 bits read (target 3.40)".

    bits   -- that a weight has in all planes, scales of superblocks included
    unread -- share of them that a decoded token does not read, of all block weights
    target -- the share that thresholds were made for; None: there are none, or they do not count
    """
    made_for = "" if target is None else f" (target {bits * (1 - target):.2f})"
    return f"{bits * (1 - unread):.2f} bits read{made_for}"


def sparse_sites_of(manifest: Mapping[str, Any], rules: Rules) -> set[SiteKey]:
    """The sites of an artifact that may be sparse: those that skip, and those whose share of the target is nothing."""
    table = manifest.get("thresholds")
    rows = table.get("rows") if isinstance(table, Mapping) else None
    listed = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    named = [(row.get("layer"), row.get("site")) for row in listed if row.get("may_be_sparse") is True]
    allowed = {(layer, site) for layer, site in named if isinstance(layer, int) and isinstance(site, str)}
    return allowed | {key for key, rule in rules.items() if not rule.dense}


@dataclass(frozen=True)
class NeuronCounts:
    """How often each neuron was active on a text.

    active -- int64 [layers, neurons]: tokens at which each was
    tokens -- that were counted
    sha256 -- of what counted them
    origin -- what that is: "calibration" or "trace"
    """

    active: Tensor
    tokens: int
    sha256: str
    origin: str = "calibration"

    @property
    def frequency(self) -> Tensor:
        """Share of the tokens at which each neuron was active: float64 [layers, neurons]."""
        return self.active.double() / self.tokens

    @property
    def density(self) -> list[float]:
        """For each layer, the share of its neurons that a token needs."""
        return [float(layer.double().mean() / self.tokens) for layer in self.active]


def check_counts(counts: NeuronCounts, architecture: Architecture) -> None:
    """Raise `PackingError` unless the counts can be those of the model."""
    found, expected = tuple(counts.active.shape), (architecture.layers, architecture.intermediate)
    if found != expected:
        raise PackingError(
            f"the {counts.origin} counted the neurons {list(found)} [layers, neurons], the model has {list(expected)}; "
            "calibrate this model"
        )
    if counts.tokens < 1 or not bool(((counts.active >= 0) & (counts.active <= counts.tokens)).all()):
        raise PackingError(f"counts of neurons: expected 0 to {counts.tokens} tokens each; calibrate again")
