"""Prefill of a model of Qwen2.5-7B's shape in stock transformers: slid INT8 and FP8 beside dense BF16, INT8 and FP8.

    python benchmarks/slide_prefill.py [--tokens 8192] [--layers 28] [--rounds 5]

Random weights, pruned to keep 6 of 8: every side multiplies the same ones. Inputs are quantised and outputs scaled in
each Linear, attention is transformers' own, the output matrix and biases are left out. The sides' outputs are compared
before they are timed, and they take turns.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from cuda_timing import device_line
from nearness import relative_error
from torch import Tensor, nn
from turns import in_turns, medians

from sparsepack.bench.linears import contenders
from sparsepack.formats.codecs.slide import Slide, encode
from sparsepack.integration.transformers.slid_linear import SlidLinear
from sparsepack.models.records.groups import kept
from sparsepack.models.records.pattern import Pattern
from sparsepack.tables import Table, markdown

HOW = Slide(Pattern(6, 8))
SIDES = ("BF16", "INT8", "FP8", "slid INT8", "slid FP8")
LARGEST_RATIO = 1.2
"""How much farther from BF16 slid may be than dense of the same type. Sums of INT8 are the same; those of FP8 round
differently, and what comes of that adds up from layer to layer."""


class Dense(nn.Module):
    """A dense Linear whose product is one of `sparsepack bench`."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def slid(linear: nn.Linear, dtype: torch.dtype) -> SlidLinear:
    """The Linear slid, as transformers has it after loading a slid folder."""
    made = SlidLinear.in_place_of(linear, HOW, dtype)
    values, positions, scale = encode(linear.weight.data, HOW, dtype)
    made.weight.data, made.weight_positions.data = values, positions
    assert made.weight_scale is not None
    assert scale is not None
    made.weight_scale.data = scale
    return made


def side(model: nn.Module, name: str) -> nn.Module:
    """The model with its Linears as a side has them."""
    if name == "BF16":
        return model
    ways = {way.name: way for way in contenders(()) if way.name in SIDES}
    found = copy.deepcopy(model)
    for path in [path for path, linear in found.named_modules() if isinstance(linear, nn.Linear)]:
        linear: Any = found.get_submodule(path)
        if name.startswith("slid"):
            other: nn.Module = slid(linear, torch.int8 if name.endswith("INT8") else torch.float8_e4m3fn)
        else:
            runs, _ = ways[name].prepare(linear.weight.data)
            other = Dense(runs[0])
        found.set_submodule(path, other)
    torch.cuda.empty_cache()
    return found


def seconds(model: nn.Module, ids: Tensor) -> float:
    """The seconds that a prefill takes."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    model(ids, use_cache=False)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--layers", default=28, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@torch.inference_mode()
def main(tokens: int, layers: int, rounds: int) -> None:
    """Print the table."""
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2Model(config).bfloat16().eval()
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.bias = None  # which libraries add in a kernel of its own
            for part in linear.weight.data.split(4096):
                part.mul_(kept(part.abs(), HOW.pattern))
    models = {name: side(model, name) for name in SIDES}
    ids = torch.randint(config.vocab_size, (1, tokens), device="cuda")
    outputs = {name: found(ids, use_cache=False).last_hidden_state.float() for name, found in models.items()}
    for kind in ("INT8", "FP8"):
        ours, theirs = (relative_error(outputs[name], outputs["BF16"]) for name in (f"slid {kind}", kind))
        click.echo(f"from BF16 slid {kind} differs by {ours:.3g}, dense {kind} by {theirs:.3g}")
        if not ours <= LARGEST_RATIO * theirs:
            raise RuntimeError(f"slid {kind} is not the model that it was made from; not timed")
    del outputs
    samples = in_turns({name: partial(seconds, found, ids) for name, found in models.items()}, rounds)
    middle = medians(samples)
    click.echo(f"{device_line()}; Qwen2.5-7B's shape, {layers} layers, {tokens} tokens, {rounds} rounds")
    rows = [
        [
            name,
            f"{taken * 1e3:.1f}",
            f"{min(samples[name]) * 1e3:.1f} to {max(samples[name]) * 1e3:.1f}",
            f"{tokens / taken:.0f}",
            *(f"{middle[other] / taken:.2f}" for other in SIDES[:3]),
        ]
        for name, taken in middle.items()
    ]
    click.echo(
        markdown(Table(["Linears", "ms", "range", "tokens/s", *(f"x dense {other}" for other in SIDES[:3])], rows))
    )


if __name__ == "__main__":
    main()
