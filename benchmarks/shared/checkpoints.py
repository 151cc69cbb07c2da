"""Random Llama checkpoints on disk, packed for both sides and given thresholds once, then kept.

Weights are random, so text is nonsense, but every matrix has a real model's size, and the thresholds are real ones for
them.
"""

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared.shapes import BILLION, Size, llama_config
from benchmarks.shared.thresholds import Thresholds, find_thresholds, with_thresholds
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.hf_model.model import parameter_shapes
from sparsepack.models.pattern import Pattern, kept
from sparsepack.packing import PackRequest, pack

DEFAULT_WORK = Path("/tmp/sparsepack-bench")
SPARSITIES = (0.5, 0.75)
END = "<|endoftext|>"
INDEX = "model.safetensors.index.json"
"""The last file of a checkpoint that is written."""


@dataclass(frozen=True)
class Synthetic:
    """The files of one size, and scalar thresholds: sparsity -> (layer, site) -> threshold."""

    plain: Path
    zigzag: Path
    thresholds: Mapping[float, Thresholds]

    def packed(self, sparsity: float = 0.0) -> PackedModel:
        """The zigzag model with the thresholds of a sparsity, 0: with none."""
        return with_thresholds(read_packed(self.zigzag, verify=False), self.thresholds.get(sparsity, {}))


def synthetic(work: Path = DEFAULT_WORK, size: Size = BILLION) -> Synthetic:
    """The model of a size, made in `work` unless it is there. A minute or two and some 9 GB of memory for a billion."""
    folder = work / size.name
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, plain, zigzag = folder / "checkpoint", folder / "q4_k.gguf", folder / "zigzag.gguf"
    if not (checkpoint / INDEX).is_file():
        click.echo(f"making {checkpoint}", err=True)
        make_shards(checkpoint, size)
    for path, kind in ((plain, "q4_k"), (zigzag, "zigzag-q4_k")):
        if not path.is_file():
            click.echo(f"packing {path}", err=True)
            pack(PackRequest(str(checkpoint), path, format=kind))
            gc.collect()
    table = folder / "thresholds.json"
    if not table.is_file():
        click.echo(f"finding {table}", err=True)
        found = find_thresholds(read_packed(zigzag), SPARSITIES).items()
        table.write_text(json.dumps({str(s): {f"{n}.{site}": t for (n, site), t in v.items()} for s, v in found}))
    return Synthetic(plain, zigzag, _read_table(table))


def _read_table(path: Path) -> dict[float, Thresholds]:
    def key(text: str) -> tuple[int, str]:
        number, _, site = text.partition(".")
        return int(number), site

    raw = json.loads(path.read_text())
    return {float(s): {key(name): value for name, value in sites.items()} for s, sites in raw.items()}


def save_config(folder: Path, size: Size) -> Any:
    """The configuration of a checkpoint, written with the tokenizer."""
    config = llama_config(size, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return config


def random(name: str, shape: tuple[int, ...], layers: int, generator: torch.Generator) -> torch.Tensor:
    """A parameter, on the generator's device."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name:
        noise = 1 + 0.2 * noise
    elif "embed_tokens" not in name:
        noise = noise / shape[-1] ** 0.5
    if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
        noise = noise / (2 * layers) ** 0.5
    return noise.to(torch.bfloat16)


def make_shards(
    folder: Path, size: Size, device: str = "cpu", pattern: Pattern | None = None, most: int = 5 << 30
) -> None:
    """Write a random checkpoint in shards of at most `most` bytes, its weights made on `device`, and pruned there to a
    pattern if any, and a byte tokenizer.

    Weights are bfloat16 of variance 1 / columns, so that activations keep their size. What a block adds is scaled down
    as GPT-2's initialisation does it; else rounding would grow from block to block.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(save_config(folder, size))
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if held and held + nbytes > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    generator = torch.Generator(device).manual_seed(0)
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {name: random(name, shapes[name], size.layers, generator) for name in names}
        weights = {name: pruned(name, weight, pattern).cpu() for name, weight in made.items()}
        save_file(weights, path, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, path.name)
    # Last: without it, the next run makes them again.
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def pruned(name: str, weight: torch.Tensor, pattern: Pattern | None) -> torch.Tensor:
    """Return a weight pruned by magnitude, if it is a projection's and there is a pattern."""
    return weight * kept(weight.abs(), pattern) if pattern and "_proj." in name else weight


def save_tokenizer(folder: Path) -> None:
    """One token a byte and one merge (a GGUF cannot hold an empty list); the model's other ids are unused."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("t", "h")]))
    inner.add_special_tokens([END])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END).save_pretrained(folder)
