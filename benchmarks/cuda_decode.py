"""Decoding and prefill of Llamas of 1, 7 and 8 billion parameters on the GPU: llama.cpp, ours dense, ours sparse.

    python benchmarks/cuda_decode.py [--quick] [--layers N] [--model 8b] [--llama-bench PATH] [--json FILE]

What is measured, `cuda_speeds.py` says. Without --llama-bench, which times a GGUF of the same shape in the same run,
llama.cpp's figures are anchors: measured in November 2026 on an H100 with random Q4_K weights of the same shapes
(benchmarks/notes/anchors.md). Before anything is timed, a model of the same widths with two layers is compared with the
reference backend.
"""

from dataclasses import replace
from typing import Any

import click
from cuda_speeds import (
    HEAD,
    KINDS,
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
from cuda_synthetic import CONTEXT, LLAMA_1B, LLAMA_7B, LLAMA_8B, random_model
from cuda_timing import announced_bandwidth, device_line
from figures import write_figures
from synthetic import llama_config
from thresholds import find_thresholds

from sparsepack.tables import Table, markdown

SIZES = {"8b": LLAMA_8B, "7b": LLAMA_7B, "1b": LLAMA_1B}
DECODE_ANCHORS = {"8b": 283.0, "7b": 303.0}
PREFILL_ANCHORS = {"8b": {512: 9600.0, 2048: 10050.0, 8192: 9690.0}}
SPARSITIES = (0.0, 0.1, 0.25, 0.4, 0.5, 0.65, 0.8)


@click.command()
@decode_options(SIZES)
def main(asked: Asked) -> None:
    """Print the tables."""
    bandwidth = announced_bandwidth()
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    for name in asked.names:
        size = replace(SIZES[name], layers=asked.layers or SIZES[name].layers)
        differences = check(random_model(size, layers=2))
        click.echo(f"{size.name}, difference of logits from the reference backend, two layers: {differences}")
        peer = peer_of(asked.llama_bench, llama_config(size, max_position_embeddings=CONTEXT), asked.work, asked.rounds)
        anchors = peer.decode or ([DECODE_ANCHORS[name]] if name in DECODE_ANCHORS else [])
        packed = random_model(size)
        tried = (SHOWN,) if asked.quick or name != "8b" else SPARSITIES
        thresholds = find_thresholds(packed, tried)
        results = {sparsity: measure(packed, thresholds[sparsity], asked.rounds) for sparsity in tried}
        title = f"{size.name}, llama.cpp's figure " + (
            "of this run" if peer.decode else "an anchor" if anchors else "missing"
        )
        click.echo(markdown(Table(HEAD, decode_rows(results[SHOWN], bandwidth, anchors), title)))
        if len(tried) > 1:
            lines = [
                [f"{each:.0%}", *decode_rows(results[each], bandwidth, anchors, KINDS[1:])[-1][1:]] for each in tried
            ]
            click.echo(markdown(Table(["target", *HEAD[1:]], lines)))
        prefill = measure_prefill(packed, asked.rounds)
        click.echo(markdown(prompt_table(prefill, peer.prompts or PREFILL_ANCHORS.get(name, {}))))
        report[name] = {"check": differences, "decode": results, "peer": vars(peer), "prefill": prefill}
        del packed
    write_figures(asked.json_path, report)


if __name__ == "__main__":
    main()
