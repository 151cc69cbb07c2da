"""MLPs by neurons on a CPU: is the output the same, and how fast is decoding beside our dense engine and llama.cpp?

MODEL is one with ReLU, such as books-26m-relu; the text calibrates it and is what it decodes. Beside it stands a random
Llama with ReLU of 1.1 billion parameters, whose neurons are active as often as those of MODEL: one channel of the
hidden vector is the same for every token, and its weight in the gate shifts each neuron's gate so that it is above zero
at the share of tokens of a neuron drawn from MODEL. llama.cpp has the same weights in Q4_K, with SiLU, since its Llama
knows nothing else: dense decoding reads and computes as much. Sides take turns, and so does the reading of memory.
"""

import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from benchmarks.shared import machine
from benchmarks.shared.checkpoints import DEFAULT_WORK, random, save_config
from benchmarks.shared.llama_cpp import LlamaCpp, bytes_per_token, check_logits
from benchmarks.shared.shapes import BILLION, TINY, Size, random_ids
from benchmarks.shared.timing import check_close, median_ratio, of_bound
from sparsepack.bench import decode as engine_bench
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import load
from sparsepack.calibrate.statistics import activity
from sparsepack.eval.subject import open_subject
from sparsepack.files.hashing import NO_HASH
from sparsepack.files.text import read_text
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.models.activity import NeuronCounts
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.hf_model.model import load_model, parameter_shapes
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.runtime.engine import Engine
from sparsepack.tables import Table, markdown

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


def peer_model(size: Size, work: Path) -> Path:
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


DECODED = ("threads", "engine", "tokens/s", "range", "x", "MB/token", "active neurons", "of read bandwidth")
PROMPT = 16
"""Tokens before those that are timed."""
LARGEST_ERROR = 1e-3
"""Between the logits of steps that skip and of steps that do not, relative: their order of sums differs."""


@dataclass(frozen=True)
class Side:
    """One way to decode: by an engine, dense or not, or by llama.cpp."""

    name: str
    packed: PackedModel | None
    dense: bool


@dataclass(frozen=True)
class Peer:
    """llama.cpp with a model of the same weights; the error of its logits, relative, and what a token reads."""

    engine: LlamaCpp
    error: float
    bytes: float


@torch.inference_mode()
def checked_peer(path: Path, ids: Sequence[int]) -> Peer:
    """llama.cpp, whose logits are those of the stock model with the file's weights, or `RuntimeError`."""
    peer = LlamaCpp(path, len(ids))
    stock = open_subject(str(path))
    expected = stock.model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 :]
    return Peer(peer, check_logits(peer, ids[:PROMPT], ids[PROMPT:], expected), bytes_per_token(path))


def books(model: Path, text: str, work: Path) -> tuple[PackedModel, PackedModel, torch.Tensor, list[int]]:
    """MODEL by neurons and in zigzag; how often each of its neurons is active; tokens of the text."""
    checkpoint = open_checkpoint(model)
    if not (work / "calibration").is_dir():
        calibrate(checkpoint, read_text(text), work / "calibration", CalibrateOptions(samples=8))
    layers = activity(load(work / "calibration"))
    counts = NeuronCounts(torch.stack([it.active for it in layers]), layers[0].tokens, NO_HASH)
    packed = {name: written(checkpoint, name, counts, work) for name in ("neuron-q4_k", "zigzag-q4_k")}
    ids = rolling_windows(checkpoint.tokenizer, read_text(text), 2048, 5)[0].flatten().tolist()
    return packed["neuron-q4_k"], packed["zigzag-q4_k"], counts.frequency.flatten(), ids


def agreement(packed: PackedModel, ids: Sequence[int], window: int) -> tuple[float, float, int]:
    """Steps that skip against steps that do not: share of equal top tokens, relative error of the logits, positions."""
    same = positions = 0
    error = norm = 0.0
    engine = Engine(packed, context=window, backend="cpu")
    for first in range(0, len(ids), window):
        logits = []
        for engine.dense in (True, False):
            logits.append(engine.teacher_forced(ids[first : first + window], 0))
        same += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        positions += len(logits[0])
        error += float((logits[0] - logits[1]).double().square().sum())
        norm += float(logits[0].double().square().sum())
    return same / positions, check_close("by neurons, logits", (error / norm) ** 0.5, LARGEST_ERROR), positions


def sides(zigzag: PackedModel, neurons: PackedModel) -> list[Side]:
    """Return our ways to decode a model."""
    by_neurons = [Side("by neurons, dense", neurons, True), Side("by neurons", neurons, False)]
    return [Side("zigzag, dense", zigzag, True), *by_neurons]


def seconds(engine: Engine | LlamaCpp, ids: Sequence[int]) -> float:
    """The seconds that the steps after the prompt take together."""
    engine.reset()
    if isinstance(engine, LlamaCpp):
        engine.decode(ids[:PROMPT])
        start = time.perf_counter()
        for token in ids[PROMPT:]:
            engine.decode([token])
        return time.perf_counter() - start
    engine.prefill(ids[:PROMPT])
    start = time.perf_counter()
    for token in ids[PROMPT:]:
        engine.step(token)
    return time.perf_counter() - start


def decoded(
    chosen: Sequence[Side], peer: Peer | None, ids: Sequence[int], threads: int, rounds: int
) -> list[list[Any]]:
    """Rows of a table: tokens a second of steps on a text, in turns."""
    torch.set_num_threads(threads)
    packed = {id(side.packed): side.packed for side in chosen if side.packed is not None}
    engines = {key: Engine(each, context=len(ids), backend="cpu", threads=threads) for key, each in packed.items()}
    if peer is not None:
        peer.engine.threads(threads)
    rates: dict[str, list[float]] = {side.name: [] for side in chosen}
    bandwidth = []
    needed: dict[str, tuple[float, list[float]]] = {}
    for _ in range(rounds):
        bandwidth.append(machine.cpu_read_bandwidth(threads))
        for side in chosen:
            if side.packed is None:
                assert peer is not None
                taken = seconds(peer.engine, ids)
                needed[side.name] = peer.bytes, []
            else:
                engine = engines[id(side.packed)]
                engine.dense = side.dense
                taken = seconds(engine, ids)
                active = engine.activity()
                records = [share for (_, name), share in active.items() if name == "mlp_records"]
                needed[side.name] = engine_bench.bytes_per_token(side.packed, active), records
            rates[side.name].append((len(ids) - PROMPT) / taken)
    return [
        [
            threads,
            side.name,
            f"{statistics.median(rates[side.name]):.1f}",
            f"{min(rates[side.name]):.1f} to {max(rates[side.name]):.1f}",
            f"{median_ratio(rates[side.name], rates[chosen[0].name]):.2f}",
            f"{read / 1e6:.1f}",
            f"{statistics.mean(records):.3f}" if records else "-",
            of_bound(read, 1 / statistics.median(rates[side.name]), statistics.median(bandwidth)),
        ]
        for side in chosen
        for read, records in [needed[side.name]]
    ]


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--text", required=True, help="Text for the calibration and for decoding MODEL.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", "threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--tiny", is_flag=True, help="A tiny random model in place of the large one, to try the script.")
def main(model: Path, text: str, work: Path, rounds: int, threads: tuple[int, ...], tiny: bool) -> None:
    """Print the tables."""
    setting, folder = machine.setting(), work / model.name
    folder.mkdir(parents=True, exist_ok=True)
    by_neurons, zigzag, frequency, ids = books(model, text, folder)
    click.echo(machine.setting_line(setting))
    same, error, positions = agreement(by_neurons, ids, 2048)
    click.echo(
        f"\n{model.name}: {same:.2%} of {positions:,} top tokens are the dense engine's, logits differ by {error:.1e}\n"
    )
    for count in threads:
        rows = decoded(sides(zigzag, by_neurons), None, ids[: PROMPT + 256], count, rounds)
        click.echo(markdown(Table(DECODED, rows)))
    size = TINY if tiny else BILLION
    large, large_zigzag = random_relu(size, frequency, work)
    ids = random_ids(size.vocabulary, PROMPT + 48, seed=3)
    same, error, positions = agreement(large, ids, len(ids))
    click.echo(f"\n{size.name}, random: {same:.2%} of {positions} top tokens, logits differ by {error:.1e}")
    peer = checked_peer(peer_model(size, work), ids)
    click.echo(f"llama.cpp's logits differ from the stock model's with its weights by {peer.error:.1e}\n")
    chosen = [Side("llama.cpp, Q4_K", None, True), *sides(large_zigzag, large)]
    for count in threads:
        click.echo(markdown(Table(DECODED, decoded(chosen, peer, ids, count, rounds))))
    after = machine.setting()["load_average"]
    click.echo(f"\nload before {setting['load_average']:.1f}, after {after:.1f}, this benchmark's included")
