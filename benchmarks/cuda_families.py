"""Decoding and prefill on the GPU of random models of many families, mixtures of experts too: llama.cpp, ours dense,
ours with half of the columns skipped.

    python benchmarks/cuda_families.py [--model gemma-2-2b] [--layers N] [--quick] [--llama-bench PATH] [--json FILE]

As `cuda_decode.py`, which has Llamas: 128 tokens after a prompt of 128, batch 1. Models are made on the GPU. Before
anything is timed, two layers of each are compared with the reference backend. --llama-bench times a GGUF of the same
shape, random as well, in the same run.
"""

import statistics
from pathlib import Path
from typing import Any

import click
from cuda_decode import LIMITS, NEW, PROMPT, SHOWN, check, decode_options, measure, measure_prefill, name_of
from cuda_synthetic import CONTEXT, random_of
from cuda_timing import announced_bandwidth, device_line
from figures import write_figures
from llama_cpp_file import peer_speeds
from shapes import MODELS, configuration
from thresholds import find_thresholds

from sparsepack.bench import traffic
from sparsepack.formats.packed import PackedModel
from sparsepack.tables import Table, markdown

OF_EXPERTS = {"dense": 0.05, "sparse": 0.15}
"""Largest relative errors of a mixture's logits: a rounding may choose another expert for a token."""
HEAD = ["runtime", "skipped", "t/s", "range", "x", "GB/token", "of bandwidth"]


def random_model(name: str, layers: int | None = None) -> PackedModel:
    """A model of a name in `MODELS`, with fewer layers if asked, on the GPU."""
    return random_of(config_of(name, layers), name, MODELS[name]["num_hidden_layers"])


def config_of(name: str, layers: int | None) -> Any:
    """Its configuration."""
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    return configuration(name, max_position_embeddings=CONTEXT, **fewer)


def rows(measured: dict[str, Any], bandwidth: float, peers: list[float]) -> list[list[str]]:
    """A row for each way of decoding. peers -- llama.cpp's tokens a second in each round; none where it did not run"""
    shown, peer = [], statistics.median(peers or [0.0])
    for kind in ("chosen", "given"):
        for dense in (True, False):
            row = measured[name_of(kind, dense)]
            speed, (low, high) = 1 / row["seconds"], (1 / s for s in reversed(row["range"]))
            shown.append(
                [
                    f"ours, {name_of(kind, dense)}",
                    f"{row['sparsity']:.1%}",
                    f"{speed:.0f}",
                    f"{low:.0f} to {high:.0f}",
                    f"{speed / peer:.2f}" if peer else "-",
                    f"{row['bytes'] / 1e9:.2f}",
                    f"{row['bytes'] * speed / bandwidth:.0%}",
                ]
            )
    if peer:
        bytes_ = measured[name_of("chosen", True)]["bytes"]
        share = f"{bytes_ * peer / bandwidth:.0%}"
        spread = f"{min(peers):.0f} to {max(peers):.0f}"
        shown.insert(0, ["llama.cpp", "-", f"{peer:.0f}", spread, "1.00", f"{bytes_ / 1e9:.2f}", share])
    return shown


@click.command()
@decode_options(MODELS)
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="llama.cpp's, built with CUDA.")
@click.option(
    "--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For llama.cpp's files."
)
def main(
    layers: int | None,
    names: tuple[str, ...],
    rounds: int,
    json_path: Path | None,
    quick: bool,
    llama_bench: Path | None,
    work: Path,
) -> None:
    """Print the tables."""
    bandwidth = announced_bandwidth()
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    click.echo(device_line())
    for name in names:
        two = random_model(name, 2)
        differences = check(two, LIMITS if two.architecture.experts is None else OF_EXPERTS)
        click.echo(f"{name}, difference of logits from the reference backend, two layers: {differences}")
        peers: list[float] = []
        if llama_bench is None:
            click.echo("no --llama-bench: the peer was not run")
        else:
            peers = peer_speeds(llama_bench, config_of(name, layers), work, PROMPT, NEW, rounds)
        packed = random_model(name, layers)
        measured = measure(packed, find_thresholds(packed, [SHOWN])[SHOWN], rounds)
        title = f"{name}, {traffic.parameters(packed) / 1e9:.1f} billion parameters; {PROMPT} + {NEW}"
        click.echo(markdown(Table(HEAD, rows(measured, bandwidth, peers), title)))
        prefill = measure_prefill(packed, rounds)
        click.echo(markdown(Table(["prompt", "t/s"], [[str(n), f"{n / s:.0f}"] for n, s in prefill.items()])))
        report[name] = {"check": differences, "decode": measured, "peer": peers, "prefill": prefill}
        write_figures(json_path, report)
        del packed, two


if __name__ == "__main__":
    main()
