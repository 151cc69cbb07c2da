"""Decoding and prefill on the GPU of random models of many families, mixtures of experts too: llama.cpp, ours dense,
ours with half of the columns skipped.

    python benchmarks/cuda_families.py [--model gemma-2-2b] [--layers N] [--quick] [--llama-bench PATH] [--json FILE]

What is measured, `cuda_speeds.py` says. Before anything is timed, two layers of each are compared with the reference
backend. --llama-bench times a GGUF of the same shape, random as well, in the same run.
"""

from typing import Any

import click
from cuda_speeds import (
    HEAD,
    LIMITS,
    NEW,
    PROMPT,
    SHOWN,
    Asked,
    check,
    decode_options,
    decode_rows,
    measure,
    measure_prefill,
    peer_of,
    prompt_table,
)
from cuda_synthetic import CONTEXT, random_of
from cuda_timing import announced_bandwidth, device_line
from figures import write_figures
from shapes import MODELS, configuration
from thresholds import find_thresholds

from sparsepack.bench import decode as traffic
from sparsepack.formats.packed import PackedModel
from sparsepack.tables import Table, markdown

OF_EXPERTS = {"dense": 0.05, "sparse": 0.15}
"""Largest relative errors of a mixture's logits: a rounding may choose another expert for a token."""


def config_of(name: str, layers: int | None) -> Any:
    """The configuration of a name in `MODELS`, with fewer layers if asked."""
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    return configuration(name, max_position_embeddings=CONTEXT, **fewer)


def random_model(name: str, layers: int | None = None) -> PackedModel:
    """A model of it, on the GPU."""
    return random_of(config_of(name, layers), name, MODELS[name]["num_hidden_layers"])


@click.command()
@decode_options(MODELS)
def main(asked: Asked) -> None:
    """Print the tables."""
    bandwidth = announced_bandwidth()
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    click.echo(device_line())
    for name in asked.names:
        packed = random_model(name, 2)
        differences = check(packed, LIMITS if packed.architecture.experts is None else OF_EXPERTS)
        click.echo(f"{name}, difference of logits from the reference backend, two layers: {differences}")
        peer = peer_of(asked.llama_bench, config_of(name, asked.layers), asked.work, asked.rounds)
        packed = random_model(name, asked.layers)
        measured = measure(packed, find_thresholds(packed, [SHOWN])[SHOWN], asked.rounds)
        title = f"{name}, {traffic.parameters(packed) / 1e9:.1f} billion parameters; {PROMPT} + {NEW}"
        click.echo(markdown(Table(HEAD, decode_rows(measured, bandwidth, peer.decode), title)))
        prefill = measure_prefill(packed, asked.rounds)
        click.echo(markdown(prompt_table(prefill, peer.prompts)))
        report[name] = {"check": differences, "decode": measured, "peer": vars(peer), "prefill": prefill}
        write_figures(asked.json_path, report)
        del packed


if __name__ == "__main__":
    main()
