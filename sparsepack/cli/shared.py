"""Options that several commands share, and the option dataclasses that they become: device, workers, texts, and what a
dry run says. Nothing heavy is imported at the top.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.refit import FITS, RefitOptions
from sparsepack.calibrate.thresholds import AllocationOptions, AttentionOptions
from sparsepack.cli.command import (
    ARGUMENTS,
    Existing,
    from_options,
    group,
    options_from,
    taken,
)
from sparsepack.errors import UserError
from sparsepack.option import only_with, options_of
from sparsepack.progress import duration
from sparsepack.runtime.options import EngineOptions
from sparsepack.terminal import tell
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.launch import devices_of, launch, several

if TYPE_CHECKING:
    from sparsepack.models.hf_model.forecast import Forecast
    from sparsepack.workers.forecast import PartsForecast


class _Artifact(Existing):
    """A path of what `pack` made, or its name on the hub, from where it is downloaded."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if isinstance(value, str):
            from sparsepack.models.checkpoint.locate import located_artifact

            value = str(located_artifact(value))
        return super().convert(value, parameter, context)


ARTIFACT = _Artifact("what `sparsepack pack` made, or OWNER/NAME[:FILE.gguf] on the hub")
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
"""Headings that the help of several commands has."""

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
"""What every command asks that has an engine."""

slots = group(RUNS, options_from(EngineOptions, "--cached", "--vram", "--policy", "--gate-copy"))
for_texts = group(
    RUNS,
    from_options(EngineOptions, "--dense"),
    click.option("--context", type=click.IntRange(2), help=options_of(EngineOptions)["context"].help),
    from_options(EngineOptions, "--offload"),
)
"""What commands ask the engine that let people read what it makes."""


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


threads_option = group(RUNS, from_options(EngineOptions, "--threads"))
torch_threads = group(RUNS, from_options(EngineOptions, "--threads", callback=_use_threads, expose_value=False))
"""Commands without threads of their own set the number of torch's threads in the whole process."""


allocation = group(
    SKIPPED,
    from_options(AllocationOptions, "--sparsity", type=float),  # whose limits the commands tell in a line of their own
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


attention = group(
    "Attention",
    options_from(AttentionOptions, "--attention", "--channels", "--tokens", "--sinks", "--recent"),
    options_from(AttentionOptions, "--min-context", "--dense-layers"),
)


refit = group(
    "Fitted weights",
    options_from(RefitOptions, "--refit", "--quantiser"),
    from_options(RefitOptions, "--refit-windows", counts=(FITS, only_with("calibration"))),
    options_from(RefitOptions, "--refit-dense", "--damping"),
)


def _launched(context: click.Context, parameter: click.Parameter, devices: str | None) -> None:
    """Run the command by a worker for each device, and end as they do."""
    if devices is None or context.resilient_parsing:
        return
    found = devices_of(devices)
    if several():
        raise UserError("--devices: torchrun has started the workers already; leave it out")
    if context.get_parameter_source("device") not in (None, click.core.ParameterSource.DEFAULT):
        raise UserError(f"--devices {devices}: it does nothing with --device; leave one of them out")
    sys.exit(launch(context.meta[ARGUMENTS], found))


devices_option = group(
    RUNS,
    click.option(
        "--devices",
        metavar="LIST",
        expose_value=False,
        callback=_launched,
        help="Start a worker for each of these devices, GPUs by number (0,1,2,3) or cpu,cpu: the windows are dealt to "
        "them, and the result is the same.",
    ),
)
"""Commands with this option also run under torchrun."""

dry_run_option = group(
    RUNS,
    click.option(
        "--dry-run",
        "dry_run",
        type=click.IntRange(1),
        metavar="N",
        help="Write nothing: say what it would take N workers like this process, from one measured block (default: "
        "run).",
    ),
)
"""How many workers a command is asked to foresee the work of, in place of doing it."""


def tell_forecast(forecast: Callable[..., "Forecast | PartsForecast"], workers: int) -> None:
    """Tell what the work would take so many `workers`, which the function takes by this name.

    Raises `UserError` where this process is one of several.
    """
    if several():
        raise UserError("--dry-run: it measures in one process; leave --devices and torchrun out")

    tell(forecast_table(forecast(workers=workers)))


def text_of(path: Path) -> str:
    """A file's text without the end of its last line; `-` is standard input."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a text file") from error
    return utf8(data, path).removesuffix("\n").removesuffix("\r")


def utf8(data: bytes, where: object) -> str:
    """Bytes as text, without the mark that some editors begin a file with. Raises `UserError` for what is no UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not text (byte {error.start} is not UTF-8); expected text in UTF-8") from error


def forecast_table(found: "Forecast | PartsForecast") -> str:
    """A line each: what was measured, and what that comes to."""
    values = _of_parts(found) if isinstance(found, PartsForecast) else _of_blocks(found)
    return "\n".join(f"{name.ljust(8)}  {value}" for name, value in values.items())


def _of_parts(found: PartsForecast) -> dict[str, str]:
    return {
        "measured": f"{found.measured}, on {found.device}",
        "workers": f"{found.workers}, {found.parts}",
        "time": f"about {duration(found.seconds)}, of which {duration(found.alone_seconds)} for any number of workers; "
        f"{found.uncounted} not counted",
        "read": f"{_size(found.bytes_read)}, once on each machine",
        **({"written": _size(found.bytes_written)} if found.bytes_written else {}),
        "memory": f"about {_size(found.memory_bytes)}, a worker",
    }


def _of_blocks(found: "Forecast") -> dict[str, str]:
    rest = found.hidden_bytes + found.sums_bytes
    if found.device.startswith("cuda"):
        device, host = found.memory_bytes + found.sums_bytes, found.hidden_bytes
        memory = f"{_size(device)} of the device, {_size(host)} of either for hidden states"
    else:
        memory = _size(found.memory_bytes + rest)
    if found.whole_bytes:
        memory += f"; worker 0 {_size(found.whole_bytes)} more while it saves"
    measured = (
        f"one block: {_size(found.block_bytes)} read in {found.read_seconds:.2f} s, "
        f"a batch of {found.batch} windows in {found.batch_seconds:.2f} s, all else in {found.alone_seconds:.2f} s"
    )
    reading = found.read_seconds > found.computing_seconds
    return {
        "measured": f"{measured}, on {found.device}",
        "workers": f"{found.workers}, {found.windows} windows of {found.context} tokens, {found.rounds} of "
        f"{found.batches} batches at most each",
        "time": f"about {duration(found.seconds)}, bound by {'reading' if reading else 'arithmetic'}; exchanging not "
        "counted",
        "read": f"{_size(found.bytes_read)}, once on each machine",
        "memory": f"about {memory}, a worker",
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
