"""What `inspect` knows of a checkpoint, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.models.records.rotated import basis_in_words
from sparsepack.tables import Table, markdown


def checkpoint_table(found: Mapping[str, Any]) -> str:
    """A model as it is before it is packed."""
    rows = [[site, f"{outputs:,} x {inputs:,}"] for site, (outputs, inputs) in found["sites"].items()]
    return markdown(
        f"{found['path']}: a checkpoint, {found['model_type']} ({found['sha256'][:12]}), {found['weights']:,} weights, "
        f"{found['bytes']:,} bytes, most of them in {found['dtype']}",
        f"{found['layers']} blocks of {found['hidden']:,} channels, {found['vocabulary']:,} tokens, made for texts of "
        f"{found['context']:,}",
        Table(["site", "outputs x inputs, in each block"], rows),
        *([f"segments: {found['segments']['in_words']}"] if found["segments"] else []),
        _pruned(found["pruned"]),
        _rotated(found["rotated"]),
        f"distilled: {found['distilled']['in_words']}" if found["distilled"] else "not distilled by sparsepack",
        found["formats"],
    )


def _pruned(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not pruned by sparsepack"
    patterns = ", ".join(f"keep {pattern} in {count} matrices" for pattern, count in record["matrices"].items())
    permuted = ", inputs in another order" if record["permute"] else ""
    return f"pruned from {record['model']} ({record['model_sha256'][:12]}) by {record['method']}{permuted}: {patterns}"


def _rotated(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not rotated by sparsepack"
    into = basis_in_words(record["basis"], record["boundaries"])
    return (
        f"rotated from {record['model']} ({record['model_sha256'][:12]}) into {into}: the same function, "
        f"its logits differ by {record['error']:.1g} of their size"
    )
