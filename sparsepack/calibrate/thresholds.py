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
from sparsepack.models.policy import SitePolicy

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
            wrong = sorted(expected ^ found) or ["a row that stands twice"]
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
    except (OSError, ValueError) as error:
        raise ThresholdsError(f"{path}: not a thresholds table ({error})") from error
    if not isinstance(value, dict) or value.get("kind") != "thresholds" or value.get("schema") != SCHEMA:
        raise ThresholdsError(f"{path}: not a thresholds table of schema {SCHEMA}; make one with `sparsepack thresholds`")
    try:
        rows = tuple(_row(path, number, row) for number, row in enumerate(value["rows"], 1))
        fields = {name: value[name] for name in Thresholds.__dataclass_fields__ if name != "rows"}
    except (KeyError, TypeError) as error:
        raise ThresholdsError(f"{path}: a field is missing ({error})") from error
    return Thresholds(**fields, rows=rows)


def _row(path: Path, number: int, row: Mapping[str, Any]) -> SiteThreshold:
    where = f"{path}, row {number}"
    try:
        vectors = {name: _decoded(row[name]) for name in ("channel_weights", "offset")}
    except (ValueError, TypeError) as error:
        raise ThresholdsError(f"{where}: a vector is not base64 of float32 ({error})") from error
    made = SiteThreshold(
        row["layer"], row["site"], float(row["sparsity"]), float(row["threshold"]), float(row["realised"]), **vectors
    )
    if made.site not in SITES or not isinstance(made.layer, int):
        raise ThresholdsError(f"{where}: layer {made.layer!r}, site {made.site!r}; expected a site of {', '.join(SITES)}")
    if not 0 <= made.sparsity < 1 or not made.threshold >= 0 or math.isinf(made.threshold):
        raise ThresholdsError(
            f"{where}: sparsity {made.sparsity}, threshold {made.threshold}; expected 0 <= sparsity < 1, threshold >= 0"
        )
    return made


def _encoded(vector: torch.Tensor | None) -> str | None:
    return None if vector is None else base64.b64encode(vector.float().numpy().astype("<f4").tobytes()).decode()


def _decoded(text: str | None) -> torch.Tensor | None:
    if text is None:
        return None
    values = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("not all values are finite")
    return torch.from_numpy(values)
