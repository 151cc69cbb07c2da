"""`inspect`: what anything that sparsepack makes holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.errors import ArtifactError, CheckpointError
from sparsepack.eval.results import with_error
from sparsepack.progress import format_count
from sparsepack.tables import Table

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.sources import StoredType


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint, a calibration folder, a trace, a thresholds table or an artifact holds, JSON-able.

    `kind` says which it is: "calibration" (its manifest, `attention_channels`: `calibration.channel_report`,
    `attention_tokens`: `calibration.tokens.token_report`, and `neurons`: `tracing.activity_report`), "trace" (its
    manifest and `neurons`), "thresholds" (the table without its vectors), "checkpoint" (the model's sizes, what other
    verbs recorded of it, and which formats can hold it), or the format of an artifact (`formats.inspect.describe`).

    Raises `UserError` subclasses for what is damaged or not ours.
    """
    return detect_kind(path).read(path)


@dataclass(frozen=True)
class Kind:
    """What a path may hold. The first row of `KINDS` whose `matches` says yes is the path's; `read` tells of it."""

    name: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], dict[str, Any]]


def detect_kind(path: Path) -> Kind:
    """The row of what lies there: an artifact unless another row matches."""
    return next(kind for kind in KINDS if kind.matches(path))


def _is_calibration(path: Path) -> bool:
    from sparsepack.formats.open import is_artifact

    return path.is_dir() and not is_artifact(path)


def _is_checkpoint(path: Path) -> bool:
    from sparsepack.formats.containers.gguf import is_ours
    from sparsepack.formats.open import is_checkpoint_folder

    if path.is_dir():
        return is_checkpoint_folder(path)
    try:
        return path.suffix == ".gguf" and not is_ours(path)
    except ArtifactError:  # damaged, which is said when it is read
        return False


def _inspect_checkpoint(path: Path) -> dict[str, Any]:
    from collections import Counter
    from math import prod

    from sparsepack.files.tensors import type_name
    from sparsepack.formats.table import holders
    from sparsepack.models.checkpoint.checkpoint import open_checkpoint
    from sparsepack.models.checkpoint.configuration import segments_summary
    from sparsepack.models.checkpoint.quantised import types_alone
    from sparsepack.models.family import HEAD
    from sparsepack.models.provenance import distillation_in_words, distillation_record, pruning_record, rotation_record

    try:
        checkpoint = open_checkpoint(path, hashed=True)
    except CheckpointError as error:
        alone = types_alone(path)
        if alone is None:
            raise
        return {"kind": "checkpoint", "path": str(path), "model_type": alone[0], "refused": str(error)} | _stored(
            alone[1]
        )
    record, source = pruning_record(checkpoint.path), checkpoint.source
    shapes = {name: shape for name, shape in source.shapes.items() if name != HEAD or not checkpoint.tied}
    pruned = None
    if record is not None:
        kept = Counter(f"{pattern.keep} of {pattern.of}" for pattern in record.patterns.values())
        pruned = {**record.summary, "matrices": dict(kept)}
    rotation, distilled = rotation_record(checkpoint.path), distillation_record(checkpoint.path)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "model_type": checkpoint.family.model_type,
        "sha256": checkpoint.sha256,
        "layers": checkpoint.layers,
        "segments": segments_summary(checkpoint.bases),
        "hidden": int(checkpoint.config.hidden_size),
        "vocabulary": int(checkpoint.config.vocab_size),
        "context": int(checkpoint.config.max_position_embeddings),
        "sites": {site: list(checkpoint.stacked_shape(site)) for site in checkpoint.family.projections_of(0)},
        "weights": sum(prod(shape) for shape in shapes.values()),
        "dtype": type_name(checkpoint.dtype),
        "refused": None,
        "grid": checkpoint.grid,
        "pruned": pruned,
        "rotated": dict(rotation.summary) if rotation else None,
        "distilled": {**distilled.summary, "in_words": distillation_in_words(distilled.summary)} if distilled else None,
        "formats": holders(checkpoint),
    } | _stored(checkpoint.stored_types)


def _stored(types: Sequence[StoredType]) -> dict[str, Any]:
    """How a checkpoint's tensors are stored."""
    return {
        "bytes": sum(each.nbytes for each in types),
        "stored": [{**asdict(each), "bits_per_weight": each.bits} for each in types],
    }


def _inspect_thresholds(path: Path) -> dict[str, Any]:
    from sparsepack.calibrate.threshold_table import read_thresholds

    return read_thresholds(path).summary()


def _inspect_artifact(path: Path) -> dict[str, Any]:
    from sparsepack.formats.inspect import describe

    return describe(path)


def _inspect_calibration(path: Path) -> dict[str, Any]:
    from sparsepack.calibrate import folder
    from sparsepack.calibrate.activity_report import activity_report
    from sparsepack.calibrate.statistics import (
        activity,
        channel_report,
        given,
        has_experts,
        importance,
        token_report,
        told_of_starved,
    )

    calibration = folder.load(path)
    experts, row = has_experts(calibration), calibration.manifest["attention"] is not None
    return {
        **calibration.manifest,
        "attention_channels": channel_report(heads) if row and (heads := importance(calibration)) else None,
        "attention_tokens": token_report(calibration) if row else None,
        "neurons": activity_report([activity(calibration)], "experts" if experts else "neurons") if row else None,
        "given": given(calibration).tolist() if experts else None,
        "starved": told_of_starved(calibration),
    }


def _inspect_trace(path: Path) -> dict[str, Any]:
    from sparsepack.calibrate.activity_report import activity_report
    from sparsepack.calibrate.trace_file import load

    trace = load(path)
    sessions = [trace.activity(session) for session in range(len(trace.sessions))]
    return {
        **{key: value for key, value in trace.manifest.items() if key != "files"},
        "neurons": activity_report(sessions, trace.unit),
    }


KINDS = (
    Kind("checkpoint", _is_checkpoint, _inspect_checkpoint),
    Kind("trace", lambda path: (path / "trace.json").is_file(), _inspect_trace),
    Kind("calibration", _is_calibration, _inspect_calibration),
    Kind("thresholds", lambda path: path.suffix == ".json", _inspect_thresholds),
    Kind("artifact", lambda path: True, _inspect_artifact),
)
"""The rows, in the order in which they are asked whether a path is theirs."""


_PROTOCOLS = {"dense": "dense, nothing skipped", "decode": "decode, as tokens are generated"}


def score_rows(score: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return text and figures of each protocol under which packing was scored (`packing_score.score_artifact`); nothing
    without a score."""
    if score is None:
        return []
    windows = f"{format_count(score['windows'], 'window')} of {score['context']:,} tokens"
    return [
        (f"held-out text ({windows}), {_PROTOCOLS[name]}", _scored(score[name])) for name in _PROTOCOLS if name in score
    ]


def _scored(figures: Mapping[str, Mapping[str, float | None]]) -> str:
    share = {key: value and 100 * value for key, value in figures["top_token_agreement"].items()}
    return (
        f"perplexity {with_error(figures['perplexity_ratio'], 3)} x the source's, "
        f"KL {with_error(figures['kl_divergence'], 4)} nats, same top token {with_error(share, 1)} %"
    )


def programs_table(description: Mapping[str, Any]) -> Table:
    """Which programs load an artifact (`formats.inspect.describe`)."""
    rows = [[it["program"], "yes" if it["loads"] else "no", it["what"]] for it in description["loads_in"]]
    return Table(["program", "loads it", ""], rows)


def artifact_line(description: Mapping[str, Any]) -> str:
    """One line on a file just made."""
    bits, read = description["bits_per_weight"], (description.get("bits_read") or {}).get("in_words")
    return (
        f"{description['path']}: {description['kind']}, {description['file_bytes']:,} bytes, "
        f"{_bits(bits['blocks'])} bits per weight in the blocks, {_bits(bits['file'])} overall, "
        f"{description['sparse_sites']} sparse sites{f', {read}' if read else ''}"
    )


def _bits(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"
