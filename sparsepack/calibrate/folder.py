"""The calibration folder: `calibration.safetensors` (statistics and the token windows) and `calibration.json`.

The manifest's section `attention` says which heads and channels the attention statistics are of:

    heads, kv_heads, head_dim   as the model's configuration has them
    groups                      how the query heads of a KV head are combined: `collectors.GROUPS`
    rotary.convention, .dims    which channels turn together, and how many of the first ones turn: `family.Rotary`

Whoever stores some of the channels must find the same in the model. The section `residual` is about the second moments
of the residual stream:

    runs   how many runs of consecutive blocks have a sum of their own (`collectors.RESIDUAL`)
    norms  the sums are over so many norms of each block

It is None in a calibration of a model that cannot be rotated, and missing in one from before. In one of a family
without a row `attention` is None, and `sites` has the sites of each block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sparsepack.calibrate.collectors import GROUPS, Statistics, added, check, ends_run, named, of_block, run_count
from sparsepack.calibrate.provenance import (
    StoredCompute,
    StoredModel,
    StoredText,
    StoredTokenizer,
    check_mergeable,
    read_manifest,
)
from sparsepack.errors import CalibrationError
from sparsepack.files import atomic
from sparsepack.files.hashing import fingerprint, sha256_file
from sparsepack.files.stored import Count, Name, Size, Stored, shown
from sparsepack.files.tensors import save_tensors
from sparsepack.models.blocks import Rotary
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_config import attention_layers, heads_of_config

SCHEMA = 1
_TENSORS, _MANIFEST = "calibration.safetensors", "calibration.json"
_MUST_AGREE = ("model.sha256", "tokenizer.sha256", "tokens.context", "tokens.sinks", "compute.dtype", "attention")


OUTPUT_PRODUCT = "attention.output_product"


class _CalibrationRotary(Stored):
    convention: Rotary
    dims: Count


class CalibratedHeads(Stored):
    """The section as it is read from a file. without -- numbers of the blocks without attention, or with heads of
    another size"""

    heads: Size
    kv_heads: Size
    head_dim: Size
    groups: Literal["mean"]
    rotary: _CalibrationRotary
    without: list[Count] = Field(default_factory=list)


def heads_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The section for a model, JSON-able; None for a family without a row."""
    if not checkpoint.family.has_row:
        return None
    attend = attention_layers(checkpoint.config)
    without = [layer for layer in range(checkpoint.layers) if layer not in attend]
    section = {**heads_of_config(checkpoint.config).to_json(), "groups": GROUPS}
    return {**section, "without": without} if without else section


def attention_blocks(manifest: Mapping[str, Any]) -> list[int]:
    """The numbers of the blocks with attention, whose channels a calibration knows, by its manifest."""
    if manifest["attention"] is None:
        return []
    without = manifest["attention"].get("without", ())
    return [layer for layer in range(manifest["model"]["layers"]) if layer not in without]


def sites_of(checkpoint: Checkpoint) -> list[list[str]]:
    """The sites of each block."""
    return [[*checkpoint.family.projections_of(layer)] for layer in range(checkpoint.layers)]


def check_heads(section: Mapping[str, Any] | None, layers: Sequence[Statistics]) -> None:
    """Raise ValueError unless the attention statistics of every layer are of the heads in the section."""
    if section is None:
        return
    heads, kv_heads, channels = (section[name] for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads for {kv_heads} KV heads; expected whole groups")
    for name, rows in (("query_abs", heads), ("key_abs", kv_heads), ("product_abs", kv_heads)):
        for layer in layers:
            shape = list(layer[f"attention.{name}"].shape)
            if shape != [rows, channels]:
                raise ValueError(f"attention.{name} is {shape}, expected {[rows, channels]}")
    products = [list(layer[OUTPUT_PRODUCT].shape) for layer in layers if OUTPUT_PRODUCT in layer]
    square = [kv_heads, channels, channels]
    if products and products != [square] * len(layers):
        raise ValueError(f"{OUTPUT_PRODUCT} is {products}, expected {square} in each of {len(layers)} blocks")


PRODUCT = "residual.product"


class StoredResidual(Stored):
    """The section as it is read from a file."""

    runs: Size
    norms: Size


def residual_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The section for a model, JSON-able."""
    stream = checkpoint.family.residual
    if stream is None:
        return None
    hidden = int(checkpoint.config.hidden_size)
    return {"runs": run_count(checkpoint.layers, hidden), "norms": len(stream.readers)}


def check_residual(section: Mapping[str, Any] | None, layers: Sequence[Statistics]) -> None:
    """Raise ValueError unless the last blocks of all runs, and no others, have sums, square ones of one size."""
    runs = 0 if section is None else section["runs"]
    if runs > len(layers):
        raise ValueError(f"residual: {runs} runs of {len(layers)} blocks")
    shapes = set()
    for layer, statistics in enumerate(layers):
        if (PRODUCT in statistics) != ends_run(layer, len(layers), runs):
            raise ValueError(f"layers.{layer}.{PRODUCT}: the manifest says something else of it")
        if PRODUCT in statistics:
            shapes.add(tuple(statistics[PRODUCT].shape))
    if len(shapes) > 1 or any(rows != columns for rows, columns in shapes):
        raise ValueError(f"{PRODUCT} is {sorted(shapes)}, expected square ones of one size")


class _Tokens(Stored):
    windows: Size
    context: Size
    run: Count
    counted: Count
    sinks: Count
    sinks_left_out: Count
    padding_left_out: Count
    held_out: Count = 0


class _CalibrationManifest(Stored):
    """What is read of a manifest, by whomever."""

    kind: Literal["calibration"]
    model: StoredModel
    tokenizer: StoredTokenizer
    texts: list[StoredText]
    tokens: _Tokens
    compute: StoredCompute
    statistics_sha256: Name
    attention: CalibratedHeads | None
    sites: list[list[Name]] | None = None
    residual: StoredResidual | None = None
    parts: list[Name] | None = None


@dataclass(frozen=True)
class Calibration:
    """A finished calibration.

    manifest -- schema, model, attention, residual, tokenizer, texts, tokens, compute: see `collection`
    layers   -- statistics of each decoder block, by PLACE.NAME (`collectors`)
    windows  -- int32 [windows, positions], the token ids that were run
    held_out -- int32 [windows, context], tokens of the text that no statistic counts; none in calibrations from before
    """

    manifest: dict[str, Any]
    layers: tuple[Statistics, ...]
    windows: Tensor
    held_out: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))

    def __repr__(self) -> str:
        windows, positions = self.windows.shape
        model, blocks = self.manifest["model"]["name"], len(self.layers)
        return f"Calibration({model}, {blocks} blocks, {windows} windows of {positions} tokens)"

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
        tokens = torch.cat([self.windows.flatten(), self.held_out.flatten()])
        if len(self.layers) != checkpoint.layers or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise CalibrationError(
                f"{checkpoint.name}: the calibration has {len(self.layers)} blocks and tokens up to "
                f"{int(tokens.max())}, the model {checkpoint.layers} blocks and {vocabulary} tokens; "
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
    if len(calibration.held_out):
        tensors["held_out"] = calibration.held_out.to(torch.int32)
    for layer, statistics in enumerate(calibration.layers):
        tensors |= named(layer, statistics)
    with atomic.atomic_folder(path, overwrite) as folder:
        save_tensors(tensors, folder / _TENSORS)
        manifest = {**calibration.manifest, "statistics_sha256": sha256_file(folder / _TENSORS)}
        atomic.write_json(folder / _MANIFEST, manifest)
    return replace(calibration, manifest=manifest)


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
        attend, sites = attention_blocks(manifest), manifest.get("sites") or [None] * layers
        statistics = tuple(of_block(layer, tensors, layer in attend, sites[layer]) for layer in range(layers))
        windows = tensors["windows"]
        for tensor in (tensor for layer in statistics for tensor in layer.items()):
            check(*tensor)
        check_heads(manifest["attention"], [statistics[layer] for layer in attend])
        check_residual(manifest.get("residual"), statistics)
        if windows.ndim != 2 or not windows.numel() or windows.dtype != torch.int32:
            raise ValueError(f"windows are {windows.dtype} {list(windows.shape)}, expected int32 [windows, context]")
        held_out = _held_out(tensors, manifest["tokens"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path / _TENSORS}: damaged ({shown(error)}); calibrate again") from error
    return Calibration(manifest, statistics, windows, held_out)


def _held_out(tensors: Mapping[str, Tensor], tokens: Mapping[str, Any]) -> Tensor:
    """Return the windows held out, none where the manifest counts none. Raises ValueError for others than it counts."""
    shape = (tokens.get("held_out", 0), tokens["context"])
    held_out = tensors.get("held_out", torch.empty(0, tokens["context"], dtype=torch.int32))
    if held_out.shape != shape or held_out.dtype != torch.int32:
        raise ValueError(f"held_out is {held_out.dtype} {list(held_out.shape)}, expected int32 {list(shape)}")
    return held_out


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
    windows = torch.cat([first.windows, second.windows])
    held_out = _not_counted([*first.held_out.tolist(), *second.held_out.tolist()], windows, one["context"])
    tokens = {**one, **{name: one[name] + other[name] for name in counts}, "held_out": len(held_out)}
    texts = first.manifest["texts"] + second.manifest["texts"]
    # The hash of the statistics is of the first alone; `save` puts the right one.
    kept = {key: value for key, value in first.manifest.items() if key not in ("attention", "statistics_sha256")}
    changed = {"attention": first.manifest["attention"], "texts": texts, "tokens": tokens, "parts": parts}
    manifest = {**kept, **changed}
    return Calibration(manifest, tuple(layers), windows, held_out)


def _not_counted(held_out: list[list[int]], windows: Tensor, context: int) -> Tensor:
    """Return windows held out, each once, without those that were run: of two calibrations of one text, one may have
    run what the other held out. A window's input may begin with a BOS token, and lacks the window's last token."""
    counted = {tuple(row) for row in windows[:, windows.shape[1] - context + 1 :].tolist()}
    kept = [row for row in dict.fromkeys(map(tuple, held_out)) if row[:-1] not in counted]
    return torch.tensor(kept, dtype=torch.int32).reshape(-1, context)


def merge_folders(first: Path, second: Path, output: Path, overwrite: bool = False) -> Calibration:
    """`calibrate merge`: two calibration folders as a third. Raises as `load`, `merge` and `save` do."""
    return save(merge(load(first), load(second)), output, overwrite)


def _parts(calibration: Calibration) -> list[str]:
    """Hashes of the statistics that were merged into this calibration: its own where it is a single run's."""
    return list(calibration.manifest.get("parts") or [calibration.manifest["statistics_sha256"]])
