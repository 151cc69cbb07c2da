"""Our CPU engine against llama.cpp on a random mixture of experts in Q4_K: where skipping and routing compound.

    python benchmarks/cpu_experts.py [--work FOLDER] [--quick] [--tiny] [--threads 2]

A Qwen3-MoE of 3 billion parameters, of which a token has 0.6 billion. Its router is sharper than its other matrices, as
a trained one is: else roundings would choose other experts. Decoding is greedy, sampling included, after a prompt, both
sides in turns in one process; ratios are taken within a round and their median printed. Dense outputs of both are
compared first with the stock model's, block by block, on the dequantised weights of their own file, and nothing is
timed where they differ.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import cpu_setting
import torch
from cpu_decode import decode_peer
from cpu_engine import CONTEXT, decode_ours, open_engine
from figures import json_option, write_figures
from llama_cpp_peer import LlamaCpp
from mixtures import SHARPER, THREE_BILLION, TINY, Mixture, configuration
from nearness import expect_near, relative_error
from synthetic import DEFAULT_WORK, random, random_ids, save_tokenizer
from thresholds import Thresholds, with_thresholds

from sparsepack.bench import decode as traffic
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.experts import apart_source
from sparsepack.models.checkpoint.sources import MadeSource
from sparsepack.models.families import FAMILIES
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.skipped import skipped_weights
from sparsepack.tables import Table, markdown

PROMPT, GENERATED, CHECKED = 64, 64, 32
SPARSITY = 0.5
OURS, PEERS = 5e-3, 0.05
"""Largest relative errors of dense logits; llama.cpp rounds activations to 8 bits, which experts feel twice."""


@dataclass(frozen=True)
class Files:
    """The mixture for both sides, and thresholds at which half of each site's inputs are inactive."""

    plain: Path
    zigzag: Path
    thresholds: Thresholds

    def packed(self, sparse: bool) -> PackedModel:
        """What our engine runs."""
        return with_thresholds(read_packed(self.zigzag, verify=False), self.thresholds if sparse else {})


def made(work: Path, size: Mixture) -> Files:
    """The files of a size, made in `work` unless they are there. Ten minutes on two quiet cores."""
    folder = work / size.name
    checkpoint, plain, zigzag = folder / "checkpoint", folder / "q4_k.gguf", folder / "zigzag.gguf"
    checkpoint.mkdir(parents=True, exist_ok=True)
    if not (checkpoint / "model.safetensors.index.json").is_file():
        click.echo(f"making {checkpoint}", err=True)
        make_checkpoint(checkpoint, size)
    for path, kind in ((zigzag, "zigzag-q4_k"), (plain, "q4_k")):
        if not path.is_file():
            click.echo(f"packing {path}", err=True)
            pack(PackRequest(str(checkpoint), path, format=kind))
    table = folder / "thresholds.json"
    if not table.is_file():
        click.echo(f"finding {table}", err=True)
        found: dict[tuple[int, str], float] = {}
        stock_logits(zigzag, random_ids(size.vocabulary, 128, seed=1), found)
        table.write_text(json.dumps({f"{layer}.{site}": value for (layer, site), value in found.items()}))
    keys = ((name.split("."), value) for name, value in json.loads(table.read_text()).items())
    return Files(plain, zigzag, {(int(layer), site): value for (layer, site), value in keys})


def make_checkpoint(folder: Path, size: Mixture) -> None:
    """Random weights, as `synthetic.make_checkpoint` makes them; a file for each block, its experts one by one."""
    from safetensors.torch import save_file

    config = configuration(
        size,
        intermediate_size=size.width * size.used,
        max_position_embeddings=4096,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    save_tokenizer(folder)
    generator, files = torch.Generator().manual_seed(0), dict[str, str]()
    shapes = parameter_shapes(config)
    for number, names in enumerate(by_block(list(shapes))):
        file = f"model-{number:05}.safetensors"
        weights = {name: random(name, shapes[name], size.layers, generator) for name in names}
        weights |= {name: value * SHARPER for name, value in weights.items() if name.endswith("mlp.gate.weight")}
        weights = one_by_one(weights)
        save_file(weights, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def one_by_one(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a stock Qwen3-MoE as most checkpoints have them."""
    entries = {name: (value.dtype, tuple(value.shape)) for name, value in weights.items()}
    source = apart_source(MadeSource(None, entries, weights.__getitem__), FAMILIES["qwen3_moe"])
    return {name: source.tensor(name) for name in source.shapes}


def by_block(names: list[str]) -> Iterator[list[str]]:
    """The names of tensors, block by block, those outside of blocks first."""
    prefixes = sorted({".".join(name.split(".")[:3]) for name in names if ".layers." in name})
    yield [name for name in names if ".layers." not in name]
    for prefix in prefixes:
        yield [name for name in names if name.startswith(f"{prefix}.")]


@torch.inference_mode()
def stock_logits(path: Path, ids: list[int], found: dict[tuple[int, str], float] | None = None) -> torch.Tensor:
    """The stock model's logits [S, vocabulary] with a file's own weights, one block in memory at a time.

    found -- gets the median of |x| of each site, everything upstream sparse by these; None: all is dense
    """
    stock = open_artifact(path).stock()
    stream = BlockStream(stock)
    hidden = stream.embed(torch.tensor([ids]))

    def sparsify(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        if found is None:
            return None
        sizes = x.abs().flatten()
        found[layer, site] = float(sizes.kthvalue(max(1, round(SPARSITY * len(sizes)))).values)
        return torch.where(x.abs() > found[layer, site], x, 0)

    for layer in range(stock.layers):
        stream.load(layer)
        with site_hooks([(layer, stream.block)], stock.family, sparsify):
            hidden = stream(hidden)
    return torch.nn.functional.linear(stream.finish(hidden), stream.head())[0]


def check(files: Files, peer: LlamaCpp, threads: int, vocabulary: int) -> dict[str, float]:
    """The relative errors of both sides' dense logits. Raises `RuntimeError` where one is too large."""
    ids = random_ids(vocabulary, CHECKED, seed=2)
    engine = open_engine(files.packed(sparse=False), "cpu", threads)
    ours = relative_error(engine.teacher_forced(ids, CHECKED), stock_logits(files.zigzag, ids))
    peer.reset()
    found = []
    for id in ids:
        peer.decode([id])
        found.append(peer.logits())
    theirs = relative_error(torch.stack(found), stock_logits(files.plain, ids))
    return {"ours": expect_near("ours, logits", ours, OURS), "llama.cpp": expect_near("llama.cpp", theirs, PEERS)}


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--quick", is_flag=True, help="Few rounds.")
@click.option("--tiny", is_flag=True, help="A tiny model, to try the script; its figures mean nothing.")
@click.option("--threads", type=int, default=2, show_default=True)
@json_option
def main(work: Path, quick: bool, tiny: bool, threads: int, json_path: Path | None) -> None:
    """Print the table."""
    setting, size = cpu_setting.setting(), TINY if tiny else THREE_BILLION
    files = made(work, size)
    torch.set_num_threads(threads)
    peer = LlamaCpp(files.plain, CONTEXT)
    peer.threads(threads)
    errors = check(files, peer, threads, size.vocabulary)
    packed = files.packed(sparse=True)
    engine = open_engine(packed, "cpu", threads)
    prompt = random_ids(size.vocabulary, PROMPT, seed=3)
    speeds: dict[str, list[float]] = {"llama.cpp Q4_K": [], "ours, dense": [], "ours, half skipped": []}
    activity: dict[str, traffic.Activity] = {}
    for _ in range(3 if quick else 9):
        speeds["llama.cpp Q4_K"].append(decode_peer(peer, prompt, GENERATED))
        for name, dense in (("ours, dense", True), ("ours, half skipped", False)):
            speeds[name].append(decode_ours(engine, dense, prompt, GENERATED))
            activity[name] = engine.activity()
    rows = [row(name, found, speeds["llama.cpp Q4_K"], packed, activity.get(name)) for name, found in speeds.items()]
    total = traffic.parameters(packed)
    result = {
        "setting": setting,
        "mixture": vars(size),
        "parameters": total,
        "threads": threads,
        "relative_errors": errors,
        "decode": rows,
    }
    write_figures(json_path, result)
    head = ["engine", "tokens/s", "times llama.cpp", "skipped", "MB a token", "of all bytes"]
    shown = [[each["engine"], *each["shown"]] for each in rows]
    of_token = sum(packed.parameters.values())
    title = f"{total / 1e9:.2f} billion parameters, {of_token / 1e9:.2f} of the blocks' for a token; {threads} threads"
    print(f"{cpu_setting.setting_line(setting)}\n\n{markdown(Table(head, shown, title))}")


def row(
    name: str, speeds: list[float], peers: list[float], packed: PackedModel, activity: traffic.Activity | None
) -> dict[str, Any]:
    """A row of the table: speeds, and of ours what a token reads."""
    speed, ratio = statistics.median(speeds), cpu_setting.median_ratio(speeds, peers)
    read, skipped = (None, None)
    if activity is not None:
        read, skipped = traffic.bytes_per_token(packed, activity), skipped_weights(packed, activity).overall
    stored = traffic.stored_bytes(packed)
    shown = [f"{speed:.1f} ({min(speeds):.1f} to {max(speeds):.1f})", f"{ratio:.2f}"]
    shown += ["", "", ""] if read is None else [f"{skipped:.1%}", f"{read / 1e6:.0f}", f"{read / stored:.1%}"]
    return {
        "engine": name,
        "tokens_per_second": speed,
        "ratio": ratio,
        "skipped": skipped,
        "bytes_per_token": read,
        "samples": speeds,
        "shown": shown,
    }


if __name__ == "__main__":
    main()
