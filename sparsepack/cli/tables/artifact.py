"""What an artifact holds, and whether it is intact, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.cli.tables.thresholds import thresholds_table
from sparsepack.inspection import programs_table, score_rows
from sparsepack.tables import Table, markdown

_PROBLEMS = 8  # told of one artifact


def artifact_line(description: Mapping[str, Any]) -> str:
    """One line on a file just made."""
    bits = description["bits_per_weight"]
    return (
        f"{description['path']}: {description['kind']}, {description['file_bytes']:,} bytes, "
        f"{_bits(bits['blocks'])} bits per weight in the blocks, {_bits(bits['file'])} overall, "
        f"{description['sparse_sites']} sparse sites"
    )


def artifact_table(description: Mapping[str, Any]) -> str:
    """Everything `inspect` finds in an artifact."""
    model = description["provenance"]["model"]
    parts: list[str | Table] = [
        artifact_line(description),
        f"made from {model['name']} ({model['model_type']}, {model['sha256'][:12]}) "
        f"by sparsepack {description['provenance']['sparsepack']}",
        Table(
            ["type", "tensors", "bytes", "weights"],
            [[t, e["tensors"], f"{e['bytes']:,}", f"{e['weights']:,}"] for t, e in description["types"].items()],
        ),
    ]
    if description["thresholds"]:
        parts.append(thresholds_table(description["thresholds"]))
    if description["distilled"]:
        parts.append(f"distilled: {description['distilled']['in_words']}")
    if description["refit"]:
        parts.append(f"weights of the blocks: {description['refit']['in_words']}")
    parts += [f"{text}: {figures}" for text, figures in score_rows(description["score"])]
    if description["attention"]:
        parts.append(f"attention, Double Sparsity: {description['attention']['in_words']}")
    if description["segments"]:
        parts.append(f"segments: {description['segments']['in_words']}")
    if description["neurons"]:
        parts.append(f"neurons: {description['neurons']['in_words']}")
    if description["padding_rows"]:
        parts.append(f"padding rows: {sum(description['padding_rows'].values()):,} in all")
    parts.append(programs_table(description))
    return markdown(*parts, *(f"note: {note}" for note in description["notes"]))


def verification(report: Mapping[str, Any]) -> str:
    """What `verify` found."""
    parts: list[str | Table] = []
    verdict = "passed" if report["passed"] else "FAILED"
    problems = [problem.removeprefix(f"{report['path']}: ") for problem in report["problems"]]
    if problems:  # the reason before hundreds of tensors that follow from it
        parts.append(f"{report['path']}: {verdict}: {problems[0]}")
    if report["tensors"]:
        rows = [
            [t["name"], t["type"], f"{t['error']:.5f}", f"{t['bound']:.5f}", "ok" if t["passed"] else "FAIL"]
            for t in report["tensors"]
        ]
        parts.append(Table(["tensor", "type", "relative error", "bound", ""], rows))
    parts += [f"problem: {problem}" for problem in problems[1:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        parts.append(f"and {len(problems) - _PROBLEMS} more problems, which --json lists")
    made = f" ({', '.join(report['checked'])})" if report["checked"] else ""
    if made or not problems:
        parts.append(f"{report['path']}: {verdict}{made}")
    return markdown(*parts)


def _bits(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"
