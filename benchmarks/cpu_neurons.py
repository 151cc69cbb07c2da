"""MLPs by neurons on a CPU: is the text the same, how fast is decoding beside our dense engine, how near is the kernel
to the memory's speed?

    python benchmarks/cpu_neurons.py MODEL --text F [--work FOLDER] [--rounds 7] [--tiny]

MODEL is one with ReLU, such as books-26m-relu; text F calibrates it and is what it decodes. Beside it stands a random
Llama with ReLU of 1.1 billion parameters. Its neurons are active as often as those of MODEL: one channel of the hidden
vector is the same for every token, and its weight in the gate shifts each neuron's gate so that it is above zero at the
share of tokens of a neuron drawn from MODEL's. Sides take turns in one process, and so does the reading of memory.
"""

import cpu_setting  # isort: skip
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from synthetic import BILLION, DEFAULT_WORK, TINY, Size, random, random_ids, save_config

from sparsepack.artifacts.formats import FORMATS
from sparsepack.artifacts.open import read_packed
from sparsepack.artifacts.plan import PlanRequest
from sparsepack.bench import traffic
from sparsepack.calibrate.folder import load
from sparsepack.calibrate.neurons import activity
from sparsepack.calibrate.options import CalibrateOptions
from sparsepack.calibrate.run import calibrate
from sparsepack.files.hashing import NO_HASH
from sparsepack.files.text import read_text
from sparsepack.markdown import table
from sparsepack.models.checkpoint import open_checkpoint
from sparsepack.models.neurons import NeuronCounts
from sparsepack.models.packed import PackedModel
from sparsepack.models.skeleton import parameter_shapes
from sparsepack.models.whole import load_model
from sparsepack.models.windows import rolling_windows
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.sampling import Sampler, Sampling
from sparsepack.runtime.tuning import ROTATION

CONSTANT = 8.0
"""Of the channel that is the same for every token."""
COUNTED = 1_000_000
"""Tokens that the made-up counts of the random model are of."""
LARGEST_ERROR = 1e-3
"""Between the logits of steps that skip and of steps that do not, relative: their order of sums differs."""


@dataclass(frozen=True)
class Side:
    """One way to decode: by an engine, dense or not."""

    name: str
    packed: PackedModel
    dense: bool


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


def written(checkpoint: Any, format: str, counts: NeuronCounts, folder: Path) -> PackedModel:
    """A checkpoint in a format, packed unless it is there."""
    path = folder / f"{format}.gguf"
    if not path.is_file():
        click.echo(f"packing {path}", err=True)
        FORMATS[format].plan(checkpoint, PlanRequest(neurons=counts)).write(path)
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


def decoded(sides: Sequence[Side], ids: Sequence[int], threads: int, rounds: int) -> list[list[Any]]:
    """Rows of a table: tokens a second of steps on a text, in turns."""
    torch.set_num_threads(threads)
    context = len(ids)
    engines = {id(side.packed): Engine(side.packed, context=context, backend="cpu", threads=threads) for side in sides}
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    rows = []
    bandwidth = []
    for number in range(rounds):
        bandwidth.append(cpu_setting.read_bandwidth(threads))
        for side in sides:
            engine = engines[id(side.packed)]
            engine.dense = side.dense
            engine.reset()
            engine.prefill(ids[:16])
            start = time.perf_counter()
            for token in ids[16:]:
                engine.step(token)
            times[side.name].append((context - 16) / (time.perf_counter() - start))
            if number == rounds - 1:
                active = engine.activity()
                records = [share for (_, name), share in active.items() if name == "mlp_records"]
                rows.append([threads, side.name, traffic.bytes_per_token(side.packed, active), records])
    shown = []
    for _, name, needed, records in rows:
        rates = times[name]
        ratio = cpu_setting.median_ratio(rates, times[sides[0].name])
        shown.append(
            [
                threads,
                name,
                f"{statistics.median(rates):.1f}",
                f"{min(rates):.1f} to {max(rates):.1f}",
                f"{ratio:.2f}",
                f"{needed / 1e6:.1f}",
                f"{sum(records) / len(records):.3f}" if records else "-",
                f"{needed * statistics.median(rates) / statistics.median(bandwidth):.0%}",
            ]
        )
    return shown


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
@click.option("--tiny", is_flag=True, help="A tiny random model in place of the large one, to try the script.")
def main(model: Path, text: str, work: Path, rounds: int, tiny: bool) -> None:
    """Print the tables."""
    setting = cpu_setting.setting()
    folder = work / model.name
    folder.mkdir(parents=True, exist_ok=True)
    by_neurons, zigzag, frequency, ids = books(model, text, folder)
    click.echo(cpu_setting.setting_line(setting))
    same, error, positions = agreement(by_neurons, ids, 2048)
    engine, texts = Engine(by_neurons, context=512, backend="cpu"), []
    for engine.dense in (True, False):
        texts.append(greedy(engine, ids[:32], 256))
    equal = "the same" if texts[0] == texts[1] else "another"
    click.echo(
        f"\n{model.name}: {same:.2%} of {positions:,} top tokens are those of the dense engine, logits differ by "
        f"{error:.1e}, greedy text of 256 tokens: {equal}\n"
    )
    size = TINY if tiny else BILLION
    large, large_zigzag = random_relu(size, frequency, work)
    made = random_ids(size.vocabulary, 16 + 48, seed=3)
    same, error, positions = agreement(large, made, len(made))
    click.echo(f"{size.name}, random: {same:.2%} of {positions} top tokens, logits differ by {error:.1e}\n")
    head = ["threads", "engine", "tokens/s", "range", "x", "MB/token", "active neurons", "of read bandwidth"]
    for name, (neurons, dense), text_ids in (
        (model.name, (by_neurons, zigzag), ids[: 16 + 256]),
        (size.name, (large, large_zigzag), made),
    ):
        sides = [
            Side(f"{name}, zigzag, dense", dense, True),
            Side(f"{name}, by neurons, dense", neurons, True),
            Side(f"{name}, by neurons", neurons, False),
        ]
        rows = [row for threads in (1, 2) for row in decoded(sides, text_ids, threads, rounds)]
        click.echo(table(head, rows) + "\n")
    head = ["threads", "hidden x neurons", "active", "records, GB/s", "plain reading, GB/s", "share", "range"]
    shapes = [(2048, 8192), (5120, 8192)]
    rows = [
        kernel(*shape, density, threads, rounds) for shape in shapes for density in (0.135, 0.5) for threads in (1, 2)
    ]
    click.echo(table(head, rows))
    after = cpu_setting.setting()["load_average"]
    click.echo(f"\nload before {setting['load_average']:.1f}, after {after:.1f}, of which this benchmark is up to 2")


if __name__ == "__main__":
    main()
