"""What `--allocation global`, or a learnt basis, takes of a model of 8 billion parameters: seconds a step, and memory.

    python benchmarks/global_cost.py [--size 8b|1b|tiny] [--basis] [--steps 5] [--device cuda]

The model is random and made on the device: its weights have a real model's size and spread, in bfloat16, and thresholds
begin where half of its channels are inactive. Its text is random, too; a step costs the same with any.
"""

import math
import time
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import click
import torch
from cuda_synthetic import LLAMA_1B, LLAMA_8B
from cuda_timing import device_line
from figures import json_option, write_figures
from synthetic import TINY, llama_config, random

from sparsepack.models.checkpoint.rotated import Bases
from sparsepack.models.families import FAMILIES
from sparsepack.models.stock.skeleton import parameter_shapes
from sparsepack.models.stock.whole import build_model
from sparsepack.rotation.learnt import sparse_in, turned, uniform_channels
from sparsepack.sparsity.learned import sparse_at
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.sparsity.teal import divergence
from sparsepack.sparsity.training import PART, Training
from sparsepack.workers.resume import ResumeState

SIZES = {"8b": LLAMA_8B, "1b": LLAMA_1B, "tiny": TINY}
STEPS = AllocationOptions.steps


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), default="8b", show_default=True)
@click.option("--basis", is_flag=True, help="Learn a basis, too.")
@click.option("--steps", default=5, show_default=True, help="Steps that are timed, after one that is not.")
@click.option("--batch", default=AllocationOptions.batch, show_default=True)
@click.option("--length", default=AllocationOptions.length, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@json_option
def main(size: str, basis: bool, steps: int, batch: int, length: int, device: str, json_path: Path | None) -> None:
    """Print seconds a step, the peak of memory, and what so many steps as are the default would take."""
    options = AllocationOptions(0.5, "global", steps=steps + 1, batch=batch, length=length, device=device)
    config = llama_config(SIZES[size], max_position_embeddings=max(4096, length))
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = parameter_shapes(config)
    layers = config.num_hidden_layers
    model = build_model(config, lambda name: random(name, shapes[name], layers, generator), device, torch.bfloat16)
    if device != "cpu":
        click.echo(device_line())
    held = 0 if device == "cpu" else torch.cuda.memory_allocated()
    windows = torch.randint(config.vocab_size, (16, 2 * length), generator=torch.Generator().manual_seed(0))
    times = _timed(model, windows, options, basis)
    # A product is two operations a weight and token: one dense pass, and three over the second half.
    parameters = sum(math.prod(shape) for shape in shapes.values())
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    report = {
        "size": SIZES[size].name,
        "parameters": parameters,
        "basis": basis,
        "tokens_a_step": batch * length,
        "seconds_a_step": times,
        "model_bytes": held,
        "peak_bytes": _peak(device),
    }
    products = 2 * 2.5 * parameters * batch * length / seconds / 1e12
    what = f"{SIZES[size].name}, {parameters / 1e9:.2f} G parameters{', with a basis' if basis else ''}"
    click.echo(
        f"{what}, {batch} windows of {length} tokens: {seconds:.3f} s a step (the first {times[0]:.2f} s), "
        f"{products:.0f} TFLOP/s of the model's products; {STEPS} steps: {STEPS * seconds / 60:.1f} minutes; "
        f"peak {_peak(device) / 1e9:.1f} GB, of these the model {held / 1e9:.1f} GB"
    )
    write_figures(json_path, report)


def _timed(model: Any, windows: torch.Tensor, options: AllocationOptions, basis: bool) -> list[float]:
    """Seconds of each step."""
    family, device = FAMILIES[model.config.model_type], options.device
    config = model.config
    of_heads = torch.eye(config.hidden_size // config.num_attention_heads, device=device)
    values = (of_heads.expand(config.num_key_value_heads, -1, -1).contiguous(),) * config.num_hidden_layers
    first = Bases(matrices=(torch.eye(config.hidden_size, device=device),), values=values)
    channels = uniform_channels(model, family, windows[:2].to(device), options.sparsity, first)
    weights = dict.fromkeys(channels.scales, 1 / len(channels.scales))
    turns = first.map(lambda matrix: torch.zeros_like(matrix, requires_grad=True))
    turning = [{"params": [*part], "lr": 1e-4} for part in (turns.matrices, turns.values)]
    groups = [*channels.groups(), *(turning if basis else [])]
    training = Training(groups, options, ResumeState(None, ""), PART)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    parts = cycle(range(options.batch // PART))

    def loss(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if next(parts) == 0:
            times.append(_now(device))
        sparse = sparse_in(turned(first, turns), family, channels, weights) if basis else sparse_at(channels, weights)
        return divergence(model, family, ids, sparse)

    training.run("steps", windows, loss)
    times.append(_now(device))
    return [later - earlier for earlier, later in pairwise(times)]


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak(device: str) -> int:
    """The most memory of the device that tensors took while steps were taken, in bytes; 0 on a CPU."""
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main()
