"""What a command says: an error as one line and an exit status, progress and notes on stderr or with `--quiet` nothing,
and output that never ends in a traceback, whatever it is connected to. Only click is imported here.
"""

import difflib
import errno
import functools
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

import click

from sparsepack.cli.command import ARGUMENTS, EFFECTIVE
from sparsepack.errors import UserError, WorkerLost
from sparsepack.process import python_environment
from sparsepack.progress import activity, be_quiet
from sparsepack.terminal import printable, show_uncaught, tell
from sparsepack.workers.launch import end_with_launcher, say_done, say_interrupted

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a program that Ctrl-C ended, as shells and `make` expect it."""
_LONGEST = 1500
_NO_MEMORY = (
    "can't allocate memory",  # torch's allocator
    "annot allocate memory",  # the system, where a file is mapped or a library loaded
    "bad_alloc",
    "can't start new thread",
    "Resource temporarily unavailable",  # a thread's stack, in C++
    "failed to map segment",  # the loader of libraries
)
_NO_DEVICE_MEMORY = ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY")  # the driver's own, not a tensor's
_TAKEN = "busy or unavailable"  # of a GPU in exclusive mode


class Commands(click.Group):
    """Lists the commands by what they are for, and says what ended one in one line."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.headings: dict[str, tuple[str, ...]] = {}

    def add_commands(self, heading: str, *commands: click.Command) -> None:
        """Add commands that the help lists under a heading, in this order."""
        self.headings[heading] = tuple(str(command.name) for command in commands)
        for command in commands:
            self.add_command(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with its summary, which is one line and whole."""
        width = max(map(len, self.commands))
        for heading, names in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), str(self.commands[name].short_help)) for name in names], col_max=width
                )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(f"{args[0]}: no such verb; {hint(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.ClickException as error:
            _say(_misused(error))
            sys.exit(error.exit_code)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        prepare()
        if not arguments and "args" not in settings:  # this process is the command's, not a program's that calls it
            os.environ.update(python_environment())  # for processes that libraries start
            end_with_launcher()
        try:
            return super().main(*arguments, **settings)
        except OSError as error:  # of a help text, say
            sys.exit(_refused_by_the_system(error))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            say_done()
            return result
        except UserError as error:
            _say(error)
            ctx.exit(2)
        except click.ClickException as error:
            _say(_misused(error))
            ctx.exit(error.exit_code)
        except WorkerLost as error:
            _say(error)
            ctx.exit(1)
        except KeyboardInterrupt as interrupt:
            _say(f"interrupted; {interrupt}" if str(interrupt) else "interrupted")
            say_interrupted()
            ctx.exit(INTERRUPTED)
        except OSError as error:
            ctx.exit(_refused_by_the_system(error))
        except (MemoryError, RuntimeError, ImportError) as error:
            if not (missing := _memory_missing(error) or _device_missing(error)):
                raise
            _say(missing)
            ctx.exit(1)


def _misused(error: click.ClickException) -> str:
    """What click found wrong, in one line that says where there is more."""
    ctx = getattr(error, "ctx", None)
    command = "" if ctx is None or ctx.parent is None else str(ctx.info_name)
    message = error.format_message().rstrip(".")
    return f"{f'{command}: ' if command else ''}{message}; see sparsepack {f'{command} ' if command else ''}--help"


def _refused_by_the_system(error: OSError) -> int:
    """Say what the system refused, and return the exit status: of a reader that went away, what a shell gives a program
    that the pipe ended."""
    output = failure() if may_be_output(error) else None
    if output == "closed":
        return 141 if error.errno == errno.EPIPE else 1
    if output == "full":
        _say("standard output: the disk is full; free some space and run again")
    elif error.errno == errno.ENOMEM:
        _say(_memory_missing(MemoryError()))
    elif error.errno is None:  # of the loader of libraries, which says no number
        if not (missing := _memory_missing(error)):
            raise error
        _say(missing)
    else:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        _say(f"{where}{error.strerror}")
    return 1


def _smaller() -> str:
    """The options of the command that runs by which it takes less memory, in words; of those that have an effect."""
    context = click.get_current_context(silent=True)
    names = () if context is None else context.meta.get(EFFECTIVE, ())
    smaller = " or ".join(f"--{name}" for name in ("batch", "context") if name in names)
    return f"use a smaller {smaller}" if smaller else "use fewer --threads" if "threads" in names else ""


def _memory_missing(error: Exception) -> str:
    """What is said where memory is full, or nothing where it is not: torch has several ways to say it."""
    smaller = _smaller()
    remedy = smaller or "end what else uses it, or use a machine with more"
    on_device = f"{smaller}, " if smaller else "use "
    text = " ".join(str(error).split())
    gpu = re.search(r"Tried to allocate (.+?)\. (GPU \d+) has a total capacity of (.+?) of which (.+?) is free", text)
    if gpu:
        wanted, where, total, free = gpu.groups()
        return (
            f"out of memory on {where}: {wanted} more are needed, {free} of {total} are free; "
            f"{on_device}another --device, or end what else uses it"
        )
    torch = sys.modules.get("torch")
    if torch and isinstance(error, torch.OutOfMemoryError):
        return f"out of memory on the device; {on_device}{'or ' * bool(smaller)}another --device"
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        tried = re.search(r"you tried to allocate (\d+) bytes", text)
        return f"out of memory{f', {int(tried[1]) / 2**30:.1f} GiB more are needed' if tried else ''}; {remedy}"
    return ""


def _device_missing(error: Exception) -> str:
    """What is said of a GPU that other processes have taken, or nothing."""
    text = str(error)
    if _TAKEN in text:
        return "the GPU is busy or unavailable: another process has it to itself; end that, or use another --device"
    if any(words in text for words in _NO_DEVICE_MEMORY):
        return "out of memory on the GPU; end what else uses it, or use another --device"
    return ""


def _say(what: object) -> None:
    try:
        _print(what)
    except MemoryError:  # there is none even for saying so
        os.write(2, b"sparsepack: out of memory\n")


def _print(what: object) -> None:
    with suppress(OSError):  # of a standard error that is closed
        line = printable(" ".join(str(what).split()))
        tell(f"sparsepack: {line if len(line) <= _LONGEST else line[:_LONGEST] + '...'}", sys.stderr)


_PACK = "pack MODEL -o FILE"
_GENERATE = "generate FILE --prompt TEXT"
_HERE = {
    _PACK: ("quantize", "quantise", "convert", "compress", "sparsify", "export", "make", "build"),
    _GENERATE: ("complete", "completion", "infer", "inference", "predict", "prompt"),
    "generate FILE --chat": ("chat", "converse", "cli", "interactive"),
    "eval FILE --perplexity TEXT": ("perplexity", "ppl", "evaluate", "accuracy", "score"),
    "eval FILE --tasks NAMES": ("lm-eval", "lm_eval", "tasks"),
    "bench FILE": ("benchmark", "speed", "time", "llama-bench"),
    "serve FILE": ("server", "run-server", "start", "host", "api", "openai"),
    "calibrate MODEL --text TEXT -o FOLDER": ("calibration", "collect", "imatrix", "stats"),
    "prune MODEL --keep 2 --of 4 -o FOLDER": ("pruning", "prune-weights", "sparsegpt", "wanda"),
    "rotate MODEL --calibration CAL -o FOLDER": ("rotation", "quarot", "slicegpt", "hadamard", "larosa"),
    "distil MODEL --calibration CAL -o FOLDER": ("distill", "distillation", "finetune", "fine-tune", "train", "lora"),
    "inspect FILE": ("info", "show", "describe", "dump", "print", "cat"),
    "verify FILE": ("check", "validate", "hash", "sha256"),
    "push FILE OWNER/NAME": ("upload", "publish"),
    "tune": ("autotune", "optimize", "optimise"),
    "run RECIPE": ("recipe", "pipeline", "all", "execute"),
    "run --list": ("recipes", "list", "ls"),
    "--help": ("help", "usage", "man"),
    "--version": ("version",),
}
_HINTS = {word: command for command, words in _HERE.items() for word in words}


def hint(word: str, commands: Iterable[str]) -> str:
    """What to type in place of a word that is no command."""
    if (command := _HINTS.get(word.lower())) is not None:
        return f"give sparsepack {command}"
    if near := difflib.get_close_matches(word.lower(), [*commands, *_HINTS], 1):
        return f"give sparsepack {_HINTS.get(near[0], near[0])}"
    return f"expected one of {', '.join(commands)}"


_FOR_MAKERS = "This model config has set a `rope_parameters['original_max_position_embeddings']` field"
"""Every Phi whose texts may be long has it, as its makers stored it."""


def concerns_the_user(record: logging.LogRecord) -> bool:
    """A filter of a logger: whether to show what it was told."""
    return _FOR_MAKERS not in record.getMessage()


_HELP = "Show no progress and no notes; results and errors are still shown."


def _group(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    be_quiet(asked)


def _quiet(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:  # or the group may have been asked
        be_quiet(True)


quiet_option = click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_group, help=_HELP)
"""The option stands before the command, `sparsepack --quiet eval ...`; `add_quiet` takes the option after the command,
too."""


def add_quiet(command: click.Command) -> None:
    """Give a command the option."""
    command.params.append(
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, callback=_quiet, help=_HELP)
    )


def add_signs_of_life(command: click.Command) -> None:
    """Let a command that can take minutes say now and then that it goes on, where stderr is no terminal."""
    run = command.callback
    assert run is not None

    @functools.wraps(run)
    def going(*arguments: Any, **options: Any) -> Any:
        with activity(str(command.name)):
            return run(*arguments, **options)

    command.callback = going


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EPIPE, errno.EBADF, errno.ECONNRESET)


def prepare() -> None:
    """Give each standard stream something to be, and let it replace what its encoding cannot print.

    A stream that was closed (`>&-`) would leave its number to the next file that is opened, which libraries then print
    into. Output gets a descriptor that cannot be written, so that printing fails as it does in other programs; input
    is empty.
    """
    for number, how in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, how)  # the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it stays open)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    logging.setLogRecordFactory(_Record)
    warnings.showwarning = _show_warning
    show_uncaught()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning, which may quote a file and has the name of one, so that it commands no terminal."""
    with suppress(OSError):  # of a standard error that is closed
        tell(warnings.formatwarning(message, category, filename, lineno, line), file or sys.stderr, end="")


class _Record(logging.LogRecord):
    """What a library has to say, and the traceback that it says it with: both may quote a file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            self.exc_text = printable(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return printable(super().getMessage())


def failure() -> str | None:
    """Why no line's end can be printed: "full", "closed", or None where it can be.

    A stream that fails drops what it holds and all that comes, so that leaving the program does not fail too.
    """
    found = None
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is sys.stdout:
                stream.write("\n")
            stream.flush()
        except OSError as error:
            found = "full" if error.errno in _FULL else "closed"
            _silence(stream)
    return found


def may_be_output(error: OSError) -> bool:
    """Whether an error is of the kind that printing raises."""
    return error.errno in (*_FULL, *_CLOSED)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
