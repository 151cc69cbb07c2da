"""Decoding and prefill on the GPU of random models of families that compute something of their own, dense and with
half of the columns skipped.

    python benchmarks/cuda_families.py [--model gemma-2-2b] [--layers N] [--quick] [--json FILE]

As `cuda_decode.py`, which has Llamas: 128 tokens after a prompt of 128, batch 1. Before anything is timed, a model of
the same widths with two layers is compared with the reference backend, dense and sparse, at once and step by step.
"""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from cuda_decode import LIMITS, measure, measure_prefill
from cuda_synthetic import CONTEXT, random_rows, random_zigzag
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from nearness import expect_near, relative_error
from synthetic import random_ids
from thresholds import Thresholds, with_thresholds
from torch import Tensor

from sparsepack.formats.packed import DenseMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.operations_layer import LoadedSite
from sparsepack.runtime.reference.backend import operations
from sparsepack.tables import Table, markdown

SKIPPED = 0.5
TOKENS = 256
MODELS: dict[str, dict[str, Any]] = {
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    },
    "phi-4-mini": {
        "model_type": "phi3",
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
}
"""The configurations, as transformers has them, of models whose weights are random."""


def random_model(name: str, layers: int | None = None) -> PackedModel:
    """A model of a name in `MODELS`, with fewer layers if asked, on the GPU; every site dense."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**MODELS[name], max_position_embeddings=CONTEXT, bos_token_id=2, eos_token_id=1)
    narrow = 1 / math.sqrt(2 * config.num_hidden_layers)
    if layers is not None:
        config = AutoConfig.for_model(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    a, family = architecture_of(config, None), FAMILIES[config.model_type]
    generator = torch.Generator(device="cuda").manual_seed(0)
    heads, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes = {
        "attn_in": ((heads, kv, kv), a.hidden, 1.0),
        "attn_out": ((a.hidden,), heads, narrow),
        "mlp_in": ((a.intermediate, a.intermediate), a.hidden, 1.0),
        "mlp_mid": ((a.hidden,), a.intermediate, narrow),
    }

    def norm(width: int, size: float = 1.0) -> Tensor:
        return size * (1 + 0.2 * torch.randn(width, generator=generator, device="cuda"))

    def layer() -> PackedLayer:
        sites = {
            site: PackedSite(random_zigzag(sum(parts), columns, scale, generator), None, None, parts)
            for site, (parts, columns, scale) in shapes.items()
        }
        norms = {}
        for of in family.norms:
            # What a block adds is small beside the stream, as a trained model's.
            norms[of] = norm(a.head_dim if of in ("q_norm", "k_norm") else a.hidden, narrow if "post" in of else 1.0)
        attention, mlp = ({site: sites[site] for site in names} for names in (ATTENTION_SITES, MLP_SITES))
        return PackedLayer(attention, norms, DenseMlp(mlp))

    embedding = random_rows(a.vocabulary, a.hidden, 1 / a.embedding_scale, generator)
    return PackedModel(
        architecture=a,
        layers=tuple(layer() for _ in range(a.layers)),
        embedding=embedding,
        output_norm=norm(a.hidden),
        output=random_rows(a.vocabulary, a.hidden, a.hidden**-0.5, generator),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"model": {"name": f"random {name}"}},
    )


@torch.inference_mode()
def find_thresholds(packed: PackedModel) -> Thresholds:
    """What half of each site's inputs lie below over random tokens, everything upstream already sparse; by the
    reference's decoder, whose products are watched."""
    decoder = OperationsDecoder(packed, operations, torch.device("cuda"), TOKENS, None, "f32")
    names = {
        id(site): (number, name)
        for number, layer in enumerate(decoder._layers)
        for name, site in {**layer.attention, **layer.mlp.sites}.items()  # type: ignore[attr-defined]
    }
    found: dict[tuple[int, str], float] = {}
    product = LoadedSite.product

    def watched(site: LoadedSite, x: Tensor, *more: Any) -> Tensor:
        size = x.abs()
        threshold = size.flatten().kthvalue(round(SKIPPED * size.numel())).values
        found[names[id(site)]] = float(threshold)
        return product(site, torch.where(size > threshold, x, 0), *more)

    with patch.object(LoadedSite, "product", watched):
        decoder.prefill(0, torch.tensor(random_ids(packed.architecture.vocabulary, TOKENS, seed=1)))
    return found


def check(name: str) -> dict[str, float]:
    """How far logits of two layers are from the reference backend's. RuntimeError where they are another model's."""
    packed = random_model(name, layers=2)
    packed = with_thresholds(packed, find_thresholds(packed))
    ids = random_ids(packed.architecture.vocabulary, 24, seed=2)
    ours, oracle = (Engine(packed, device="cuda", context=64, backend=backend) for backend in ("cuda", "reference"))
    found = {}
    for mode, sparse_from in (("dense", len(ids)), ("sparse", 16)):
        a, b = (engine.teacher_forced(ids, sparse_from).double().cpu() for engine in (ours, oracle))
        found[f"{mode}, at once"] = expect_near(f"{mode}, logits", relative_error(a, b), LIMITS[mode])
    ours.reset()
    steps = torch.stack([ours.prefill(ids[:16]), *(ours.step(id) for id in ids[16:])]).double().cpu()
    found["sparse, steps"] = expect_near("sparse, logits", relative_error(steps, b[15:]), LIMITS["sparse"])
    return found


@click.command()
@click.option("--quick", is_flag=True, help="Two rounds.")
@click.option("--layers", type=int, help="Of the models, to try the script.")
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only these.")
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(quick: bool, layers: int | None, names: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """Print the tables."""
    rounds, bandwidth = 2 if quick else rounds, announced_bandwidth()
    report: dict[str, Any] = {"device": device_line(), "bandwidth": bandwidth}
    for name in names or MODELS:
        differences = check(name)
        click.echo(f"{name}, difference of logits from the reference backend, two layers: {differences}")
        packed = random_model(name, layers)
        result = measure(packed, find_thresholds(packed), rounds)
        lines = [
            [
                *(name, mode, f"{of['sparsity']:.0%}", f"{1 / of['seconds']:.0f}", f"{of['bytes'] / 1e9:.2f}"),
                f"{of['bytes'] / of['seconds'] / bandwidth:.0%}",
            ]
            for mode, of in result.items()
        ]
        click.echo(markdown(Table(["model", "runtime", "skipped", "t/s", "GB/token", "of bandwidth"], lines)))
        prefill = measure_prefill(packed, rounds)
        lines = [[name, str(length), f"{length / seconds:.0f}"] for length, seconds in prefill.items()]
        click.echo(markdown(Table(["model", "prompt", "t/s"], lines)))
        report[name] = {"check": differences, "decode": result, "prefill": prefill}
        del packed
    write_figures(json_path, report)


if __name__ == "__main__":
    main()
