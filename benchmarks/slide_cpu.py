"""A slid folder, or one of planes, on a CPU and the model that it was packed from, in transformers, in turns.

Processor seconds, of all threads, since the machine may do other work: of a call with so many tokens, without a cache.
Before anything is timed, the logits of both must agree but for what rounding weights and inputs to 8 bits costs.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers

import sparsepack  # noqa: F401  # transformers then knows slid folders
from benchmarks.shared.timing import check_close, interleave, json_option, median_ratio, relative_error, write_figures
from sparsepack.runtime.cpu.machine import cpu_info

LARGEST_ERROR = 0.2
"""Of the logits, relative: a random prompt is unlike any text, and errors of 8 bits add up over the blocks."""


def processor_ms(run: Callable[[], Any], times: int) -> float:
    """Return the milliseconds of the processor that a call takes."""
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) * 1e3 / times


@click.command()
@click.argument("dense", type=click.Path(exists=True, file_okay=False))
@click.argument("slid", type=click.Path(exists=True, file_okay=False))
@click.option("--tokens", multiple=True, type=int, default=(1, 32, 256), show_default=True)
@click.option("--dtype", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--rounds", type=int, default=15, show_default=True)
@json_option
@torch.inference_mode()
def main(
    dense: str, slid: str, tokens: tuple[int, ...], dtype: tuple[str, ...], threads: int, rounds: int, json_path: Path
) -> None:
    """Print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    click.echo(f"{cpu_info()}, torch {torch.__version__}, {threads} threads, load {os.getloadavg()[0]:.1f}")
    click.echo("| type | tokens at once | dense, ms of processor | slid | slid / dense, median over rounds |")
    click.echo("|---|--:|--:|--:|--:|")
    found = []
    for name in dtype:
        folders = {"dense": dense, "slid": slid}
        models = {
            key: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name))
            for key, folder in folders.items()
        }
        for count in tokens:
            ids = torch.randint(0, models["dense"].config.vocab_size, (1, count), generator=torch.manual_seed(count))
            logits = {key: model(ids).logits.float() for key, model in models.items()}
            error = check_close("logits", relative_error(logits["slid"], logits["dense"]), LARGEST_ERROR)
            runs = {
                key: lambda model=model, ids=ids: processor_ms(lambda: model(ids), max(1, 16 // ids.shape[1]))
                for key, model in models.items()
            }
            samples = interleave(runs, rounds, warm_up=2)
            ms = {key: statistics.median(taken) for key, taken in samples.items()}
            ratio = median_ratio(samples["slid"], samples["dense"])
            click.echo(f"| {name} | {count} | {ms['dense']:.2f} | {ms['slid']:.2f} | {ratio:.2f} |")
            found.append({"dtype": name, "tokens": count, **ms, "ratio": ratio, "error": error})
    write_figures(json_path, {"cpu": cpu_info(), "threads": threads, "rows": found})
