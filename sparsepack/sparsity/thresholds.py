"""The thresholds table: one row per site, as JSON that can be printed, edited and passed to `pack` and `eval`.

Per row: layer, site, target sparsity, threshold t, the share that fell at or under it on the calibration text, and
where the allocation found them, the channel weights c (score = |x_j - offset_j| * c_j) and the offsets. These two are
vectors, so they are kept as base64 of little-endian float32; editing a threshold or a sparsity does not touch them.
"""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepack.errors import ThresholdsError
from sparsepack.files.atomic import atomic_file
from sparsepack.models.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.rule import SitePolicy

SCHEMA = 1


@dataclass(frozen=True)
class SiteThreshold:
    """A row: `sparsity` is the target, `realised` what the calibration text gave; vectors are float32 [columns]."""

    layer: int
    site: str
    sparsity: float
    threshold: float
    realised: float
    channel_weights: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def policy(self) -> SitePolicy | None:
        """The rule a runtime follows; None where the site stays dense."""
        if self.sparsity == 0 and self.threshold == 0 and self.offset is None:
            return None
        threshold = torch.tensor(self.threshold, dtype=torch.float32)
        if self.channel_weights is not None:
            # A channel whose weight is zero never matters: its threshold is infinite, also where t is zero.
            weights = self.channel_weights.float()
            threshold = torch.where(weights > 0, threshold / weights, torch.inf)
        return SitePolicy(threshold, self.offset)


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
    rows: tuple[SiteThreshold, ...]

    def policies(self) -> dict[tuple[int, str], SitePolicy | None]:
        """(layer, site) -> policy."""
        return {(row.layer, row.site): row.policy() for row in self.rows}

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `ThresholdsError` unless the table is of that model and has a row for every site."""
        if self.model_sha256 != checkpoint.sha256:
            raise ThresholdsError(
                f"{checkpoint.name}: the thresholds are of another model ({self.model_sha256[:12]}, this one is "
                f"{checkpoint.sha256[:12]}); make them from a calibration of this model"
            )
        expected = {(layer, site) for layer in range(checkpoint.layers) for site in SITES}
        found = {(row.layer, row.site) for row in self.rows}
        if found != expected or len(self.rows) != len(expected):
            wrong = sorted(f"blk.{layer}.{site}" for layer, site in expected ^ found) or ["a row that stands twice"]
            raise ThresholdsError(f"{checkpoint.name}: the table does not have one row for every site: {wrong[0]}")
        for row in self.rows:
            columns = checkpoint.stacked_shape(row.site)[1]
            for name in ("channel_weights", "offset"):
                vector = getattr(row, name)
                if vector is not None and len(vector) != columns:
                    raise ThresholdsError(
                        f"layer {row.layer}, {row.site}: {name} has {len(vector)} channels, the model {columns}"
                    )

    def summary(self) -> dict[str, Any]:
        """The table without its vectors, JSON-able: for manifests and reports."""
        value = self.to_json()
        for row in value["rows"]:
            row["channel_weights"] = row["channel_weights"] is not None
            row["offset"] = row["offset"] is not None
        return value

    def to_json(self) -> dict[str, Any]:
        """The whole table as JSON-able values."""
        rows = [
            {**vars(row), "channel_weights": _encoded(row.channel_weights), "offset": _encoded(row.offset)}
            for row in self.rows
        ]
        return {"schema": SCHEMA, "kind": "thresholds", **{**vars(self), "rows": rows}}

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
        raise ThresholdsError(f"{path}: not a thresholds table ({error})") from error
    if not isinstance(value, dict) or value.get("kind") != "thresholds" or value.get("schema") != SCHEMA:
        raise ThresholdsError(
            f"{path}: not a thresholds table of schema {SCHEMA}; make one with `sparsepack thresholds`"
        )
    texts = ("model_sha256", "calibration_sha256", "allocation", "criterion", "upstream")
    head = {name: _field(value, name, str, str(path)) for name in texts}
    rows = _field(value, "rows", list, str(path))
    return Thresholds(
        **head,
        sparsity=float(_field(value, "sparsity", float, str(path))),
        rows=tuple(_row(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)),
    )


def _row(row: Any, where: str) -> SiteThreshold:
    layer, site = _field(row, "layer", int, where), _field(row, "site", str, where)
    if site not in SITES:
        raise ThresholdsError(f"{where}: site {site!r}; expected one of {', '.join(SITES)}")
    sparsity, threshold, realised = (_field(row, name, float, where) for name in ("sparsity", "threshold", "realised"))
    if not 0 <= sparsity < 1 or not 0 <= threshold < math.inf:
        raise ThresholdsError(
            f"{where}: sparsity {sparsity}, threshold {threshold}; expected 0 <= sparsity < 1, threshold >= 0"
        )
    vectors = (_vector(row, name, where) for name in ("channel_weights", "offset"))
    return SiteThreshold(layer, site, float(sparsity), float(threshold), float(realised), *vectors)


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
    if not isinstance(value[name], accepted) or isinstance(value[name], bool):
        raise ThresholdsError(f"{where}: {name} is {value[name]!r}; expected {expected}")
    return value[name]


def _vector(row: Mapping[str, Any], name: str, where: str) -> torch.Tensor | None:
    """A vector field: None, or base64 of finite little-endian float32."""
    if row.get(name) is None:
        return None
    try:
        values = np.frombuffer(base64.b64decode(row[name], validate=True), dtype="<f4").astype(np.float32)
    except (ValueError, TypeError) as error:
        raise ThresholdsError(f"{where}: {name} is not base64 of float32 ({error})") from error
    if not np.isfinite(values).all():
        raise ThresholdsError(f"{where}: {name} holds values that are not finite; expected numbers")
    return torch.from_numpy(values)


def _encoded(vector: torch.Tensor | None) -> str | None:
    return None if vector is None else base64.b64encode(vector.float().numpy().astype("<f4").tobytes()).decode()
