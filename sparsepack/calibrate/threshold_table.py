"""The thresholds table: the rule of every site, as JSON that can be printed, edited and passed to `pack` and `eval`.

`threshold` is the field that counts: a channel is skipped where its score is at most that. A threshold of 0 keeps a
site dense (but for exact zeros, where `sparsity` is above 0). All else in a row says where the threshold comes from:
`sparsity` is what it was searched for, `realised` the share that fell at or under it on the calibration text, `curve`
the thresholds that give other shares there (`models.sites.CURVE_SHARES`), `weights` how many the site has,
`may_be_sparse` whether it was allowed to skip. Where the allocation found them, there are the channel weights c
(score = |x_j - offset_j| * c_j) and the offsets: vectors, kept as base64 of little-endian float32. Of
a format with planes there are `steps`, times which the threshold is that of each level, of `experts` with an input
each weights of each, one after the other, and `row_costs`, what errors of outputs cost, for who quantises the matrix.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepack.errors import ThresholdsError
from sparsepack.files import stored
from sparsepack.files.atomic import atomic_file
from sparsepack.models.activity import Skipped, skipped
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import ALL_SITES, BASIS, SITES
from sparsepack.models.sites import CURVE_SHARES, Rules, SiteKey, SiteRule

SCHEMA = 1
_LONGEST = 1000
_LARGEST = 3.4e38  # float32: what thresholds are compared in
_VECTORS = ("channel_weights", "offset")
_HEAD = ("model_sha256", "calibration_sha256", "allocation", "criterion", "sparsity", "upstream")


@dataclass(frozen=True)
class Thresholds:
    """A whole table and where it comes from.

    sparsity     -- the target, weighted by parameters over the sites that may be sparse
    upstream     -- "sparse": taken with everything before each site sparse already; "dense": the papers' way
    weights      -- how many weights each site has; a table that somebody wrote by hand may not say so
    sparse_sites -- those that may be sparse
    of_bases     -- weights of changes of basis between blocks, which are always read
    has_row      -- whether the model's family has one; if not, blocks have sites of any name
    """

    model_sha256: str
    calibration_sha256: str
    allocation: str
    criterion: str
    sparsity: float
    upstream: str
    rules: Rules
    weights: Mapping[SiteKey, int] = field(default_factory=dict)
    sparse_sites: frozenset[SiteKey] = frozenset()
    of_bases: int = 0
    has_row: bool = True

    def __repr__(self) -> str:
        return (
            f"Thresholds({self.allocation}, sparsity {self.sparsity:.3g}, {len(self.sparse_sites)} of "
            f"{len(self.rules)} sites may be sparse)"
        )

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `ThresholdsError` unless the table is of that model and has a rule for every site."""
        if self.model_sha256 != checkpoint.sha256:
            raise ThresholdsError(
                f"{checkpoint.name}: the thresholds are of another model ({self.model_sha256[:12]}, this one is "
                f"{checkpoint.sha256[:12]}); make them from a calibration of this model"
            )
        expected = {*checkpoint.sites}
        if self.rules.keys() != expected:
            wrong = min(f"blk.{layer}.{site}" for layer, site in expected ^ self.rules.keys())
            raise ThresholdsError(f"{checkpoint.name}: the table does not have one row for every site: {wrong}")
        for (layer, site), rule in self.rules.items():
            rows, columns = checkpoint.stacked_shape(site, layer)
            for name in _VECTORS:
                vector = getattr(rule, name)
                if vector is not None and vector.shape[-1] != columns:
                    raise ThresholdsError(
                        f"layer {layer}, {site}: {name} has {vector.shape[-1]} channels, the model {columns}"
                    )
            costs = rule.row_costs
            if costs is not None and (len(costs) != rows or not (costs >= 0).all()):
                raise ThresholdsError(
                    f"layer {layer}, {site}: row_costs are {len(costs)} numbers, expected {rows} from 0 on; make the "
                    "table again"
                )

    def expected(self) -> dict[SiteKey, float | None]:
        """Share of inactive channels that each site's threshold gives on the calibration text, edited or not."""
        return {key: rule.expected() for key, rule in self.rules.items()}

    def may_skip(self) -> frozenset[SiteKey]:
        """The sites that may be sparse, with those that somebody has given a threshold."""
        return self.sparse_sites | {key for key, rule in self.rules.items() if not rule.dense}

    def outlook(self) -> Skipped | None:
        """What a decoded token will skip on text like the calibration text; None where that is not known."""
        known = {key: share for key, share in self.expected().items() if share is not None}
        if len(known) < len(self.rules) or self.weights.keys() != self.rules.keys():
            return None
        return skipped({**self.weights, (-1, BASIS): self.of_bases}, known, self.may_skip())

    def summary(self) -> dict[str, Any]:
        """The table without its vectors, JSON-able: for manifests and reports. It also says what will happen:
        `expected`, a share, in each row, and for all together as `models.activity.Skipped`; None: not known."""
        value, outlook = self.to_json(), self.outlook()
        for row, expected in zip(value["rows"], self.expected().values(), strict=True):
            row |= {name: row[name] is not None for name in _VECTORS} | {"expected": expected}
            row.pop("row_costs", None)
        return {**value, "expected": outlook and asdict(outlook)}

    def to_json(self) -> dict[str, Any]:
        """The whole table as JSON-able values."""
        head = {name: getattr(self, name) for name in _HEAD}
        head |= {"of_bases": self.of_bases} if self.of_bases else {}
        head |= {} if self.has_row else {"has_row": False}
        rows = rules_to_json(self.rules)
        for key, row in zip(self.rules, rows, strict=True):
            row |= {"weights": self.weights.get(key), "may_be_sparse": key in self.sparse_sites}
        return {"schema": SCHEMA, "kind": "thresholds", **head, "rows": rows}

    def write(self, path: Path, overwrite: bool = False) -> None:
        """Write as JSON, one row a line, whole or not at all."""
        value = self.to_json()
        rows = ",\n".join("    " + json.dumps(row) for row in value.pop("rows"))
        head = json.dumps(value, indent=2)[:-2]
        with atomic_file(path, overwrite) as temporary:
            temporary.write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def read_thresholds(path: Path) -> Thresholds:
    """Read a table. Raises `ThresholdsError` naming the row and field that is wrong."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ThresholdsError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ThresholdsError(f"{path}: not a thresholds table ({stored.shown(error)})") from error
    if not isinstance(value, dict) or value.get("kind") != "thresholds" or value.get("schema") != SCHEMA:
        raise ThresholdsError(
            f"{path}: not a thresholds table of schema {SCHEMA}; make one with `sparsepack thresholds`"
        )
    texts = ("model_sha256", "calibration_sha256", "allocation", "criterion", "upstream")
    head = {name: _field(value, name, str, str(path)) for name in texts}
    of_bases = _field({"of_bases": 0, **value}, "of_bases", int, str(path))
    if not 0 <= of_bases < 2**63:
        raise ThresholdsError(f"{path}: of_bases is {of_bases}; expected a whole number")
    rows = _field(value, "rows", list, str(path))
    has_row = value.get("has_row") is not False
    rules = rules_of_json(rows, str(path), has_row)
    if has_row:  # of others `check_model` knows which sites there are
        _check_whole(rules, str(path))
    counted = {key: row["weights"] for key, row in zip(rules, rows, strict=True) if row.get("weights") is not None}
    for (layer, site), count in counted.items():
        if type(count) is not int or not 1 <= count < 2**63:
            shown = str(count)[:60]
            raise ThresholdsError(f"{path}: layer {layer}, {site}: weights is {shown}; expected a whole number")
    allowed = {key for key, row in zip(rules, rows, strict=True) if row.get("may_be_sparse", not rules[key].dense)}
    return Thresholds(
        **head,
        sparsity=float(_field(value, "sparsity", float, str(path))),
        rules=rules,
        weights=counted,
        sparse_sites=frozenset(allowed),
        of_bases=of_bases,
        has_row=has_row,
    )


def _check_whole(rules: Rules, where: str) -> None:
    """Raise `ThresholdsError` unless there are rows for every site of the layers from 0 on."""
    layers, named = {layer for layer, _ in rules}, {site for _, site in rules}
    for layer in range(max(1, len(layers))):
        for site in (site for site in ALL_SITES if site in SITES or site in named):
            if (layer, site) not in rules:
                raise ThresholdsError(f"{where}: the row of layer {layer}, {site} is missing; make the table again")


def rules_to_json(rules: Rules) -> list[dict[str, Any]]:
    """The one form in which rules are kept outside of artifacts: a JSON-able row each, exact."""
    return [
        {
            "layer": layer,
            "site": site,
            "sparsity": rule.sparsity,
            "threshold": rule.threshold,
            "realised": rule.realised,
            "curve": list(rule.curve),
            **{name: _encoded(getattr(rule, name)) for name in _VECTORS},
            **({} if rule.steps is None else {"steps": rule.steps.tolist()}),
            **({} if rule.row_costs is None else {"row_costs": _encoded(rule.row_costs)}),
            **({"experts": len(rule.unit)} if rule.unit.dim() == 2 else {}),
        }
        for (layer, site), rule in rules.items()
    ]


def rules_of_json(rows: Sequence[Any], where: str, has_row: bool = True) -> dict[SiteKey, SiteRule]:
    """The inverse of `rules_to_json`. Raises `ThresholdsError` naming the row and field that is wrong.

    has_row -- whether the family has one, so that sites are those of `ALL_SITES`
    """
    rules: dict[SiteKey, SiteRule] = {}
    for number, row in enumerate(rows, 1):
        key, rule = _rule(row, f"{where}, row {number}", has_row)
        if key in rules:
            raise ThresholdsError(f"{where}, row {number}: layer {key[0]}, {key[1]}: a row that stands twice")
        rules[key] = rule
    return rules


def _rule(row: Any, where: str, has_row: bool) -> tuple[SiteKey, SiteRule]:
    layer, site = _field(row, "layer", int, where), _field(row, "site", str, where)
    if has_row and site not in ALL_SITES:
        raise ThresholdsError(f"{where}: site {site[:60]!r}; expected one of {', '.join(ALL_SITES)}")
    sparsity, threshold, realised = (_field(row, name, float, where) for name in ("sparsity", "threshold", "realised"))
    if not 0 <= sparsity < 1 or not 0 <= threshold < math.inf:
        raise ThresholdsError(
            f"{where}: sparsity {sparsity}, threshold {threshold}; expected 0 <= sparsity < 1, threshold >= 0"
        )
    vectors = {name: _vector(row, name, where) for name in _VECTORS}
    shares = float(sparsity), float(realised), _curve(row, where)
    weights, steps = vectors["channel_weights"], _steps(row, where)
    if "experts" in row and weights is not None:
        experts = _field(row, "experts", int, where)
        if experts < 1 or len(weights) % experts:
            raise ThresholdsError(f"{where}: {len(weights)} channel weights do not divide by {experts} experts")
        weights = weights.view(experts, -1)
    costs = _vector(row, "row_costs", where)
    return (layer, site), SiteRule(float(threshold), vectors["offset"], weights, *shares, costs, steps)


def _steps(row: Any, where: str) -> torch.Tensor | None:
    if row.get("steps") is None:
        return None
    steps = _field(row, "steps", list, where)
    if not steps or not all(isinstance(s, int | float) and 0 <= s < math.inf for s in steps) or steps != sorted(steps):
        raise ThresholdsError(
            f"{where}: steps {str(steps)[:60]}; expected numbers from 0 on, none below the one before"
        )
    return torch.tensor(steps, dtype=torch.float32)


_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    list: ((list,), "a list"),
}


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    """A field of a JSON object, checked to be of that kind."""
    if not isinstance(value, dict) or name not in value:
        raise ThresholdsError(f"{where}: the field {name!r} is missing")
    accepted, expected = _KINDS[kind]
    found = value[name]
    if isinstance(found, bool) or not isinstance(found, accepted) or not _usable(found):
        shown = repr(found)
        raise ThresholdsError(
            f"{where}: {name} is {shown if len(shown) <= 60 else shown[:60] + '...'}; expected {expected}"
        )
    return found


def _usable(value: Any) -> bool:
    """Whether text can be printed and a number computed with."""
    if isinstance(value, str):
        return value.isprintable() and len(value) <= _LONGEST
    return not isinstance(value, int | float) or -_LARGEST <= value <= _LARGEST


def _curve(row: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """The curve of a row; it is empty for a dense site, and in a row that somebody wrote by hand."""
    values = row.get("curve") or []
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    rising = numbers and sorted(values) == values and all(0 <= value <= _LARGEST for value in values)
    if not rising or len(values) not in (0, len(CURVE_SHARES)):
        raise ThresholdsError(
            f"{where}: curve; expected {len(CURVE_SHARES)} numbers, none below the one before (it is not for editing)"
        )
    return tuple(map(float, values))


def _vector(row: Mapping[str, Any], name: str, where: str) -> torch.Tensor | None:
    """A vector field: None, or base64 of finite little-endian float32."""
    if row.get(name) is None:
        return None
    try:
        values = np.frombuffer(base64.b64decode(row[name], validate=True), dtype="<f4").astype(np.float32)
    except (ValueError, TypeError) as error:
        raise ThresholdsError(f"{where}: {name} is not base64 of float32 ({stored.shown(error)})") from error
    if not np.isfinite(values).all():
        raise ThresholdsError(f"{where}: {name} holds values that are not finite; expected numbers")
    return torch.from_numpy(values)


def _encoded(vector: torch.Tensor | None) -> str | None:
    return None if vector is None else base64.b64encode(vector.float().numpy().astype("<f4").tobytes()).decode()
