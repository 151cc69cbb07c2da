"""Options that several verbs share, and what they do with them.

Defaults are those of the option dataclasses; nothing heavy is imported at the top.
"""

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.cli.messages.streams import json_text
from sparsepack.cli.options.verb import Existing, F, Ruled, group, together
from sparsepack.errors import UserError
from sparsepack.option import Option, default_of, options_of
from sparsepack.refit.options import RefitOptions
from sparsepack.runtime.options import EngineOptions
from sparsepack.sparsity.attention_options import AttentionOptions
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.terminal import printable, tell

PATH = click.Path(path_type=Path)
ARTIFACT = Existing("what `sparsepack pack` made")
CALIBRATION = Existing("a folder made by `sparsepack calibrate`")


class Declared(Ruled):
    """An option of a verb that stands in an option dataclass: default, help, limits and what it counts with are those
    of its field."""

    def __init__(self, *args: Any, options: type, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.options = options


def from_options(options: type, *flags: str, **settings: Any) -> Callable[[F], F]:
    """A click option for a field of an option dataclass, that of the longest flag, or of the last name where one has no
    dashes. `settings` come before what is declared there."""
    name = max(flags, key=lambda flag: (not flag.startswith("-"), len(flag))).strip("-").replace("-", "_")
    found = {"default": default_of(options, name), "show_default": True}
    if (declared := options_of(options).get(name)) is not None:
        found |= {"help": declared.help, "counts": declared.counts, **_kind(get_type_hints(options)[name], declared)}
        if found.get("multiple") and "multiple" not in settings:
            found["help"] = f"{declared.help} Repeats."
    return click.option(*flags, cls=Declared, options=options, **{**found, **settings})


def options_from(options: type, *flags: str) -> Callable[[F], F]:
    """Click options for several fields of an option dataclass, in the order of the flags."""
    return together(*(from_options(options, flag) for flag in flags))


def _kind(annotation: Any, declared: Option) -> dict[str, Any]:
    """How click reads a field of a type, `T`, `T | None` or `tuple[T, ...]`, within its limits."""
    kinds = {annotation, *get_args(annotation)}
    # click's integers have no bounds that are left out, and ours have none.
    low: Any = declared.least if declared.above is None else declared.above
    high: Any = declared.most if declared.below is None else declared.below
    if declared.choices:
        return {"type": click.Choice(declared.choices)}
    if bool in kinds:
        return {"is_flag": True}
    if int in kinds:
        return {"type": click.IntRange(low, high)}
    if float in kinds:
        return {"type": click.FloatRange(low, high, declared.above is not None, declared.below is not None)}
    return {"type": PATH if Path in kinds else str, "multiple": tuple in {getattr(annotation, "__origin__", None)}}


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


_THREADS = "sparsepack.threads"
"""Under this name click's context has the threads that were asked for, which the engine is told, too."""


def _use_threads(context: click.Context, parameter: click.Parameter, threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)
        context.meta[_THREADS] = threads


def _writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Refuse a file for the result that cannot be written before there is one."""
    from sparsepack.files.atomic import check_output

    if path and path != "-":
        check_output(Path(path), overwrite=True)
    return path


SKIPPED, RUNS, OUTPUT = "What is skipped", "How it runs", "Output"
"""Headings that the help of several verbs has."""

device_option = group(RUNS, from_options(CalibrateOptions, "--device", callback=_usable_device))
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

slots = group(RUNS, options_from(EngineOptions, "--cached", "--policy"))
for_texts = group(
    RUNS,
    from_options(EngineOptions, "--dense"),
    click.option("--context", type=click.IntRange(2), help=options_of(EngineOptions)["context"].help),
    from_options(EngineOptions, "--offload"),
)
"""What verbs ask the engine that let people read what it makes."""


def _taken(asked: dict[str, Any], options: type, but: Collection[str] = ()) -> dict[str, Any]:
    """The values of the fields of an option dataclass, taken out of `asked`; those of the fields `but` stay there."""
    names = [field.name for field in fields(options) if field.name in asked and field.name not in but]
    return {name: asked.pop(name) for name in names}


def engine_options(asked: dict[str, Any], beside: type | None = None) -> EngineOptions:
    """The flags that the engine is told, taken out of `asked`; those that the options `beside` have, too, stay there.

    Refuses --offload together with --dense.
    """
    others = () if beside is None else [field.name for field in fields(beside)]
    taken = _taken(asked, EngineOptions, others)
    context = click.get_current_context(silent=True)
    if context is not None and _THREADS in context.meta:
        taken.setdefault("threads", context.meta[_THREADS])
    options = EngineOptions(**taken)
    if options.offload and options.dense:
        raise click.UsageError(
            "--dense reads every token at each step, which takes too long from the host's memory: give --dense or "
            "--offload"
        )
    return options


compute = together(device_option, group(RUNS, from_options(CalibrateOptions, "--dtype")))
overwrite_flag = group(OUTPUT, click.option("--overwrite", is_flag=True, help="Replace an output that exists."))
json_output = group(
    OUTPUT,
    click.option(
        "--json",
        "json_path",
        metavar="FILE",
        callback=_writable,
        help="Write the result as JSON; - for standard output.",
    ),
)
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
    values = _taken(asked, AllocationOptions, shared)
    return None if values["sparsity"] is None else AllocationOptions(**values, **shared)


attention = group(
    "Attention",
    options_from(AttentionOptions, "--attention", "--channels", "--tokens", "--sinks", "--recent"),
    options_from(AttentionOptions, "--min-context", "--dense-layers"),
)


def attention_options(asked: dict[str, Any]) -> AttentionOptions:
    """The flags of sparse attention, taken out of `asked`."""
    return AttentionOptions(**_taken(asked, AttentionOptions))


refit = group(
    "Fitted weights",
    options_from(RefitOptions, "--refit", "--quantiser", "--refit-windows", "--refit-dense", "--damping"),
)


def refit_options(asked: dict[str, Any]) -> RefitOptions:
    """The flags of weights that are fitted to their inputs, taken out of `asked`."""
    shared = {name: asked[name] for name in ("device", "dtype")}
    return RefitOptions(**_taken(asked, RefitOptions, shared), **shared)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    tell(json_text(value, indent=2))


def emit(result: Any, json_path: str | None, table: Callable[[Any], str]) -> None:
    """Print a result as a table, and write it as JSON to a file; for `-` print JSON alone."""
    from sparsepack.files.atomic import write_json

    if json_path == "-":
        print_json(result)
        return
    tell(printable(table(result)))
    if json_path:
        write_json(Path(json_path), result)


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
