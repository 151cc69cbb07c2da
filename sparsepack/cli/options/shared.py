"""Options that several verbs share, and the option dataclasses that they become.

Defaults are those of the option dataclasses; nothing heavy is imported at the top.
"""

import re
from dataclasses import fields
from typing import Any

import click

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.cli.options.declared import from_options, options_from, taken
from sparsepack.cli.options.verb import Existing, group, together
from sparsepack.errors import UserError
from sparsepack.option import only_with, options_of
from sparsepack.refit.options import FITS, RefitOptions
from sparsepack.runtime.options import EngineOptions
from sparsepack.sparsity.attention_options import AttentionOptions
from sparsepack.sparsity.options import AllocationOptions

ARTIFACT = Existing("what `sparsepack pack` made")
CALIBRATION = Existing("a folder made by `sparsepack calibrate`")


def usable_device(context: click.Context, parameter: click.Parameter, name: str) -> str:
    """Refuse a device that this machine lacks before any work is done."""
    if name == "cpu":
        return name
    if not re.fullmatch(r"cuda(:\d+)?|mps", name):
        raise UserError(f"--device {name}: expected cpu, cuda, cuda:N or mps")
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        no_gpu = name == "mps" and not torch.backends.mps.is_available()
        reason = "torch finds no Apple GPU" if no_gpu else str(error).strip().split("\n")[0].split(". ")[0]
        there = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise UserError(f"--device {name}: not usable here ({reason}); this machine has {', '.join(there)}") from error
    return name


_THREADS = "sparsepack.threads"
"""Under this name click's context has the threads that were asked for, which the engine is told, too."""


def _use_threads(context: click.Context, parameter: click.Parameter, threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)
        context.meta[_THREADS] = threads


SKIPPED, RUNS = "What is skipped", "How it runs"
"""Headings that the help of several verbs has."""

device_option = group(RUNS, from_options(CalibrateOptions, "--device", callback=usable_device))
backend_option = group(
    RUNS,
    from_options(
        EngineOptions,
        "--backend",
        type=click.Choice(("auto", *options_of(EngineOptions)["backend"].choices)),
        default="auto",
        callback=lambda context, parameter, name: None if name == "auto" else name,
    ),
)
engine_flags = group(
    RUNS,
    *(
        from_options(EngineOptions, f"--{name.replace('_', '-')}")
        for name, declared in options_of(EngineOptions).items()
        if declared.everywhere
    ),
)
"""What every verb asks that has an engine."""

slots = group(RUNS, options_from(EngineOptions, "--cached", "--vram", "--policy", "--gate-copy"))
for_texts = group(
    RUNS,
    from_options(EngineOptions, "--dense"),
    click.option("--context", type=click.IntRange(2), help=options_of(EngineOptions)["context"].help),
    from_options(EngineOptions, "--offload"),
)
"""What verbs ask the engine that let people read what it makes."""


def engine_options(asked: dict[str, Any], beside: type | None = None) -> EngineOptions:
    """The flags that the engine is told, taken out of `asked`; those that the options `beside` have, too, stay there.

    Refuses --offload together with --dense.
    """
    others = () if beside is None else [field.name for field in fields(beside)]
    found = taken(asked, EngineOptions, others)
    context = click.get_current_context(silent=True)
    if context is not None and _THREADS in context.meta:
        found.setdefault("threads", context.meta[_THREADS])
    options = EngineOptions(**found)
    if options.offload and options.dense:
        raise click.UsageError(
            "--dense reads every token at each step, which takes too long from the host's memory: give --dense or "
            "--offload"
        )
    return options


compute = together(device_option, group(RUNS, from_options(CalibrateOptions, "--dtype")))
torch_threads = group(RUNS, from_options(EngineOptions, "--threads", callback=_use_threads, expose_value=False))
"""Verbs without threads of their own set the number of torch's threads in the whole process."""


allocation = group(
    SKIPPED,
    from_options(AllocationOptions, "--sparsity", type=float),  # whose limits the verbs tell in a line of their own
    options_from(AllocationOptions, "--allocation", "--criterion", "--include", "--ignore"),
    from_options(
        AllocationOptions,
        "--dense-upstream",
        "upstream",
        type=None,
        is_flag=True,
        default=False,
        show_default=False,
        callback=lambda context, parameter, dense: "dense" if dense else AllocationOptions.upstream,
        help="Take thresholds on dense activations, as the papers do.",
    ),
    options_from(AllocationOptions, "--offsets", "--windows", "--steps", "--batch", "--length", "--seed"),
)


def allocation_options(asked: dict[str, Any]) -> AllocationOptions | None:
    """The allocation flags as `AllocationOptions`, taken out of `asked`; None without --sparsity."""
    shared = {name: asked[name] for name in ("device", "dtype")}
    values = taken(asked, AllocationOptions, shared)
    return None if values["sparsity"] is None else AllocationOptions(**values, **shared)


attention = group(
    "Attention",
    options_from(AttentionOptions, "--attention", "--channels", "--tokens", "--sinks", "--recent"),
    options_from(AttentionOptions, "--min-context", "--dense-layers"),
)


def attention_options(asked: dict[str, Any]) -> AttentionOptions:
    """The flags of sparse attention, taken out of `asked`."""
    return AttentionOptions(**taken(asked, AttentionOptions))


refit = group(
    "Fitted weights",
    options_from(RefitOptions, "--refit", "--quantiser"),
    from_options(RefitOptions, "--refit-windows", counts=(FITS, only_with("calibration"))),
    options_from(RefitOptions, "--refit-dense", "--damping"),
)


def refit_options(asked: dict[str, Any]) -> RefitOptions:
    """The flags of weights that are fitted to their inputs, taken out of `asked`."""
    shared = {name: asked[name] for name in ("device", "dtype")}
    return RefitOptions(**taken(asked, RefitOptions, shared), **shared)
