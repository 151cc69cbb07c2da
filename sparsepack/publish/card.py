"""The model card of an artifact: a README.md for people and the hub, from its manifest and what was measured."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from sparsepack.bench.table import speed_table
from sparsepack.errors import UserError
from sparsepack.eval.tables import accuracy_tables
from sparsepack.formats.inspect import describe
from sparsepack.formats.manifest import DISTILLATION, PRUNING, ROTATION
from sparsepack.inspection import programs_table, score_rows
from sparsepack.models.records.rotated import basis_in_words
from sparsepack.publish.results import read_results
from sparsepack.publish.templates import render, table
from sparsepack.version import __version__

MARK = "<!-- Made by `sparsepack card`. -->"
"""Every card that `sparsepack card` made has this line, and may be replaced by a new one; a card without the line was
written by hand."""


def model_card(path: Path, results: Sequence[Path] = (), name: str | None = None, *, file: str | None = None) -> str:
    """The card of the artifact at `path`, Markdown with the YAML head that the hub reads.

    results -- JSON files of `run`, `eval` or `bench`; without any, the card says how to measure
    name    -- its heading (default: the source model's name)
    file    -- what the artifact will be called (default: as it is now)

    Raises `UserError` for results that are damaged or of another model, `ArtifactError` where there is no artifact of
    ours.
    """
    description = describe(path)
    found = read_results(results, description)
    try:
        measured = [*accuracy_tables(found.evaluations)]
        speed = [speed_table(found.bench)] if found.bench else []
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files = ", ".join(map(str, results))
        raise UserError(f"{files}: damaged, or of another sparsepack ({error!r}); measure again") from error
    rotation = description["provenance"][ROTATION]
    return render(
        "card.md.jinja",
        mark=Markup(MARK),
        head=Markup(yaml.safe_dump(_head(description), sort_keys=False, allow_unicode=True)),
        heading=name or f"{Path(description['provenance']['model']['name']).name}, {description['kind']}",
        artifact=description,
        texts=_calibrated_on(description["provenance"]["recipe"]),
        file=file or Path(path).name,
        version=__version__,
        made_from=_made_from(description["provenance"]),
        rotated_into=basis_in_words(rotation["basis"], rotation.get("boundaries", ())) if rotation else None,
        compared_with=sorted({e["against"] for e in found.evaluations if e.get("against")}),
        measured=[table(found) for found in measured],
        speed=[table(found) for found in speed],
        scored=score_rows(description["score"]),
        programs=table(programs_table(description)),
    )


def _calibrated_on(recipe: Mapping[str, Any] | None) -> list[str]:
    """The texts that a recipe's manifest names, if it does."""
    named = ((recipe or {}).get("calibrate") or {}).get("text") or []
    return [named] if isinstance(named, str) else list(named)


def _made_from(provenance: Mapping[str, Any]) -> str | None:
    """The name of the model that all was made from, where other verbs made another of it, in their order."""
    for step in (ROTATION, DISTILLATION, PRUNING):
        if (made := provenance[step]) is not None:
            return str(made.get("teacher") or made["model"])
    return None


def _head(description: Mapping[str, Any]) -> dict[str, Any]:
    model = description["provenance"]["model"]
    tags = ["sparsepack", description["kind"], *(["activation-sparsity"] if description["sparse_sites"] else [])]
    tags += ["pruned"] if description["pruning"] else []
    tags += ["sparse-attention"] if description["attention"] else []
    if Path(description["path"]).suffix == ".gguf":
        tags.append("gguf")
    head: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": tags}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model["name"]) and not os.path.exists(model["name"]):
        head |= {"base_model": model["name"], "base_model_relation": "quantized"}
    return head
