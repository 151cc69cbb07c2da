"""Options that several verbs share, and what they do with them.

Defaults are those of the option dataclasses; nothing heavy is imported at the top.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from sparsepack.calibrate.options import CRITERIA, DTYPES, CalibrateOptions
from sparsepack.errors import UserError
from sparsepack.runtime.backends import BACKENDS
from sparsepack.sparsity.options import ALLOCATIONS, AllocationOptions

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
RUNTIMES = ("transformers", *BACKENDS)


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(decorators), command)


def from_options(options: type, *flags: str, **settings: Any) -> Callable[[F], F]:
    """A click option with the default that its field has in an option dataclass; the field is that of the longest flag,
    or of the last name where one has no dashes."""
    field = max(flags, key=lambda flag: (not flag.startswith("-"), len(flag))).strip("-").replace("-", "_")
    return click.option(*flags, default=getattr(options, field), show_default=True, **settings)


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


def _use_threads(context: click.Context, parameter: click.Parameter, threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Refuse a file for the result that cannot be written before there is one."""
    from sparsepack.files.atomic import check_output

    if path and path != "-":
        check_output(Path(path), overwrite=True)
    return path


device_option = from_options(CalibrateOptions, "--device", callback=_usable_device, help="cpu, cuda, cuda:1, mps.")
backend_option = click.option(
    "--backend",
    type=click.Choice(("auto", *BACKENDS)),
    default="auto",
    show_default=True,
    callback=lambda context, parameter, name: None if name == "auto" else name,
    help="What runs it: kernels made for a device, or plain torch (reference); auto: the device's, where they can run.",
)
compute = _options(
    device_option,
    from_options(
        CalibrateOptions,
        "--dtype",
        type=click.Choice(DTYPES),
        help="What blocks are computed in; auto: float32 on a CPU, the model's own type on a GPU. Weights are read as "
        "they are stored, a block at a time.",
    ),
)
overwrite_flag = click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
json_output = click.option(
    "--json", "json_path", metavar="FILE", callback=_writable, help="Write the result as JSON; - for standard output."
)
window = click.option(
    "--context", type=click.IntRange(2), help="Tokens per window (default 2048, or what MODEL was made for if less)."
)
_threads = functools.partial(
    click.option, "--threads", type=click.IntRange(1, 1024), help="CPU threads (default: all cores)."
)
thread_count = _threads()
torch_threads = _threads(callback=_use_threads, expose_value=False)
"""The number of torch in the whole process, for verbs that take none."""
seed_option = from_options(CalibrateOptions, "--seed", type=click.IntRange(0, 2**32 - 1))


allocation = _options(
    click.option("--sparsity", type=float, help="Share of the weights that a decoded token skips, 0 to below 1."),
    from_options(
        AllocationOptions,
        "--allocation",
        type=click.Choice(ALLOCATIONS),
        help="One sparsity everywhere; TEAL's greedy per block; all sites at once by the model's own output.",
    ),
    from_options(
        AllocationOptions,
        "--criterion",
        type=click.Choice(CRITERIA),
        help="Score of channel j: |x_j|, or |x_j| times the norm of its column.",
    ),
    click.option("--include", multiple=True, help="Only these sites: blk.3.mlp_mid, blk.*.attn_in, re:REGEX. Repeats."),
    click.option("--ignore", multiple=True, help="These sites stay dense. Repeats."),
    click.option(
        "--dense-upstream",
        "upstream",
        is_flag=True,
        callback=lambda context, parameter, dense: "dense" if dense else AllocationOptions.upstream,
        help="Take thresholds on dense activations, as the papers do.",
    ),
    click.option("--offsets", is_flag=True, help="global: also learn what inactive channels stand at; costs nothing."),
    from_options(
        AllocationOptions, "--windows", type=click.IntRange(1), help="Calibration windows that thresholds are taken on."
    ),
    from_options(AllocationOptions, "--steps", type=click.IntRange(1), help="global: optimiser steps."),
    from_options(AllocationOptions, "--batch", type=click.IntRange(1), help="global: windows per step."),
    from_options(AllocationOptions, "--length", type=click.IntRange(2), help="global: tokens per window."),
    seed_option,
)


def allocation_options(asked: dict[str, Any]) -> AllocationOptions | None:
    """The allocation flags as `AllocationOptions`, taken out of `asked`; None without --sparsity."""
    names = [field.name for field in fields(AllocationOptions)]
    values = {name: asked[name] if name in ("device", "dtype") else asked.pop(name) for name in names}
    return None if values["sparsity"] is None else AllocationOptions(**values)


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
