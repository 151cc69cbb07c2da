"""What learning a basis gains over PCA's: perplexity with `global` thresholds, each learnt anew on the rotated model.

    python benchmarks/learnt_basis.py MODEL --calibration-text CAL --text TEXT [--rate 0.003] [--device cuda]

Weights are those of the rotated checkpoints, in float32. A row is beside the dense model on the same windows, protocol
`decode`: the first half of each window is dense, the second half sparse and scored.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
from accuracy_windows import Windows, windows_of
from figures import json_option, write_figures

from sparsepack.calibration.folder import Calibration
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import Subject, open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.records.rule import Rules
from sparsepack.rotation.options import RotateOptions
from sparsepack.rotation.run import rotate
from sparsepack.sparsity.find import find_thresholds
from sparsepack.sparsity.options import AllocationOptions


@click.command()
@click.argument("model")
@click.option("--calibration-text", required=True)
@click.option("--text", required=True)
@click.option("--sparsity", default=0.5, show_default=True)
@click.option("--steps", default=300, show_default=True, help="Of the basis, and of the thresholds.")
@click.option("--batch", default=4, show_default=True)
@click.option("--length", default=1024, show_default=True)
@click.option("--rate", "rates", multiple=True, type=float, help="Of the learnt basis; repeat for several.")
@click.option("--offsets/--no-offsets", default=True, show_default=True, help="Each row with learnt offsets, too.")
@click.option("--samples", default=256, show_default=True, help="Calibration windows.")
@click.option("--windows", default=48, show_default=True, help="Evaluation windows, evenly spread.")
@click.option("--context", default=2048, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(
    model: str,
    calibration_text: str,
    text: str,
    sparsity: float,
    steps: int,
    batch: int,
    length: int,
    rates: tuple[float, ...],
    offsets: bool,
    samples: int,
    windows: int,
    context: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Print a line for the dense model, and for each basis with `global` thresholds."""
    reference = open_subject(model, None, device)
    data = windows_of(reference, text, windows, context=context)
    learning = {"steps": steps, "batch": batch, "length": length}
    asked = AllocationOptions(sparsity, "global", device=device, dtype="float32", **learning)
    calibrating = CalibrateOptions(context=context, samples=samples, device=device, dtype="float32")
    learnt = [
        RotateOptions("learnt", sparsity=sparsity, rate=rate, device=device, **learning)
        for rate in rates or (RotateOptions.rate,)
    ]
    rows = [_row("dense", reference, reference, {}, data, 0.0)]
    with tempfile.TemporaryDirectory() as folder:
        bases = _in_bases(
            model, calibration_text, [RotateOptions("pca", device=device), *learnt], calibrating, Path(folder)
        )
        for name, path, calibration, spent in bases:
            subject = open_subject(path, None, device)
            for with_offsets in (False, True) if offsets else (False,):
                began = time.time()
                rules = find_thresholds(open_checkpoint(path), calibration, replace(asked, offsets=with_offsets)).rules
                label = f"{name}{', offsets' if with_offsets else ''}"
                rows.append(_row(label, subject, reference, rules, data, spent + time.time() - began))
    write_figures(json_path, rows)


def _in_bases(
    model: str, text: str, bases: list[RotateOptions], options: CalibrateOptions, folder: Path
) -> Iterator[tuple[str, str, Calibration, float]]:
    """The model as it is and in each basis: a name, where it lies, its calibration, and the seconds that its basis
    took."""
    calibration = calibrate(open_checkpoint(model), read_text(text), folder / "calibration", options)
    yield "as it is", model, calibration, 0.0
    for number, basis in enumerate(bases):
        made, began = folder / f"rotated-{number}", time.time()
        rotate(model, folder / "calibration", made, basis)
        spent = time.time() - began
        name = basis.basis + (f", rate {basis.rate:g}" if basis.basis == "learnt" else "")
        again = calibrate(open_checkpoint(made), read_text(text), folder / f"calibration-{number}", options)
        yield name, str(made), again, spent


def _row(
    name: str, subject: Subject, reference: Subject, rules: Rules, data: Windows, seconds: float
) -> dict[str, object]:
    """The figures of one way, printed, too."""
    subject = replace(subject, rules=rules)
    scorer = subject.scorer()
    figures = summarise(score_windows(scorer, *data, "decode", reference.scorer(), batch=4), 1)
    realised = realised_sparsity(scorer, subject)["overall"] if rules else 0.0
    loss = 100 * (figures["perplexity_ratio"]["value"] - 1)
    error = 100 * (figures["perplexity_ratio"]["stderr"] or 0)
    click.echo(
        f"{name:28} perplexity {figures['perplexity']['value']:7.3f}  {loss:+6.2f} % (+- {error:.2f})  "
        f"KL {figures['kl_divergence']['value']:.5f}  skipped {realised:.4f}  {seconds:5.0f} s"
    )
    return {"name": name, "seconds": seconds, "realised": realised, **figures}


if __name__ == "__main__":
    main()
