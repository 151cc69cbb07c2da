"""What pruning costs in accuracy: patterns, methods and orders, on texts that calibration has not seen.

One shot, without training. Every row is beside the model as it was, on the same windows (protocol `dense`); "loss" is
the increase of perplexity over it. --slid also packs each pruned model as slide-int8 and measures that, with its inputs
quantised as the kernels quantise them.
"""

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.evaluation import Windows, windows_of
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.prune import METHODS, PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.packing import PackRequest, pack


@click.command()
@click.argument("model")
@click.option("--calibration-text", required=True)
@click.option("--text", "texts", multiple=True, required=True)
@click.option("--pattern", "patterns", multiple=True, nargs=2, type=int, default=((2, 4), (4, 6), (6, 8), (14, 16)))
@click.option("--method", "methods", multiple=True, default=METHODS)
@click.option("--samples", default=128, help="Calibration windows.")
@click.option("--context", default=1024, help="Tokens of a calibration window.")
@click.option("--windows", default=24, help="Evaluation windows of 2048 tokens per text, evenly spread.")
@click.option("--slid", is_flag=True, help="Also measure what slide-int8 makes of each.")
@click.option("--device", default="cpu")
@json_option
def main(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    patterns: tuple[tuple[int, int], ...],
    methods: tuple[str, ...],
    samples: int,
    context: int,
    windows: int,
    slid: bool,
    device: str,
    json_path: Path | None,
) -> None:
    """Print the table for one model."""
    checkpoint = open_checkpoint(model)
    reference = open_subject(model, None, device)
    data = {name: windows_of(reference, name, windows) for name in texts}
    columns = [f"{Path(text).name.split('.')[0]}{kind}" for text in texts for kind in ("", *([" INT8"] * slid))]
    print("| pattern | method | permute | error | " + " | ".join(columns) + " | seconds |")
    print("|---" * (len(columns) + 5) + "|")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = CalibrateOptions(samples=samples, context=context, device=device)
        calibrate(checkpoint, calibration_text, folder / "calibration", options)
        for (keep, of), method, permute in itertools.product(patterns, methods, (False, True)):
            began = time.time()
            reads = {} if method == "magnitude" else {"windows": samples}
            calibration = folder / "calibration" if reads else None
            how = PruneOptions(keep, of, method=method, permute=permute, device=device, **reads)
            made = prune(checkpoint, folder / "pruned", how, calibration, overwrite=True)
            spent = time.time() - began
            kinds = [folder / "pruned"]
            if slid:
                request = PackRequest(
                    str(folder / "pruned"), folder / "slid", format="slide-int8", device=device, overwrite=True
                )
                kinds.append(pack(request).path)
            cells = []
            for text, path in itertools.product(texts, kinds):
                row = _measured(open_subject(str(path), None, device), reference, data[text])
                row |= {"keep": keep, "of": of, "method": method, "permute": permute, "text": text, "kind": path.name}
                rows.append(row)
                loss = 100 * (row["perplexity_ratio"]["value"] - 1)
                cells.append(f"{row['perplexity']['value']:.2f} ({loss:+.2f} %)")
            error = sum(matrix.error for matrix in made.matrices) / len(made.matrices)
            start = f"| {keep}/{of} | {method} | {'yes' if permute else 'no'} | {error:.4f} | "
            print(start + " | ".join(cells) + f" | {spent:.0f} |", flush=True)
    write_figures(json_path, rows)


def _measured(subject: Subject, reference: Subject, data: Windows) -> dict[str, Any]:
    scores = score_windows(subject.scorer(), *data, "dense", reference.scorer(), batch=4)
    return summarise(scores, 1)
