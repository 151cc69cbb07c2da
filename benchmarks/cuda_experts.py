"""Decoding of a random Qwen3-30B-A3B on the GPU: ours dense and half skipped, llama.cpp beside it.

    python benchmarks/cuda_experts.py [--quick] [--layers N] [--llama-bench PATH] [--json FILE]

The mixture has 128 experts in each of 48 blocks, 8 of which a token has: 30 billion parameters, 3 of them for a token,
17 GB. It is made on the GPU. Its router is sharper than its other matrices, as a trained one is: else roundings would
choose other experts. Before anything is timed, two blocks are compared with the reference backend. The likeliest token
is chosen on the GPU and read by the host, after a prompt of 128, 128 times.

--llama-bench times a GGUF of the same shape, random as well, in the same run.
"""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from cuda_decode import NEW, PROMPT, SHOWN, check, measure, measure_prefill, name_of
from cuda_synthetic import CONTEXT, random_rows, random_superblocks, random_zigzag
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from llama_cpp_file import q4_k, write_random
from llama_cpp_offload import runner
from mixtures import QWEN3_30B, SHARPER, Mixture, configuration
from thresholds import find_thresholds
from torch import Tensor

from sparsepack.bench import traffic
from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.matrices import PackedExperts
from sparsepack.formats.packed import ExpertMlp, PackedExpertsSite, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of
from sparsepack.tables import Table, markdown

LIMITS = {"dense": 0.05, "sparse": 0.15}
"""Largest relative errors of logits: a rounding may choose another expert for a token."""


def random_mixture(size: Mixture, layers: int, device: str = "cuda") -> PackedModel:
    """A mixture of a size, with so many layers; all of it on the device."""
    config = configuration(size, num_hidden_layers=layers, max_position_embeddings=CONTEXT)
    generator = torch.Generator(device=device).manual_seed(0)
    q, kv, narrow = size.heads * size.head_dim, size.kv_heads * size.head_dim, 1 / math.sqrt(2 * size.layers)

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator, device=device)

    def experts(parts: tuple[int, ...], columns: int, scale: float) -> PackedExpertsSite:
        shape = (size.experts, zigzag.bands(sum(parts)), columns)
        blocks = random_superblocks(shape, scale * columns**-0.5, generator)
        return PackedExpertsSite(PackedExperts(blocks, sum(parts), columns), None, parts)

    def layer() -> PackedLayer:
        attention = {
            "attn_in": PackedSite(random_zigzag(q + 2 * kv, size.hidden, 1.0, generator), None, None, (q, kv, kv)),
            "attn_out": PackedSite(random_zigzag(size.hidden, q, narrow, generator), None, None, (size.hidden,)),
        }
        sites = {
            "mlp_in": experts((size.width, size.width), size.hidden, 1.0),
            "mlp_mid": experts((size.hidden,), size.width, narrow),
        }
        router = torch.randn(size.experts, size.hidden, generator=generator, device=device) * SHARPER
        norms = {"attn_norm": norm(size.hidden), "mlp_norm": norm(size.hidden)}
        norms |= {"q_norm": norm(size.head_dim), "k_norm": norm(size.head_dim)}
        return PackedLayer(attention, norms, ExpertMlp(router * size.hidden**-0.5, size.used, True, sites))

    return PackedModel(
        architecture=architecture_of(config, None),
        layers=tuple(layer() for _ in range(layers)),
        embedding=random_rows(size.vocabulary, size.hidden, 1.0, generator),
        output_norm=norm(size.hidden),
        output=random_rows(size.vocabulary, size.hidden, size.hidden**-0.5, generator),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"model": {"name": f"random {size.name}"}},
    )


def write_for_llama_cpp(size: Mixture, path: Path) -> Path:
    """The shape as a GGUF in Q4_K, the output matrix in Q6_K."""
    generator = torch.Generator().manual_seed(0)
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {
        "attn_q": (q, size.hidden),
        "attn_k": (kv, size.hidden),
        "attn_v": (kv, size.hidden),
        "attn_output": (size.hidden, q),
        "ffn_gate_exps": (size.experts, size.width, size.hidden),
        "ffn_up_exps": (size.experts, size.width, size.hidden),
        "ffn_down_exps": (size.experts, size.hidden, size.width),
    }
    of_block = {name: q4_k(shape, 0.1 * shape[-1] ** -0.5, generator) for name, shape in shapes.items()}
    router = SHARPER * size.hidden**-0.5 * torch.randn(size.experts, size.hidden, generator=generator)
    of_block |= dict.fromkeys(("attn_norm", "ffn_norm"), np.ones(size.hidden, np.float32))
    of_block |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), np.ones(size.head_dim, np.float32))
    numbers = {
        "context_length": CONTEXT,
        "embedding_length": size.hidden,
        "block_count": size.layers,
        "feed_forward_length": size.width * size.used,
        "expert_feed_forward_length": size.width,
        "expert_count": size.experts,
        "expert_used_count": size.used,
        "head_count": size.heads,
        "head_count_kv": size.kv_heads,
        "key_length": size.head_dim,
        "value_length": size.head_dim,
        "layer_norm_rms_eps": 1e-6,
        "rope_dimension_count": size.head_dim,
        "vocab_size": size.vocabulary,
    }
    return write_random(path, "qwen3moe", numbers, {**of_block, "ffn_gate_inp": router.numpy()}, generator)


def peer_speed(program: Path, size: Mixture, folder: Path, rounds: int) -> list[float]:
    """llama.cpp's tokens a second after a prompt, all on the GPU, of each round."""
    path = write_for_llama_cpp(size, folder / "peer.gguf")
    sizes = ["-p", "0", "-n", str(NEW), "-d", str(PROMPT), "-r", str(rounds)]
    written, _ = runner(program)(["-m", str(path), "-o", "json", "-ngl", "99", "-fa", "1", *sizes])
    path.unlink()
    (row,) = json.loads(written)
    return [float(value) for value in row["samples_ts"]]


def rows(measured: dict[str, Any], bandwidth: float, peers: list[float]) -> list[list[str]]:
    """A row for each way of decoding. peers -- llama.cpp's tokens a second, 0 where it did not run"""
    shown, peer = [], statistics.median(peers)
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
@click.option("--quick", is_flag=True, help="Two rounds.")
@click.option("--layers", type=int, default=QWEN3_30B.layers, show_default=True, help="Of the model.")
@click.option("--llama-bench", type=click.Path(path_type=Path, exists=True), help="llama.cpp's, built with CUDA.")
@click.option(
    "--work", type=click.Path(path_type=Path, exists=True), default=Path("/tmp"), help="For llama.cpp's file."
)
@json_option
def main(quick: bool, layers: int, llama_bench: Path | None, work: Path, json_path: Path | None) -> None:
    """Print the table."""
    bandwidth, size = announced_bandwidth(), QWEN3_30B
    differences = check(random_mixture(size, 2), LIMITS)
    click.echo(f"{size.name}, difference of logits from the reference backend, two layers: {differences}")
    rounds, peers = 2 if quick else 5, [0.0]
    if llama_bench is None:
        click.echo("no --llama-bench: the peer was not run")
    else:
        peers = peer_speed(llama_bench, replace(size, layers=layers), work, rounds)
    packed = random_mixture(size, layers)
    thresholds = find_thresholds(packed, [SHOWN])[SHOWN]
    measured = measure(packed, thresholds, rounds)
    head = ["runtime", "skipped", "t/s", "range", "x", "GB/token", "of bandwidth"]
    title = f"{size.name}, {layers} layers, {traffic.parameters(packed) / 1e9:.1f} billion parameters; {PROMPT} + {NEW}"
    click.echo(f"{device_line()}\n\n{markdown(Table(head, rows(measured, bandwidth, peers), title))}")
    prefill = measure_prefill(packed, rounds)
    click.echo(markdown(Table(["prompt", "t/s"], [[str(n), f"{n / s:.0f}"] for n, s in prefill.items()])))
    report = {"device": device_line(), "bandwidth": bandwidth, "check": differences}
    write_figures(json_path, {**report, "decode": measured, "peer": peers, "prefill": prefill})


if __name__ == "__main__":
    main()
