"""Accuracy against activation sparsity: allocations, criteria, protocols and texts, as one Markdown table.

    python benchmarks/sparsity_accuracy.py MODEL --calibration-text CAL --text A --text B [--device cuda]

Weights are the checkpoint's own unless --zigzag packs them first, so a row shows what sparsity alone costs. Every row
is beside the dense model on the same windows; "loss" is the perplexity's increase over it.
"""

import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import windows_of
from figures import json_option, write_figures

from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.records.rule import Rules
from sparsepack.sparsity.find import find_thresholds
from sparsepack.sparsity.options import AllocationOptions


@click.command()
@click.argument("model")
@click.option("--calibration-text", required=True)
@click.option("--text", "texts", multiple=True, required=True)
@click.option("--sparsity", "sparsities", multiple=True, type=float, default=(0.25, 0.4, 0.5, 0.65))
@click.option("--allocation", "allocations", multiple=True, default=("uniform", "teal", "global"))
@click.option("--criterion", "criteria", multiple=True, default=("magnitude", "column-norm"))
@click.option("--protocol", "protocols", multiple=True, default=("decode", "all"))
@click.option("--option", "extra", multiple=True, help="AllocationOptions field, e.g. steps=300; repeat for several.")
@click.option("--samples", default=64)
@click.option("--windows", default=48, help="Evaluation windows per text, evenly spread.")
@click.option("--first-windows", is_flag=True, help="The first windows in place of evenly spread ones.")
@click.option("--zigzag", is_flag=True, help="Pack to zigzag Q4_K first; the dense reference stays the checkpoint.")
@click.option("--device", default="cpu")
@json_option
def main(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    sparsities: tuple[float, ...],
    allocations: tuple[str, ...],
    criteria: tuple[str, ...],
    protocols: tuple[str, ...],
    extra: tuple[str, ...],
    samples: int,
    windows: int,
    first_windows: bool,
    zigzag: bool,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model."""
    checkpoint = open_checkpoint(model)
    reference = open_subject(model, None, device)
    weights = _packed(checkpoint, device) if zigzag else reference
    calibration = _calibrated(checkpoint, calibration_text, samples, device)
    data = {name: windows_of(reference, name, windows, first_windows) for name in texts}
    options = dict(json.loads("{" + ",".join(f'"{k}":{v}' for k, v in (e.split("=") for e in extra)) + "}"))
    header = [
        "allocation",
        "criterion",
        "sparsity",
        *(f"{Path(t).name.split('.')[0]} {p}" for t in texts for p in protocols),
    ]
    print("| " + " | ".join(header) + " | seconds |\n|" + "---|" * (len(header) + 1))
    rows = []
    cases = [("dense", "-", 0.0), *itertools.product(allocations, criteria, sparsities)]
    for allocation, criterion, sparsity in cases:
        began = time.time()
        rules: Rules = {}
        if sparsity:
            asked = AllocationOptions(sparsity, allocation, criterion, device=device, dtype="float32", **options)
            rules = find_thresholds(checkpoint, calibration, asked).rules
        spent = time.time() - began
        name = f"{allocation} --offsets" if sparsity and options.get("offsets") else allocation
        cells = []
        for text, protocol in itertools.product(texts, protocols):
            row = _measured(weights, reference, rules, *data[text], protocol)
            rows.append({"allocation": name, "criterion": criterion, "sparsity": sparsity, "text": text, **row})
            loss = 100 * (row["perplexity_ratio"]["value"] - 1)
            cells.append(
                f"{row['perplexity']['value']:.2f} ({loss:+.2f}%, KL {row['kl_divergence']['value']:.4f}, "
                f"r {row['realised_sparsity']['overall']:.3f})"
            )
        print(f"| {name} | {criterion} | {sparsity:.2f} | " + " | ".join(cells) + f" | {spent:.0f} |", flush=True)
    write_figures(json_path, rows)


def _calibrated(checkpoint: Checkpoint, text: str, samples: int, device: str) -> Calibration:
    with tempfile.TemporaryDirectory() as folder:
        options = CalibrateOptions(samples=samples, device=device, dtype="float32")
        return calibrate(checkpoint, read_text(text), Path(folder) / "cal", options)


def _packed(checkpoint: Checkpoint, device: str) -> Subject:
    from sparsepack.formats.plan import PlanRequest
    from sparsepack.formats.table import FORMATS

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        FORMATS["zigzag-q4_k"].plan(checkpoint, PlanRequest(device=device)).write(path)
        return open_subject(str(path), None, device)


def _measured(
    weights: Subject,
    reference: Subject,
    rules: Rules,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    protocol: str,
) -> dict[str, Any]:
    subject = replace(weights, rules=rules)
    scorer = subject.scorer()
    scores = score_windows(scorer, inputs, targets, protocol, reference.scorer(), batch=4)
    return {"protocol": protocol, **summarise(scores, 1), "realised_sparsity": realised_sparsity(scorer, subject)}


if __name__ == "__main__":
    main()
