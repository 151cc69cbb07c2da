"""The thresholds table: the rule of every site, as JSON that can be printed, edited and passed to `pack` and `eval`.

Per row: layer, site, target sparsity, threshold t, the share that fell at or under it on the calibration text, and
where the allocation found them, the channel weights c (score = |x_j - offset_j| * c_j) and the offsets. These two are
vectors, so they are kept as base64 of little-endian float32; editing a threshold or a sparsity does not touch them.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepack.errors import ThresholdsError
from sparsepack.files import stored
from sparsepack.files.atomic import atomic_file
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.rule import Rules, SiteKey, SiteRule

SCHEMA = 1
_LONGEST = 1000
_LARGEST = 3.4e38  # float32: what thresholds are compared in
_VECTORS = ("channel_weights", "offset")


@dataclass(frozen=True)
class Thresholds:
    """A whole table and where it comes from.

    sparsity -- the target, weighted by parameters over the sites that may be sparse
    upstream -- "sparse": taken with everything before each site sparse already; "dense": the papers' way
    """

    model_sha256: str
    calibration_sha256: str
    allocation: str
    criterion: str
    sparsity: float
    upstream: str
    rules: Rules

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `ThresholdsError` unless the table is of that model and has a rule for every site."""
        if self.model_sha256 != checkpoint.sha256:
            raise ThresholdsError(
                f"{checkpoint.name}: the thresholds are of another model ({self.model_sha256[:12]}, this one is "
                f"{checkpoint.sha256[:12]}); make them from a calibration of this model"
            )
        expected = {(layer, site) for layer in range(checkpoint.layers) for site in SITES}
        if self.rules.keys() != expected:
            wrong = min(f"blk.{layer}.{site}" for layer, site in expected ^ self.rules.keys())
            raise ThresholdsError(f"{checkpoint.name}: the table does not have one row for every site: {wrong}")
        for (layer, site), rule in self.rules.items():
            columns = checkpoint.stacked_shape(site)[1]
            for name in _VECTORS:
                vector = getattr(rule, name)
                if vector is not None and len(vector) != columns:
                    raise ThresholdsError(
                        f"layer {layer}, {site}: {name} has {len(vector)} channels, the model {columns}"
                    )

    def summary(self) -> dict[str, Any]:
        """The table without its vectors, JSON-able: for manifests and reports."""
        value = self.to_json()
        for row in value["rows"]:
            row |= {name: row[name] is not None for name in _VECTORS}
        return value

    def to_json(self) -> dict[str, Any]:
        """The whole table as JSON-able values."""
        head = {name: value for name, value in vars(self).items() if name != "rules"}
        return {"schema": SCHEMA, "kind": "thresholds", **head, "rows": rules_to_json(self.rules)}

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
    rows = _field(value, "rows", list, str(path))
    rules = rules_of_json(rows, str(path))
    _check_whole(rules, str(path))
    return Thresholds(**head, sparsity=float(_field(value, "sparsity", float, str(path))), rules=rules)


def _check_whole(rules: Rules, where: str) -> None:
    """Raise `ThresholdsError` unless there are rows for every site of the layers from 0 on."""
    layers = {layer for layer, _ in rules}
    for layer in range(max(1, len(layers))):
        for site in SITES:
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
            **{name: _encoded(getattr(rule, name)) for name in _VECTORS},
        }
        for (layer, site), rule in rules.items()
    ]


def rules_of_json(rows: Sequence[Any], where: str) -> dict[SiteKey, SiteRule]:
    """The inverse of `rules_to_json`. Raises `ThresholdsError` naming the row and field that is wrong."""
    rules: dict[SiteKey, SiteRule] = {}
    for number, row in enumerate(rows, 1):
        key, rule = _rule(row, f"{where}, row {number}")
        if key in rules:
            raise ThresholdsError(f"{where}, row {number}: layer {key[0]}, {key[1]}: a row that stands twice")
        rules[key] = rule
    return rules


def _rule(row: Any, where: str) -> tuple[SiteKey, SiteRule]:
    layer, site = _field(row, "layer", int, where), _field(row, "site", str, where)
    if site not in SITES:
        raise ThresholdsError(f"{where}: site {site[:60]!r}; expected one of {', '.join(SITES)}")
    sparsity, threshold, realised = (_field(row, name, float, where) for name in ("sparsity", "threshold", "realised"))
    if not 0 <= sparsity < 1 or not 0 <= threshold < math.inf:
        raise ThresholdsError(
            f"{where}: sparsity {sparsity}, threshold {threshold}; expected 0 <= sparsity < 1, threshold >= 0"
        )
    vectors = {name: _vector(row, name, where) for name in _VECTORS}
    return (layer, site), SiteRule(float(threshold), sparsity=float(sparsity), realised=float(realised), **vectors)


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
