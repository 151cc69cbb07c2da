"""The calibration folder: `calibration.safetensors` (statistics and the token windows) and `calibration.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sparsepack.calibration.collectors import Statistics, added, check, named, of_block
from sparsepack.calibration.heads import CalibratedHeads, check_heads
from sparsepack.calibration.made_from import (
    StoredCompute,
    StoredModel,
    StoredText,
    StoredTokenizer,
    check_mergeable,
    read_manifest,
)
from sparsepack.calibration.residual import StoredResidual, check_residual
from sparsepack.errors import CalibrationError
from sparsepack.files import atomic
from sparsepack.files.hashing import fingerprint, sha256_file
from sparsepack.files.stored import Count, Name, Size, Stored, shown
from sparsepack.files.tensors import save_tensors
from sparsepack.models.checkpoint.checkpoint import Checkpoint

SCHEMA = 1
_TENSORS, _MANIFEST = "calibration.safetensors", "calibration.json"
_MUST_AGREE = ("model.sha256", "tokenizer.sha256", "tokens.context", "tokens.sinks", "compute.dtype", "attention")


class _Tokens(Stored):
    windows: Size
    context: Size
    run: Count
    counted: Count
    sinks: Count
    sinks_left_out: Count
    padding_left_out: Count


class _CalibrationManifest(Stored):
    """What is read of a manifest, by whomever."""

    kind: Literal["calibration"]
    model: StoredModel
    tokenizer: StoredTokenizer
    texts: list[StoredText]
    tokens: _Tokens
    compute: StoredCompute
    statistics_sha256: Name
    attention: CalibratedHeads
    residual: StoredResidual | None = None
    parts: list[Name] | None = None


@dataclass(frozen=True)
class Calibration:
    """A finished calibration.

    manifest -- schema, model, attention, residual, tokenizer, texts, tokens, compute: see `calibration.run`
    layers   -- statistics of each decoder block, by PLACE.NAME (`collectors`)
    windows  -- int32 [windows, context], the token ids that were run
    """

    manifest: dict[str, Any]
    layers: tuple[Statistics, ...]
    windows: torch.Tensor

    @property
    def sha256(self) -> str:
        """Hash of the manifest, which itself holds the hash of the statistics."""
        return fingerprint(self.manifest)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise `CalibrationError` unless this calibration is of that model."""
        made_for = self.manifest["model"]
        if made_for["sha256"] != checkpoint.sha256:
            raise CalibrationError(
                f"{checkpoint.name}: the calibration is of {made_for['name']} ({made_for['sha256'][:12]}), "
                f"this model's weights are {checkpoint.sha256[:12]}; calibrate this model"
            )
        vocabulary = int(checkpoint.config.vocab_size)
        if len(self.layers) != checkpoint.layers or self.windows.min() < 0 or self.windows.max() >= vocabulary:
            raise CalibrationError(
                f"{checkpoint.name}: the calibration has {len(self.layers)} blocks and tokens up to "
                f"{int(self.windows.max())}, the model {checkpoint.layers} blocks and {vocabulary} tokens; "
                "calibrate again"
            )


def check_output(path: Path, overwrite: bool) -> None:
    """Raise `OutputError` unless a calibration can be written there: `overwrite` replaces calibrations only."""
    marker = _TENSORS if (path / _TENSORS).is_file() else _MANIFEST  # one may have been lost
    atomic.check_output(path, overwrite, folder=True, marker=marker)


def save(calibration: Calibration, path: Path, overwrite: bool = False) -> Calibration:
    """Write a calibration folder, whole or not at all; returns it with the hash of its statistics in the manifest."""
    check_output(path, overwrite)
    tensors = {"windows": calibration.windows.to(torch.int32)}
    for layer, statistics in enumerate(calibration.layers):
        tensors |= named(layer, statistics)
    with atomic.atomic_folder(path, overwrite) as folder:
        save_tensors(tensors, folder / _TENSORS)
        manifest = {**calibration.manifest, "statistics_sha256": sha256_file(folder / _TENSORS)}
        atomic.write_json(folder / _MANIFEST, manifest)
    return Calibration(manifest, calibration.layers, calibration.windows)


def load(path: Path) -> Calibration:
    """Read and check a calibration folder. Raises `CalibrationError` saying what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    atomic.restore_folder(path)
    if not (path / _MANIFEST).is_file():
        raise CalibrationError(f"{path}: no {_MANIFEST} in it; expected a folder made by `sparsepack calibrate`")
    manifest = read_manifest(path / _MANIFEST, _CalibrationManifest, SCHEMA, CalibrationError, "calibrate again")
    layers, digest = manifest["model"]["layers"], manifest["statistics_sha256"]
    if not (path / _TENSORS).is_file() or sha256_file(path / _TENSORS) != digest:
        raise CalibrationError(f"{path / _TENSORS}: missing or changed since it was written; calibrate again")
    try:
        tensors = load_file(path / _TENSORS)
        statistics = tuple(of_block(layer, tensors) for layer in range(layers))
        windows = tensors["windows"]
        for tensor in (tensor for layer in statistics for tensor in layer.items()):
            check(*tensor)
        check_heads(manifest["attention"], statistics)
        check_residual(manifest.get("residual"), statistics)
        if windows.ndim != 2 or not windows.numel() or windows.dtype != torch.int32:
            raise ValueError(f"windows are {windows.dtype} {list(windows.shape)}, expected int32 [windows, context]")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path / _TENSORS}: damaged ({shown(error)}); calibrate again") from error
    return Calibration(manifest, statistics, windows)


def merge(first: Calibration, second: Calibration) -> Calibration:
    """Two calibrations of one model as one: counts, sums and windows of both.

    Raises `CalibrationError` where model, tokenizer, context, sinks, precision, heads or runs of blocks differ.
    """
    check_mergeable(first.manifest, second.manifest, _MUST_AGREE, CalibrationError)
    runs = [{"residual": each.manifest.get("residual")} for each in (first, second)]  # from before: none
    check_mergeable(runs[0], runs[1], ("residual",), CalibrationError)
    parts = _parts(first) + _parts(second)
    if first.layers[0].keys() != second.layers[0].keys():
        raise CalibrationError("cannot merge: one was made by a sparsepack that counted less; calibrate again")
    if len(set(parts)) < len(parts):
        raise CalibrationError("cannot merge a calibration with itself or a part of it: every token would count twice")
    layers = [added(ours, theirs) for ours, theirs in zip(first.layers, second.layers, strict=True)]
    one, other = first.manifest["tokens"], second.manifest["tokens"]
    counts = ("windows", "run", "counted", "sinks_left_out", "padding_left_out")
    tokens = {**one, **{name: one[name] + other[name] for name in counts}}
    texts = first.manifest["texts"] + second.manifest["texts"]
    # The hash of the statistics is of the first alone; `save` puts the right one.
    kept = {key: value for key, value in first.manifest.items() if key not in ("attention", "statistics_sha256")}
    changed = {"attention": first.manifest["attention"], "texts": texts, "tokens": tokens, "parts": parts}
    manifest = {**kept, **changed}
    return Calibration(manifest, tuple(layers), torch.cat([first.windows, second.windows]))


def merge_folders(first: Path, second: Path, output: Path, overwrite: bool = False) -> Calibration:
    """`calibrate merge`: two calibration folders as a third. Raises as `load`, `merge` and `save` do."""
    return save(merge(load(first), load(second)), output, overwrite)


def _parts(calibration: Calibration) -> list[str]:
    """Hashes of the statistics that were merged into this calibration: its own where it is a single run's."""
    return list(calibration.manifest.get("parts") or [calibration.manifest["statistics_sha256"]])
