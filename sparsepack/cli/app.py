"""The command line: one thin click command per verb. Only click is imported here, so that `--help` answers at once."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from sparsepack import __version__
from sparsepack.cli.errors import Verbs
from sparsepack.cli.options import (
    PATH,
    allocation,
    allocation_options,
    backend_option,
    compute,
    device_option,
    emit,
    json_output,
    overwrite_flag,
    seed_option,
    set_threads,
    thread_count,
    window,
)
from sparsepack.runtime.backends import BACKENDS, batch_backend, most_sequences

# Waiting OpenMP workers that spin make two threads slower than one when another process takes a core; torch reads this
# when it is first imported, so it stands before any command.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sparsepack")
def main() -> None:
    """Find where a language model is sparse, pack it so that hardware profits, prove it is still the same model.

    MODEL is a Hugging Face folder or hub id, a GGUF in F32, F16 or BF16, or shipped:tiny. TEXT is a .txt or .jsonl
    file (also .xz, .gz), shipped:train, shipped:heldout, or a data set NAME[:CONFIG[:SPLIT[:FIELD]]].

    Exit status: 0 done, 1 the run failed, 2 a mistake in what was asked, 3 a gate failed.
    """


@main.command()
@click.argument("model")
@click.argument("folders", nargs=-1, type=PATH)
@click.option("--text", "texts", multiple=True, help="What to run; repeats.")
@click.option("-o", "--output", type=PATH, required=True, help="The calibration folder to make.")
@window
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="Windows drawn at random; 0 for all, in order.",
)
@seed_option
@click.option(
    "--sinks",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help="First positions of a window left out of the statistics.",
)
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Windows at a time.")
@compute
@overwrite_flag
def calibrate(
    model: str, folders: tuple[Path, ...], texts: tuple[str, ...], output: Path, overwrite: bool, **asked: Any
) -> None:
    """Collect the statistics of MODEL over text; or `calibrate merge A B -o C` of two calibrations of one model.

    One pass, one decoder block in memory at a time. A run that was killed goes on where it stopped when the same
    command is given again.
    """
    from sparsepack.cli.tables import calibration_table

    if model == "merge":
        from sparsepack.calibrate import folder

        if len(folders) != 2 or texts:
            raise click.UsageError("merge takes two calibration folders and -o: sparsepack calibrate merge A B -o C")
        merged = folder.merge(folder.load(folders[0]), folder.load(folders[1]))
        click.echo(calibration_table(folder.save(merged, output, overwrite).manifest))
        return
    if folders or not texts:
        raise click.UsageError("give one MODEL and --text: sparsepack calibrate MODEL --text FILE -o FOLDER")
    from sparsepack.calibrate.run import CalibrateOptions
    from sparsepack.calibrate.run import calibrate as run_calibration
    from sparsepack.files.text import read_text
    from sparsepack.models.checkpoint import open_checkpoint
    from sparsepack.models.windows import DEFAULT_CONTEXT

    checkpoint = open_checkpoint(model)
    if asked["context"] is None:
        asked["context"] = min(DEFAULT_CONTEXT, checkpoint.config.max_position_embeddings)
    made = run_calibration(checkpoint, read_text(texts), output, CalibrateOptions(**asked), overwrite)
    click.echo(calibration_table(made.manifest))


@main.command()
@click.argument("model")
@click.option("--calibration", type=PATH, required=True, help="A folder made by `sparsepack calibrate`.")
@allocation
@click.option("-o", "--output", type=PATH, required=True, help="The table to make, as JSON.")
@compute
@overwrite_flag
def thresholds(model: str, calibration: Path, output: Path, overwrite: bool, **asked: Any) -> None:
    """Find the thresholds of MODEL for a sparsity: a table to print, edit, and give to `pack` or `eval`.

    A run that was killed goes on where it stopped when the same command is given again; so does `pack --sparsity`.
    """
    from sparsepack.calibrate import folder
    from sparsepack.cli.tables import thresholds_table
    from sparsepack.files.atomic import check_output
    from sparsepack.files.resume import state_beside
    from sparsepack.models.checkpoint import open_checkpoint
    from sparsepack.sparsity.find import find_thresholds

    options = allocation_options(asked)
    if options is None:
        raise click.UsageError("give --sparsity, for example 0.5")
    check_output(output, overwrite)
    with state_beside(output) as state:
        table = find_thresholds(open_checkpoint(model), folder.load(calibration), options, state)
        table.write(output, overwrite)
    click.echo(thresholds_table(table.summary()))


@main.command()
@click.argument("model")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["zigzag-q4_k", "q4_k", "f16", "bf16", "f32"]),
    default="zigzag-q4_k",
    show_default=True,
    help="zigzag-q4_k skips inactive columns; the others are plain GGUFs that stock llama.cpp loads.",
)
@click.option("--calibration", type=PATH, help="A folder made by `sparsepack calibrate`; needed for --sparsity.")
@click.option("--thresholds", type=PATH, help="A table made by `sparsepack thresholds`, in place of --sparsity.")
@allocation
@click.option(
    "--output-type", default="auto", show_default=True, help="Output matrix: auto, q6_k, q4_k, f16, bf16, f32."
)
@click.option("--embedding-type", default="auto", show_default=True, help="Embedding, likewise.")
@click.option("-o", "--output", type=PATH, required=True, help="The file to make.")
@compute
@overwrite_flag
def pack(
    model: str,
    format_: str,
    calibration: Path | None,
    thresholds: Path | None,
    output_type: str,
    embedding_type: str,
    output: Path,
    overwrite: bool,
    **asked: Any,
) -> None:
    """Pack MODEL into one file, with the thresholds of a calibration inside if --sparsity is given."""
    from sparsepack.artifacts.inspect import describe
    from sparsepack.cli.tables import artifact_line
    from sparsepack.pack import PackRequest
    from sparsepack.pack import pack as make

    made = make(
        PackRequest(
            model=model,
            output=output,
            format=format_,
            calibration=calibration,
            allocation=allocation_options(asked),
            thresholds=thresholds,
            output_type=output_type,
            embedding_type=embedding_type,
            device=asked["device"],
            overwrite=overwrite,
        )
    )
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(artifact_line(describe(output)))


@main.command()
@click.argument("path", type=PATH)
@json_output
def inspect(path: Path, json_path: str | None) -> None:
    """Show what an artifact, a thresholds table or a calibration folder holds, and which programs can load it."""
    from sparsepack.cli.main import tables as show

    if path.is_dir():
        from sparsepack.calibrate import folder

        emit(folder.load(path).manifest, json_path, show.calibration_table)
    elif path.suffix == ".json":
        from sparsepack.sparsity.thresholds import read_thresholds

        emit(read_thresholds(path).summary(), json_path, show.thresholds_table)
    else:
        from sparsepack.artifacts.inspect import describe

        emit(describe(path), json_path, show.artifact_table)


@main.command()
@click.argument("path", type=PATH)
@click.option("--against", metavar="MODEL", help="Compare every matrix with this checkpoint.")
@json_output
def verify(path: Path, against: str | None, json_path: str | None) -> None:
    """Check an artifact: every byte's hash, shapes, padding; with --against, that it is that model. Exit 1 if not."""
    from sparsepack.artifacts import verify as checks
    from sparsepack.cli.main import tables as show

    if against is None:
        report = checks.verify(path)
    else:
        from sparsepack.models.checkpoint import open_checkpoint

        report = checks.verify_against(path, open_checkpoint(against))
    emit(report.to_json(), json_path, show.verification)
    if not report.passed:
        sys.exit(1)


@main.command(name="eval")
@click.argument("subject")
@click.option("--thresholds", type=PATH, help="Run a checkpoint with this table.")
@click.option("--perplexity", multiple=True, metavar="TEXT", help="Rolling perplexity of a text; repeats.")
@click.option(
    "--protocol", type=click.Choice(["decode", "all", "dense"]), help="Default: decode if sparse, else dense."
)
@window
@click.option("--windows", type=click.IntRange(1), help="At most so many windows, from the first.")
@click.option("--against", metavar="MODEL", help="The source model: adds KL divergence and top-token agreement.")
@click.option("--tasks", help="lm-eval tasks, comma-separated.")
@click.option("--task-path", type=PATH, help="Folder of local task YAML; nothing is looked up on a network then.")
@click.option("--limit", type=click.IntRange(1), help="Documents per task.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Overrides the tasks' own.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--runtime",
    type=click.Choice(["transformers", *BACKENDS]),
    default="transformers",
    show_default=True,
    help="What runs SUBJECT: transformers, or a zigzag artifact's engine with its own kernels and rounding, on the "
    "--device that they are made for.",
)
@compute
@thread_count
@json_output
def evaluate(
    perplexity: tuple[str, ...], tasks: str | None, json_path: str | None, threads: int | None, **asked: Any
) -> None:
    """Measure the accuracy of SUBJECT: a checkpoint, a checkpoint with --thresholds, or an artifact."""
    from sparsepack.cli.tables import evaluation_table
    from sparsepack.eval.run import EvalRequest
    from sparsepack.eval.run import evaluate as measure

    set_threads(threads)
    names = tuple(name.strip() for name in tasks.split(",") if name.strip()) if tasks else ()
    emit(measure(EvalRequest(perplexity=perplexity, tasks=names, **asked)), json_path, evaluation_table)


@main.command()
@click.argument("path", type=PATH)
@click.option("-p", "--prompt", "n_prompt", default=512, show_default=True, help="Tokens of the prefill test; 0: none.")
@click.option("-n", "--generate", "n_gen", default=128, show_default=True, help="Tokens of the decoding test; 0: none.")
@click.option("-r", "--repetitions", default=5, show_default=True)
@click.option("--text", help="Run this text's tokens; random ones skip less than text does.")
@seed_option
@click.option(
    "--batch",
    type=click.IntRange(1, most_sequences()),
    default=1,
    show_default=True,
    help="Decode so many sequences together, skipping what is inactive in all of them; with --device cuda.",
)
@device_option
@backend_option
@thread_count
@json_output
def bench(path: Path, text: str | None, json_path: str | None, **asked: Any) -> None:
    """Measure tokens per second of an artifact, dense and sparse in turns, with the bytes that each token needs."""
    from sparsepack.artifacts.gguf.zigzag import read_zigzag
    from sparsepack.bench.decode import BenchSettings, bench_decode
    from sparsepack.bench.table import bench_table

    packed = read_zigzag(path)
    ids = None
    if text:
        from sparsepack.files.text import read_text
        from sparsepack.runtime.generate import open_tokenizer

        ids = open_tokenizer(packed.tokenizer_json).encode(read_text(text).joined, add_special_tokens=False).ids
    emit(bench_decode(packed, BenchSettings(**asked), path.name, ids), json_path, bench_table)


@main.command()
@click.argument("paths", type=PATH, nargs=-1)
@device_option
@thread_count
@json_output
def tune(paths: tuple[Path, ...], device: str, threads: int | None, json_path: str | None) -> None:
    """Measure once which layout suits this machine, for the matrices of the zigzag artifacts PATHS.

    Without PATHS: for those of Llamas of 1 and 8 billion parameters. What was found is kept below ~/.cache, and the
    runtime of the device uses it from then on (on the CPU at the same number of threads); output changes by rounding
    only. Nothing else should run meanwhile.
    """
    import torch

    from sparsepack.artifacts.gguf.zigzag import read_zigzag
    from sparsepack.cli.tables import tuning_table
    from sparsepack.runtime.backends import tuning_backend
    from sparsepack.runtime.tuning import GATES, SHAPES

    backend = tuning_backend(device)
    sites = [
        (name, (site.matrix.rows, site.matrix.columns))
        for path in paths
        for layer in read_zigzag(path, verify=False).layers
        for name, site in layer.sites.items()
    ]
    shapes = [shape for _, shape in sites] or SHAPES
    gates = {shape for name, shape in sites if name == "mlp_in"} if sites else GATES
    emit(backend.open().tune(shapes, torch.device(device), threads, gates), json_path, tuning_table)


profile = click.Command("profile", callback=tune.callback, params=tune.params, help=tune.help, hidden=True)
main.add_command(profile)  # what `tune` was called in 0.1.0; goes with the next version


@main.command()
@click.argument("path", type=PATH)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    help=f"Text to continue. Repeats, up to {most_sequences()} times with --device cuda: all are continued together.",
)
@click.option(
    "-n", "--tokens", type=click.IntRange(0), default=64, show_default=True, help="Tokens to generate at most."
)
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(1))
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@seed_option
@click.option("--dense", is_flag=True, help="Skip nothing.")
@click.option("--context", type=click.IntRange(2), help="Room for so many tokens.")
@device_option
@backend_option
@thread_count
def generate(
    path: Path,
    prompts: tuple[str, ...],
    tokens: int,
    dense: bool,
    context: int | None,
    device: str,
    backend: str | None,
    threads: int | None,
    **asked: Any,
) -> None:
    """Continue a prompt with a zigzag artifact. Text goes to standard output, what ran and how fast to stderr."""
    from sparsepack.cli.tables import print_generations, stream_generation

    set_threads(threads)
    if len(prompts) == 1:
        stream_generation(path, prompts[0], tokens, dense, context, device, backend, asked)
        return
    batch_backend(len(prompts), device, backend)
    print_generations(path, prompts, tokens, dense, context, device, backend, asked)


@main.command()
@click.argument("recipe", type=PATH)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="activation.sparsity=0.4; repeats.")
@click.option("-w", "--work", type=PATH, help="Folder of the outputs (default work/NAME); done stages are kept.")
@click.option("--dry-run", is_flag=True, help="Print what would be made: matches, sizes, bits per weight, memory.")
@json_output
def run(recipe: Path, overrides: tuple[str, ...], work: Path | None, dry_run: bool, json_path: str | None) -> None:
    """Run a RECIPE: calibrate, pack, verify, eval, bench and generate from one YAML file. Exit 3 if a gate fails."""
    import contextlib
    import json

    from sparsepack.files.atomic import write_json
    from sparsepack.recipe import run_recipe

    # With JSON on standard output, the tables stand aside.
    with contextlib.redirect_stdout(sys.stderr if json_path == "-" else sys.stdout):
        outcome = run_recipe(recipe, overrides, work, dry_run)
    if json_path == "-":
        click.echo(json.dumps(outcome.report, indent=2, ensure_ascii=False))
    elif json_path:
        write_json(Path(json_path), outcome.report)
    if not outcome.passed:
        sys.exit(3)
