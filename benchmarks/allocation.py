"""Perplexity against activation sparsity, by allocation of the thresholds, on several texts.

Protocol `decode`. Weights are the checkpoint's own unless --zigzag packs them first, so a row shows what sparsity alone
costs. Every row is beside the dense model on the same windows; the loss is the perplexity's increase over it.
"""

import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.evaluation import BOOKS_TEXT, CALIBRATION_TEXT, WIKITEXT, Windows, windows_of
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.sites import Rules

OFFSETS = "global --offsets"
ALLOCATIONS = ("uniform", "teal", "fisher", "global", OFFSETS)


def zigzag_subject(checkpoint: Checkpoint, device: str) -> Subject:
    """Return the model with its weights as zigzag-q4_k stores them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest(device=device)).write(path)
        return open_subject(str(path), None, device)


def score(weights: Subject, reference: Subject, rules: Rules, data: Windows) -> dict[str, Any]:
    """Return the figures of a model with these thresholds, beside the dense one."""
    subject = replace(weights, rules=rules)
    scorer = subject.scorer()
    scores = score_windows(scorer, *data, "decode", reference.scorer(), batch=4)
    return {**summarise(scores, 1), "realised_sparsity": realised_sparsity(scorer, subject)}


@click.command()
@click.argument("model")
@click.option("--calibration-text", default=CALIBRATION_TEXT, show_default=True)
@click.option("--text", "texts", multiple=True, default=(WIKITEXT, BOOKS_TEXT), show_default=True)
@click.option("--sparsity", "sparsities", multiple=True, type=float, default=(0.25, 0.4, 0.5, 0.65), show_default=True)
@click.option("--allocation", "allocations", multiple=True, type=click.Choice(ALLOCATIONS), default=ALLOCATIONS)
@click.option("--samples", default=64, show_default=True)
@click.option("--windows", default=48, show_default=True, help="Evaluation windows per text, evenly spread.")
@click.option("--zigzag", is_flag=True, help="Pack to zigzag Q4_K first; the dense reference stays the checkpoint.")
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    sparsities: tuple[float, ...],
    allocations: tuple[str, ...],
    samples: int,
    windows: int,
    zigzag: bool,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model."""
    checkpoint, reference = open_checkpoint(model), open_subject(model, None, device)
    weights = zigzag_subject(checkpoint, device) if zigzag else reference
    with tempfile.TemporaryDirectory() as folder:
        options = CalibrateOptions(samples=samples, device=device, dtype="float32")
        calibration = calibrate(checkpoint, calibration_text, Path(folder) / "cal", options)
    data = {name: windows_of(reference, name, windows) for name in texts}
    click.echo(f"| allocation | sparsity | {' | '.join(Path(text).name for text in texts)} | seconds |")
    click.echo("|---" * (len(texts) + 3) + "|")
    rows = []
    for allocation, sparsity in [("dense", 0.0), *itertools.product(allocations, sparsities)]:
        began = time.time()
        rules: Rules = {}
        if sparsity:
            name, offsets = allocation.removesuffix(" --offsets"), allocation == OFFSETS
            options_of_row = AllocationOptions(sparsity, name, offsets=offsets, device=device, dtype="float32")
            rules = find_thresholds(checkpoint, calibration, options_of_row).rules
        spent, cells = time.time() - began, []
        for text in texts:
            row = score(weights, reference, rules, data[text])
            rows.append({"allocation": allocation, "sparsity": sparsity, "text": text, **row})
            loss = 100 * (row["perplexity_ratio"]["value"] - 1)
            cells.append(
                f"{row['perplexity']['value']:.2f} ({loss:+.2f}%, KL {row['kl_divergence']['value']:.4f}, "
                f"skipped {row['realised_sparsity']['overall']:.3f})"
            )
        click.echo(f"| {allocation} | {sparsity:.2f} | {' | '.join(cells)} | {spent:.0f} |")
        write_figures(json_path, rows)
