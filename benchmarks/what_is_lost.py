"""What skipping and pruning weights cost in accuracy: on a basis, with distilled and refitted weights, in Q4_K.

A row names what was done, step by step. Every row is beside the dense model in float on the same windows: by default
160 of a text's second half, evenly spread, which no choice was ever made on.
Protocol `decode`: the first half of a window is dense context, the second half runs sparse and is scored. "prompt" is
the perplexity of the first half, which runs dense with the row's weights. "bits read" are of a weight of the blocks,
for each decoded token. What was found (bases, calibrations, thresholds) is kept in the work folder.
"""

import itertools
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from torch import Tensor

from benchmarks.shared.evaluation import (
    BOOKS_MODEL,
    BOOKS_TEXT,
    CALIBRATION_TEXT,
    ChangedWeights,
    Windows,
    windows_of_half,
)
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.distil import DistilOptions
from sparsepack.calibrate.distillation import distil
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.refitting import refit_model
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import rotate
from sparsepack.calibrate.threshold_table import Thresholds, read_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.formats.plan import EncodedSite
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.sites import site_name
from sparsepack.packing import PackRequest, pack
from sparsepack.workers.shard import ALONE

BITS = {"float": 16.0, "Q4_K": 4.5}


@dataclass(frozen=True)
class Row:
    """One way to make a model.

    basis    -- "" or one of `rotate --basis`; segments -- of it
    keep     -- of 8 weights, by SparseGPT; 8: not pruned
    distil   -- whether its weights are trained then, for the same sparsity and with offsets where those are learnt
    rank     -- of the updates that are trained; None: all weights
    sparsity -- target; 0: nothing is skipped
    weights  -- "float" or "Q4_K"
    format   -- of a slid folder, measured with its inputs quantised; "": none
    """

    basis: str = ""
    segments: int = 1
    distil: bool = False
    rank: int | None = None
    sparsity: float = 0.0
    allocation: str = "global"
    offsets: bool = False
    refit: bool = False
    quantiser: str = "round"
    weights: str = "float"
    keep: int = 8
    permute: bool = False
    format: str = ""

    @property
    def name(self) -> str:
        """What was done, in words."""
        parts = [self.basis, f"{self.segments} segments" if self.segments > 1 else ""]
        how = "" if self.rank is None else f" rank {self.rank}"
        parts += [f"keep {self.keep} of 8" if self.keep < 8 else "", "permuted" if self.permute else ""]
        parts += [f"distilled{how}" if self.distil else ""]
        if self.sparsity:
            parts += [f"{self.allocation} {self.sparsity:g}", "offsets" if self.offsets else ""]
        parts += ["refit" if self.refit else "", "gptq" if self.quantiser == "gptq" else "", self.format]
        return ", ".join([part for part in parts if part] + ([] if self.format else [self.weights]))


def _rows() -> list[Row]:
    """The rows, those of the targets first."""
    half, more = ({"sparsity": share, "offsets": True} for share in (0.5, 0.65))
    q4_k: dict[str, Any] = {"weights": "Q4_K"}
    rows = [Row(**q4_k), Row(quantiser="gptq", **q4_k)]
    for basis, options in itertools.product(("pca", "learnt"), (half, more)):
        rows += [Row(basis, **options), Row(basis, refit=True, **options)]
        rows += [Row(basis, refit=True, quantiser="gptq", **options, **q4_k), Row(basis, **options, **q4_k)]
        rows += [Row(basis, quantiser="gptq", **options, **q4_k), Row(basis, refit=True, **options, **q4_k)]
    distilled: dict[str, Any] = {"distil": True, "refit": True, "quantiser": "gptq", **q4_k}
    for basis, options in itertools.product(("pca", "learnt"), (half, more)):
        rows += [Row(basis, distil=True, **options), Row(basis, **distilled, **options)]
    rows += [
        Row(distil=True, **half),
        Row("pca", distil=True, rank=16, **half),
        Row("pca", distil=True, rank=64, **half),
    ]
    rows += [Row(basis, quantiser=way, **q4_k) for basis in ("pca", "learnt") for way in ("round", "gptq")]
    rows += [Row(sparsity=0.5), Row(sparsity=0.65), Row(sparsity=0.5, **q4_k), Row(**half), Row(refit=True, **half)]
    rows += [
        Row("pca", sparsity=0.5),
        Row("pca", 4, **half),
        Row("pca", 4, refit=True, quantiser="gptq", **half, **q4_k),
    ]
    uniform = {"allocation": "uniform"}
    rows += [Row(sparsity=0.5, **uniform), Row("pca", sparsity=0.433, **uniform)]
    rows += [Row("pca", segments, sparsity=0.5, **uniform) for segments in (1, 2, 4, 8)]
    rows += [Row(keep=6, permute=permute) for permute in (False, True)]
    rows += [Row(basis, keep=6, permute=permute) for basis in ("pca", "hadamard") for permute in (False, True)]
    slid = ("slide-int8", "slide-fp8")
    rows += [Row(basis, keep=6, format=format) for basis in ("", "pca", "hadamard") for format in slid]
    rows += [Row(keep=6, permute=True, distil=True, format=format) for format in ("", *slid)]
    return rows


@dataclass(frozen=True)
class Bench:
    """What every row starts from."""

    model: str
    text: str
    work: Path
    device: str
    steps: int
    samples: int

    @cached_property
    def calibration_options(self) -> CalibrateOptions:
        return CalibrateOptions(samples=self.samples, device=self.device, dtype="float32")

    def folder(self, row: Row) -> Path:
        """The checkpoint of a row, on its basis, pruned and distilled, made where it is missing."""
        if not row.distil:
            return self.pruned(row)
        before = replace(row, distil=False, rank=None)
        made = self.work / _made("distilled", row)
        if not made.exists():
            options = DistilOptions(
                row.sparsity, row.offsets, row.rank, steps=self.steps, device=self.device, dtype="float32"
            )
            text = before if row.sparsity else replace(before, keep=8, permute=False)
            distil(self.pruned(before), self.calibrated(text), made, options)
        return made

    def pruned(self, row: Row) -> Path:
        """The checkpoint on a row's basis, pruned where the row is, made where it is missing."""
        if row.keep == 8:
            return self.rotated(row)
        whole = replace(row, keep=8, permute=False)
        made = self.work / _made("pruned", row)
        if not made.exists():
            options = PruneOptions(
                row.keep, 8, method="sparsegpt", permute=row.permute, windows=128, device=self.device
            )
            prune(str(self.rotated(whole)), made, options, self.calibrated(whole))
        return made

    def rotated(self, row: Row) -> Path:
        """The checkpoint on a row's basis, made where it is missing."""
        if not row.basis:
            return Path(self.model)
        made = self.work / _on_basis(row)
        if not made.exists():
            more: dict[str, Any] = {"segments": row.segments} if row.segments > 1 else {}
            if row.basis == "learnt":
                more |= {"sparsity": row.sparsity or RotateOptions.sparsity, "steps": self.steps}
            rotate(self.model, self.calibrated(Row()), made, RotateOptions(row.basis, device=self.device, **more))
        return made

    def calibrated(self, row: Row) -> Path:
        """The calibration of that checkpoint."""
        made = self.work / _made("calibration", row)
        if not made.exists():
            calibrate(str(self.folder(row)), self.text, made, self.calibration_options)
        return made

    def thresholds(self, row: Row, checkpoint: Checkpoint, calibration: Calibration) -> Thresholds | None:
        """The thresholds of a row; None where nothing is skipped."""
        if not row.sparsity:
            return None
        offsets = "-offsets" * row.offsets
        path = self.work / f"{_made('thresholds', row)}-{row.allocation}-{row.sparsity}{offsets}.json"
        if not path.exists():
            steps = {"steps": self.steps} if row.allocation == "global" else {}
            options = AllocationOptions(
                row.sparsity, row.allocation, offsets=row.offsets, device=self.device, dtype="float32", **steps
            )
            find_thresholds(checkpoint, calibration, options).write(path)
        return read_thresholds(path)

    def subject(self, row: Row) -> TransformersSubject:
        """What a row measures."""
        folder = self.folder(row)
        if row.format:
            request = PackRequest(str(folder), self.work / "slid", format=row.format, device=self.device)
            folder = pack(replace(request, overwrite=True)).path
        if row.keep < 8:
            return open_subject(str(folder), None, self.device)
        checkpoint, calibration = open_checkpoint(str(folder)), load_calibration(self.calibrated(row))
        table = self.thresholds(row, checkpoint, calibration)
        fit = RefitOptions(row.refit, row.quantiser, device=self.device, dtype="float32")
        if row.weights == "Q4_K":
            out = self.work / "row.gguf"
            request = PackRequest(str(folder), out, device=self.device, overwrite=True)
            if table is not None:
                request = replace(request, thresholds=self.work / "row.json")
                table.write(self.work / "row.json", overwrite=True)
            if fit.fits:
                request = replace(request, fitting=fit, calibration=self.calibrated(row))
            return open_subject(str(pack(request).path), None, self.device)
        subject = open_subject(str(folder), table, self.device)
        return replace(subject, source=_fitted(checkpoint, calibration, table, fit)) if row.refit else subject


def _on_basis(row: Row) -> str:
    """What the folders of a row's basis are named after: a learnt basis is learnt for one target."""
    target = f"-{row.sparsity or RotateOptions.sparsity}" if row.basis == "learnt" else ""
    return f"{row.basis}-{row.segments}{target}"


def _made(what: str, row: Row) -> str:
    """The name of what is made of a row's checkpoint."""
    left = f"-{row.keep}of8{'-permuted' * row.permute}" if row.keep < 8 else ""
    how = f"-distilled-{row.sparsity}{'-offsets' * row.offsets}-{row.rank or 'all'}" if row.distil else ""
    return f"{what}-{_on_basis(row)}{left}{how}"


def _fitted(
    checkpoint: Checkpoint, calibration: Calibration, table: Thresholds | None, options: RefitOptions
) -> ChangedWeights:
    """The checkpoint with refitted weights in float32: what refitting does without a codec."""
    changed: dict[str, Tensor] = {}

    def keep(layer: int, site: str, weight: Tensor, inputs: Any) -> EncodedSite:
        names = checkpoint.family.projections[site]
        rows = [checkpoint.source.shapes[f"{checkpoint.family.block(layer)}.{name}.weight"][0] for name in names]
        for name, part in zip(names, weight.cpu().split(rows), strict=True):
            # The pass asks once more, for the model's own weights, which it compares with.
            changed.setdefault(f"{checkpoint.family.block(layer)}.{name}.weight", part)
        return EncodedSite({}, weight, {f"{site_name(layer, site)}.weight": slice(None)})

    refit_model(checkpoint, calibration, keep, table, options, "", ALONE)
    return ChangedWeights(checkpoint, changed)


def measured(subject: TransformersSubject, reference: TransformersSubject, data: Windows) -> dict[str, Any]:
    """The figures of one row: of the second halves as `decode` has them, and of the first halves, dense."""
    scorer = subject.scorer()
    scores = score_windows(scorer, *data, "decode", reference.scorer(), batch=4)
    share = realised_sparsity(scorer, subject)["overall"] if subject.sparse else 0.0
    half = data[0].shape[1] // 2
    dense = replace(subject, rules={})
    prompt = score_windows(dense.scorer(), data[0][:, :half], data[1][:, :half], "dense", reference.scorer(), batch=4)
    return {**summarise(scores, 1), "skipped": share, "prompt": summarise(prompt, 1)["perplexity_ratio"]["value"]}


@click.command()
@click.argument("model", default=BOOKS_MODEL)
@click.option("--calibration-text", default=CALIBRATION_TEXT, show_default=True)
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=[BOOKS_TEXT],
    show_default=True,
    help="Repeat for several: every row is scored on each.",
)
@click.option("--work", default="/tmp/sparsepack-rotation", type=click.Path(path_type=Path), show_default=True)
@click.option("--rows", "names", multiple=True, help="Only rows whose name begins so.")
@click.option("--windows", default=160, show_default=True, help="Evaluation windows.")
@click.option("--steps", default=300, show_default=True, help="Of `global`, of a learnt basis and of `distil`.")
@click.option("--samples", default=256, show_default=True, help="Calibration windows.")
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    work: Path,
    names: tuple[str, ...],
    windows: int,
    steps: int,
    samples: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model. The seconds of a row count from its first step: making it, and scoring."""
    wanted = [row for row in _rows() if not names or any(row.name.startswith(name) for name in names)]
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(model, calibration_text, work, device, steps, samples)
    reference = open_subject(model, None, device)
    data = {text: windows_of_half(reference, text, windows) for text in texts}
    print(
        "| row | text | perplexity | KL | prompt | skipped | bits read | seconds |\n|---|---|--:|--:|--:|--:|--:|--:|"
    )
    figures = []
    for row in wanted:
        start = time.monotonic()
        subject = bench.subject(row)
        for text in texts:
            found = measured(subject, reference, data[text])
            bits = BITS[row.weights] * (1 - found["skipped"])
            loss, prompt = (100 * (found["perplexity_ratio"]["value"] - 1), 100 * (found["prompt"] - 1))
            spent = time.monotonic() - start
            print(
                f"| {row.name} | {Path(text).name} | {loss:+.2f} % | {found['kl_divergence']['value']:.4f} "
                f"| {prompt:+.2f} % | {found['skipped']:.4f} | {bits:.2f} | {spent:.0f} |",
                flush=True,
            )
            told = {"row": row.name, "steps": steps, "text": Path(text).name, "bits_read": bits, "seconds": spent}
            figures.append({**told, **found})
            write_figures(json_path, figures)
