"""MLPs by neurons on a CPU: is the text the same, how fast is decoding beside our dense engine, how near is the kernel
to the memory's speed?

    python benchmarks/cpu_neurons.py MODEL --text F [--work FOLDER] [--rounds 7] [--tiny]

MODEL is one with ReLU, such as books-26m-relu; text F calibrates it and is what it decodes. Beside it stands a random
Llama with ReLU of 1.1 billion parameters, whose neurons are active as often as those of MODEL (`synthetic_relu.py`),
and llama.cpp with the same weights in Q4_K. Sides take turns in one process, and so does the reading of memory.
"""

import cpu_setting  # isort: skip
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from llama_cpp_peer import LlamaCpp, bytes_per_token, check
from synthetic import BILLION, DEFAULT_WORK, TINY, random_ids
from synthetic_relu import peers_model, random_relu, written

from sparsepack.bench import decode as traffic
from sparsepack.calibration.folder import load
from sparsepack.calibration.neurons import activity
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.run import calibrate
from sparsepack.eval.subject import open_subject
from sparsepack.files.hashing import NO_HASH
from sparsepack.files.text import read_text
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.records.neurons import NeuronCounts
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.tuning import ROTATION
from sparsepack.tables import Table, markdown

PARTS = ("model", "large", "kernel")
DECODED = ("threads", "engine", "tokens/s", "range", "x", "MB/token", "active neurons", "of read bandwidth")
READ = ("threads", "hidden x neurons", "active", "records, GB/s", "plain reading, GB/s", "share", "range")
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
    return Peer(peer, check(peer, ids[:PROMPT], ids[PROMPT:], expected), bytes_per_token(path))


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
    relative = (error / norm) ** 0.5
    if relative > LARGEST_ERROR:
        raise SystemExit(f"skipping changes the logits by {relative:.1e}, more than {LARGEST_ERROR}; not measured")
    return same / positions, relative, positions


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    engine.reset()
    sampler = Sampler(Sampling(temperature=0.0))
    ids = [sampler.choose(engine.prefill(prompt))]
    while len(ids) < count:
        ids.append(engine.decode_next(ids[-1], sampler))
    return ids


def greedy_agreement(packed: PackedModel, prompt: Sequence[int], count: int) -> str:
    """Whether text by the likeliest tokens is the same with skipping and without, in words."""
    engine = Engine(packed, context=len(prompt) + count, backend="cpu")
    texts = []
    for engine.dense in (True, False):
        texts.append(greedy(engine, prompt, count))
    if texts[0] == texts[1]:
        return "the same"
    common = next(n for n, (one, other) in enumerate(zip(*texts, strict=True)) if one != other)
    engine.dense = True
    engine.reset()
    best = engine.prefill([*prompt, *texts[0][:common]]).topk(2).values
    return f"the same up to token {common}, where the two likeliest are {float(best[0] - best[1]):.1e} apart"


def sides(zigzag: PackedModel, neurons: PackedModel) -> list[Side]:
    """Our ways to decode a model."""
    return [
        Side("zigzag, dense", zigzag, True),
        Side("by neurons, dense", neurons, True),
        Side("by neurons", neurons, False),
    ]


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
        bandwidth.append(cpu_setting.read_bandwidth(threads))
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
                needed[side.name] = traffic.bytes_per_token(side.packed, active), records
            rates[side.name].append((len(ids) - PROMPT) / taken)
    return [
        [
            threads,
            side.name,
            f"{statistics.median(rates[side.name]):.1f}",
            f"{min(rates[side.name]):.1f} to {max(rates[side.name]):.1f}",
            f"{cpu_setting.median_ratio(rates[side.name], rates[chosen[0].name]):.2f}",
            f"{read / 1e6:.1f}",
            f"{statistics.mean(records):.3f}" if records else "-",
            f"{read * statistics.median(rates[side.name]) / statistics.median(bandwidth):.0%}",
        ]
        for side in chosen
        for read, records in [needed[side.name]]
    ]


def kernel(hidden: int, neurons: int, density: float, threads: int, rounds: int) -> list[Any]:
    """A row: records read a second from memory, beside what plain reading gets in the same round."""
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(0, 256, (neurons, hidden // 128 * 144), dtype=torch.uint8, generator=generator)
    scales = torch.full((neurons, hidden // 128, 2), 1e-3, dtype=torch.float16)
    records.view(neurons, -1, 144)[..., :4] = scales.view(torch.uint8)
    operations = native().Operations(instruction_set(), threads)
    copies = [operations.load_neurons(records) for _ in range(max(2, ROTATION // records.nbytes))]
    x = torch.randn(8, hidden, generator=generator)
    gates = (torch.rand(8, neurons, generator=generator) < density).float()
    needed = float(gates.mean()) * records.nbytes
    shares, rates, reads = [], [], []
    for _ in range(rounds):
        read = cpu_setting.read_bandwidth(threads)
        calls = 3 * len(copies) + 8
        taken = native().time_neurons(copies, x, gates, threads, calls, instruction_set())[8:]
        rates.append(needed / statistics.median(taken) * 1e9)
        reads.append(read)
        shares.append(rates[-1] / read)
    return [
        threads,
        f"{hidden} x {neurons}",
        f"{density:.3f}",
        f"{statistics.median(rates) / 1e9:.1f}",
        f"{statistics.median(reads) / 1e9:.1f}",
        f"{statistics.median(shares):.0%}",
        f"{min(shares):.0%} to {max(shares):.0%}",
    ]


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--text", required=True, help="Text for the calibration and for decoding MODEL.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", "threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="What is measured.")
@click.option("--tiny", is_flag=True, help="A tiny random model in place of the large one, to try the script.")
def main(
    model: Path, text: str, work: Path, rounds: int, threads: tuple[int, ...], parts: tuple[str, ...], tiny: bool
) -> None:
    """Print the tables."""
    setting = cpu_setting.setting()
    folder = work / model.name
    folder.mkdir(parents=True, exist_ok=True)
    by_neurons, zigzag, frequency, ids = books(model, text, folder)
    click.echo(cpu_setting.setting_line(setting))
    if "model" in parts:
        same, error, positions = agreement(by_neurons, ids, 2048)
        click.echo(
            f"\n{model.name}: {same:.2%} of {positions:,} top tokens are those of the dense engine, logits differ by "
            f"{error:.1e}; greedy text of 256 tokens: {greedy_agreement(by_neurons, ids[:32], 256)}\n"
        )
        for count in threads:
            click.echo(
                markdown(Table(DECODED, decoded(sides(zigzag, by_neurons), None, ids[: PROMPT + 256], count, rounds)))
            )
    if "large" in parts:
        size = TINY if tiny else BILLION
        large, large_zigzag = random_relu(size, frequency, work)
        made = random_ids(size.vocabulary, PROMPT + 48, seed=3)
        same, error, positions = agreement(large, made, len(made))
        click.echo(f"\n{size.name}, random: {same:.2%} of {positions} top tokens, logits differ by {error:.1e}")
        peer = checked_peer(peers_model(size, work), made)
        click.echo(f"llama.cpp's logits differ from the stock model's with its weights by {peer.error:.1e}\n")
        chosen = [Side("llama.cpp, Q4_K", None, True), *sides(large_zigzag, large)]
        for count in threads:
            click.echo(markdown(Table(DECODED, decoded(chosen, peer, made, count, rounds))))
    if "kernel" in parts:
        shapes = [(2048, 8192), (5120, 8192)]
        rows = [
            kernel(*shape, density, count, rounds) for shape in shapes for density in (0.135, 0.5) for count in threads
        ]
        click.echo("\n" + markdown(Table(READ, rows)))
    after = cpu_setting.setting()["load_average"]
    click.echo(f"\nload before {setting['load_average']:.1f}, after {after:.1f}, this benchmark's included")


if __name__ == "__main__":
    main()
