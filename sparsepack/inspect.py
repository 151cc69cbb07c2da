"""`inspect`: what anything that sparsepack makes holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsepack.errors import CalibrationError


def inspect(path: Path) -> dict[str, Any]:
    """What a calibration folder, a trace, a thresholds table or an artifact holds, JSON-able.

    `kind` says which it is: "calibration" (its manifest, `attention_channels`: `calibrate.channel_report`,
    `attention_tokens`: `calibrate.tokens.token_report`, and `neurons`: `trace.activity_report`, or why there is
    none), "trace" (its manifest and `neurons`), "thresholds" (the table without its vectors), or the format of an
    artifact (`artifacts.inspect.describe`).

    Raises `UserError` subclasses for what is damaged or not ours.
    """
    from sparsepack.artifacts.open import is_artifact

    if (path / "trace.json").is_file():
        return _inspect_trace(path)
    if path.is_dir() and not is_artifact(path):
        return _inspect_calibration(path)
    if path.suffix == ".json":
        from sparsepack.sparsity.thresholds import read_thresholds

        return read_thresholds(path).summary()
    from sparsepack.artifacts.inspect import describe

    return describe(path)


def _inspect_calibration(path: Path) -> dict[str, Any]:
    from sparsepack.calibrate import folder
    from sparsepack.calibrate.channel_report import channel_report
    from sparsepack.calibrate.channels import importance
    from sparsepack.calibrate.neurons import activity
    from sparsepack.calibrate.tokens import token_report
    from sparsepack.trace.activity_report import activity_report

    calibration = folder.load(path)
    return {
        **calibration.manifest,
        "attention_channels": _or_why_not(lambda: channel_report(importance(calibration))),
        "attention_tokens": _or_why_not(lambda: token_report(calibration)),
        "neurons": _or_why_not(lambda: activity_report([activity(calibration)])),
    }


def _inspect_trace(path: Path) -> dict[str, Any]:
    from sparsepack.trace.activity_report import activity_report, trace_activity
    from sparsepack.trace.trace import load

    trace = load(path)
    sessions = [trace_activity(trace, session) for session in range(len(trace.sessions))]
    return {
        **{key: value for key, value in trace.manifest.items() if key != "files"},
        "neurons": activity_report(sessions),
    }


def _or_why_not(report: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return report()
    except CalibrationError as error:
        return str(error)
