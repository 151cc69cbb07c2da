"""Options that several verbs share, and what they do with them. Only click is imported at the top."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sparsepack.errors import UserError
from sparsepack.runtime.backends import BACKENDS

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(decorators), command)


def _usable_device(context: click.Context, parameter: click.Parameter, name: str) -> str:
    """Refuse a device that this machine lacks before any work is done."""
    if name == "cpu":
        return name
    if not re.fullmatch(r"cuda(:\d+)?|mps", name):
        raise UserError(f"--device {name}: expected cpu, cuda, cuda:N or mps")
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        there = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        raise UserError(f"--device {name}: not usable here ({reason}); this machine has {', '.join(there)}") from error
    return name


def _writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Refuse a file for the result that cannot be written before there is one."""
    from sparsepack.files.atomic import check_output

    if path and path != "-":
        check_output(Path(path), overwrite=True)
    return path


device_option = click.option(
    "--device", default="cpu", show_default=True, callback=_usable_device, help="cpu, cuda, cuda:1, mps."
)
backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", *BACKENDS]),
    default="auto",
    show_default=True,
    callback=lambda context, parameter, name: None if name == "auto" else name,
    help="What runs it: kernels made for a device, or plain torch (reference); auto: the device's, where they can run.",
)
compute = _options(
    device_option,
    click.option(
        "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
    ),
)
overwrite_flag = click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
json_output = click.option(
    "--json", "json_path", metavar="FILE", callback=_writable, help="Write the result as JSON; - for standard output."
)
window = click.option(
    "--context", type=click.IntRange(2), help="Tokens per window (default 2048, or what MODEL was made for if less)."
)
thread_count = click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads (default: all cores).")
seed_option = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)

allocation = _options(
    click.option("--sparsity", type=float, help="Share of the weights that a decoded token skips, 0 to below 1."),
    click.option(
        "--allocation",
        type=click.Choice(["uniform", "teal", "global"]),
        default="uniform",
        show_default=True,
        help="One sparsity everywhere; TEAL's greedy per block; all sites at once by the model's own output.",
    ),
    click.option(
        "--criterion",
        type=click.Choice(["magnitude", "column-norm"]),
        default="magnitude",
        show_default=True,
        help="Score of channel j: |x_j|, or |x_j| times the norm of its column.",
    ),
    click.option("--include", multiple=True, help="Only these sites: blk.3.mlp_mid, blk.*.attn_in, re:REGEX. Repeats."),
    click.option("--ignore", multiple=True, help="These sites stay dense. Repeats."),
    click.option("--dense-upstream", is_flag=True, help="Take thresholds on dense activations, as the papers do."),
    click.option("--offsets", is_flag=True, help="global: also learn what inactive channels stand at; costs nothing."),
    click.option("--windows", type=click.IntRange(1), help="Calibration windows that thresholds are taken on."),
    click.option("--steps", type=click.IntRange(1), help="global: optimiser steps."),
    click.option("--batch", type=click.IntRange(1), help="global: windows per step."),
    seed_option,
)


def allocation_options(asked: dict[str, Any]) -> Any:
    """The allocation flags as `AllocationOptions`, taken out of `asked`; None without --sparsity."""
    from sparsepack.sparsity.allocation import AllocationOptions

    names = ("sparsity", "allocation", "criterion", "include", "ignore", "windows", "steps", "batch", "offsets", "seed")
    values = {name: asked.pop(name) for name in names}
    values["upstream"] = "dense" if asked.pop("dense_upstream") else "sparse"
    values |= {name: asked[name] for name in ("device", "dtype")}
    if values["sparsity"] is None:
        return None
    options = AllocationOptions(**{name: value for name, value in values.items() if value is not None})
    options.check()
    return options


def set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def emit(result: Any, json_path: str | None, table: Callable[[Any], str]) -> None:
    """Print a result as a table, and write it as JSON to a file; for `-` print JSON alone."""
    import json

    from sparsepack.files.atomic import write_json

    if json_path == "-":
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
        return
    click.echo(table(result))
    if json_path:
        write_json(Path(json_path), result)
