"""A random Llama with ReLU for speed tests, whose neurons are active as often as those of a trained model.

One channel of the hidden vector is the same for every token, and its weight in the gate shifts each neuron's gate so
that it is above zero at the share of tokens of a neuron drawn from the trained model's.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from synthetic import Size, random, random_ids, save_config

from sparsepack.files.hashing import NO_HASH
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.records.neurons import NeuronCounts
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.models.stock.whole import load_model

CONSTANT = 8.0
"""The value of the channel that is the same for every token."""
ENCODER = "cuda" if torch.cuda.is_available() else "cpu"
COUNTED = 1_000_000
"""Tokens that the made-up counts of the random model are of."""


def written(checkpoint: Any, format: str, counts: NeuronCounts, folder: Path) -> PackedModel:
    """A checkpoint in a format, packed unless it is there."""
    path = folder / f"{format}.gguf"
    if not path.is_file():
        click.echo(f"packing {path}", err=True)
        FORMATS[format].plan(checkpoint, PlanRequest(neurons=counts, device=ENCODER)).write(path)
    return read_packed(path, verify=False)


def random_relu(size: Size, frequency: torch.Tensor, work: Path) -> tuple[PackedModel, PackedModel]:
    """A random model by neurons and in zigzag, of neurons that are active as often as those of `frequency`."""
    folder = work / f"{size.name}-relu"
    generator = torch.Generator().manual_seed(0)
    drawn = frequency[torch.randint(len(frequency), (size.layers, size.intermediate), generator=generator)]
    if not (folder / "model.safetensors").is_file():
        click.echo(f"making {folder}", err=True)
        make_relu(folder, size, drawn, generator)
    checkpoint = open_checkpoint(folder)
    counts = NeuronCounts((drawn.double() * COUNTED).long(), COUNTED, NO_HASH)
    return written(checkpoint, "neuron-q4_k", counts, folder), written(checkpoint, "zigzag-q4_k", counts, folder)


def make_relu(folder: Path, size: Size, frequency: torch.Tensor, generator: torch.Generator) -> None:
    """The weights. A gate is normally distributed, so its shift is the normal quantile of the share."""
    folder.mkdir(parents=True, exist_ok=True)
    config = save_config(folder, size)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "hidden_act": "relu"}))
    weights = {name: random(name, shape, size.layers, generator) for name, shape in parameter_shapes(config).items()}
    weights["model.embed_tokens.weight"][:, 0] = CONSTANT
    shift = torch.special.ndtri(frequency.double().clamp(1e-4, 1 - 1e-4)) / CONSTANT
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{prefix}{name}.weight"][0] = 0  # nothing is added to the channel
        weights[f"{prefix}post_attention_layernorm.weight"][:] = 1
        weights[f"{prefix}mlp.up_proj.weight"][:, 0] = 0
        weights[f"{prefix}mlp.gate_proj.weight"][:, 0] = shift[layer].to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The norm divides the channel by the size of the vector, which grows from block to block: measured, and undone.
    seen: dict[int, float] = {}
    model = load_model(open_checkpoint(folder))
    for number, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(lambda _, x, n=number: seen.update({n: float(x[0][0, 8:, 0].mean())}))
    with torch.inference_mode():
        model(torch.tensor([random_ids(size.vocabulary, 64, seed=1)]), use_cache=False, logits_to_keep=1)
    for layer, found in seen.items():
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"][0] = CONSTANT / found
    del model
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def peers_model(size: Size, work: Path) -> Path:
    """What llama.cpp decodes beside it: the same weights in plain Q4_K, with SiLU, since its Llama knows nothing else.

    `random_relu` has made the weights. Dense decoding reads and computes as much with either activation.
    """
    made, folder = work / f"{size.name}-relu", work / f"{size.name}-silu"
    path = folder / "q4_k.gguf"
    if not path.is_file():
        folder.mkdir(exist_ok=True)
        for file in made.glob("*.json"):
            shutil.copy(file, folder)
        values = json.loads((made / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "hidden_act": "silu"}))
        weights = folder / "model.safetensors"
        weights.unlink(missing_ok=True)
        os.link(made / "model.safetensors", weights)
        click.echo(f"packing {path}", err=True)
        FORMATS["q4_k"].plan(open_checkpoint(folder), PlanRequest(device=ENCODER)).write(path)
    return path
