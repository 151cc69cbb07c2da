"""The model card of an artifact: a README.md for people and the hub, from its manifest and what was measured."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from sparsepack import __version__
from sparsepack.artifacts.inspect import describe
from sparsepack.errors import UserError
from sparsepack.eval.standard_error import with_error
from sparsepack.publish.results import Results, read_results
from sparsepack.publish.templates import render

MARK = "<!-- Made by `sparsepack card`. -->"
"""In every card: what carries it may be replaced by a new one, what does not was written by hand."""


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
        measured = {
            "accuracy": [_accuracy(row) for row in found.perplexities],
            "tasks": _tasks(found),
            "speed": _speed(found),
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files = ", ".join(map(str, results))
        raise UserError(f"{files}: damaged, or of another sparsepack ({error!r}); measure again") from error
    return render(
        "card.md.jinja",
        mark=Markup(MARK),
        head=Markup(yaml.safe_dump(_head(description), sort_keys=False, allow_unicode=True)),
        heading=name or f"{Path(description['provenance']['model']['name']).name}, {description['kind']}",
        artifact=description,
        file=file or Path(path).name,
        version=__version__,
        compared_with=sorted({e["against"] for e in found.evaluations if e.get("against")}),
        **measured,
    )


def _head(description: Mapping[str, Any]) -> dict[str, Any]:
    model = description["provenance"]["model"]
    tags = ["sparsepack", description["kind"], *(["activation-sparsity"] if description["sparse_sites"] else [])]
    tags += ["pruned"] if description["pruning"] else []
    tags += ["sparse-attention"] if description["attention"] else []
    if Path(description["path"]).suffix == ".gguf":
        tags.append("gguf")
    head: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": tags}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model["name"]) and not Path(model["name"]).exists():
        head |= {"base_model": model["name"], "base_model_relation": "quantized"}
    return head


def _accuracy(row: Mapping[str, Any]) -> dict[str, str]:
    compared = "kl_divergence" in row
    return {
        "text": Path(row["text"]).name,
        "protocol": row["protocol"],
        "windows": f"{row['windows']} x {row['context']}",
        "perplexity": with_error(row["perplexity"], 3),
        "ratio": with_error(row["perplexity_ratio"], 4) if compared else "",
        "kl": with_error(row["kl_divergence"], 4) if compared else "",
        "same": with_error(row["top_token_agreement"], 4) if compared else "",
        "skipped": f"{100 * row['realised_sparsity']['overall']:.1f} %",
    }


def _tasks(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "task": name,
            "metric": metric,
            "value": with_error(value, 4),
            "samples": task["samples"],
            "protocol": evaluation["tasks"]["protocol"],
        }
        for evaluation in results.evaluations
        if evaluation["tasks"]
        for name, task in evaluation["tasks"]["tasks"].items()
        for metric, value in task["metrics"].items()
    ]


def _speed(results: Results) -> list[dict[str, str]]:
    if results.bench is None:
        return []
    return [
        {
            "what": f"prefill of {row['n_prompt']} tokens" if row["n_prompt"] else f"decoding {row['n_gen']} tokens",
            "mode": row["mode"],
            "speed": f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f}",
            "skipped": "" if row["realised_sparsity"] is None else f"{100 * row['realised_sparsity']:.1f} %",
            "machine": row["gpu_info"] or f"{row['cpu_info']}, {row['n_threads']} threads",
        }
        for row in results.bench["tests"]
    ]
