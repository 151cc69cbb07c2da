"""A random Llama of about a billion parameters for speed tests: made, packed and given thresholds once, then cached.

    python benchmarks/synthetic.py [--work FOLDER] [--tiny]

Its weights are random, so its text is nonsense, but every matrix has a real model's size, and the thresholds are real
ones for it (`thresholds.py`).
"""

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from thresholds import Thresholds, find_thresholds, with_thresholds

from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.packing import PackRequest, pack

DEFAULT_WORK = Path("/tmp/sparsepack-bench")
SPARSITIES = (0.5, 0.75)
END = "<|endoftext|>"


@dataclass(frozen=True)
class Size:
    """The numbers of a Llama."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


BILLION = Size("llama-1b", 2048, 16, 8192, 32, 8, 32000)
LLAMA_3_2_1B = Size("llama-3.2-1b", 2048, 16, 8192, 32, 8, 128256, tied=True)
QWEN_0_5B = Size("qwen2.5-0.5b", 896, 24, 4864, 14, 2, 151936, tied=True)
"""The widths of Qwen2.5-0.5B; a Llama all the same."""
TINY = Size("llama-tiny", 256, 2, 512, 4, 2, 512)


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
    if not (checkpoint / "model.safetensors").is_file():
        click.echo(f"making {checkpoint}", err=True)
        make_checkpoint(checkpoint, size)
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


def make_checkpoint(folder: Path, size: Size) -> None:
    """Random bfloat16 weights of variance 1 / columns, so that activations keep their size, and a byte tokenizer.

    What a block adds is scaled down as GPT-2's initialisation does it; else roundings would grow from block to block.
    """
    from safetensors.torch import save_file

    config = save_config(folder, size)
    generator = torch.Generator().manual_seed(0)
    weights = {name: random(name, shape, size.layers, generator) for name, shape in parameter_shapes(config).items()}
    unfinished = folder / "unfinished"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")


def llama_config(size: Size, **changes: Any) -> Any:
    """What transformers has to know of a Llama of a size; `changes` are other fields, or other values of these."""
    from transformers import LlamaConfig

    values = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": size.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    return LlamaConfig(**{**values, **changes})


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


def random_ids(vocabulary: int, count: int, seed: int) -> list[int]:
    """Random token ids."""
    ids: list[int] = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--tiny", is_flag=True, help="A model of a few hundred thousand parameters, to try the scripts.")
def main(work: Path, tiny: bool) -> None:
    """Make the model, or say where it is."""
    made = synthetic(work, TINY if tiny else BILLION)
    click.echo(f"{made.plain}\n{made.zigzag}")
    for sparsity, table in made.thresholds.items():
        few = {f"{n}.{site}": round(value, 4) for (n, site), value in list(table.items())[:4]}
        click.echo(f"sparsity {sparsity}: {few} ...")


if __name__ == "__main__":
    main()
