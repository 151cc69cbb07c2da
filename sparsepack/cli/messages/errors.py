"""Errors that end a command early, as one line and an exit status. Only click is imported here."""

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from typing import Any

import click

from sparsepack.cli.messages import streams
from sparsepack.cli.messages.hints import hint
from sparsepack.cli.options.verb import ARGUMENTS, EFFECTIVE
from sparsepack.errors import UserError, WorkerLost
from sparsepack.process import python_environment
from sparsepack.terminal import printable, tell
from sparsepack.workers.environment import end_with_launcher, say_done, say_interrupted

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


class Verbs(click.Group):
    """Lists the verbs by what they are for, and says what ended one in one line."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.headings: dict[str, tuple[str, ...]] = {}

    def add_verbs(self, heading: str, *verbs: click.Command) -> None:
        """Add verbs that the help lists under a heading, in this order."""
        self.headings[heading] = tuple(str(verb.name) for verb in verbs)
        for verb in verbs:
            self.add_command(verb)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each verb with its summary, which is one line and whole."""
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
        streams.prepare()
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
    verb = "" if ctx is None or ctx.parent is None else str(ctx.info_name)
    message = error.format_message().rstrip(".")
    return f"{f'{verb}: ' if verb else ''}{message}; see sparsepack {f'{verb} ' if verb else ''}--help"


def _refused_by_the_system(error: OSError) -> int:
    """Say what the system refused, and return the exit status: of a reader that went away, what a shell gives a program
    that the pipe ended."""
    output = streams.failure() if streams.may_be_output(error) else None
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
    """The options of the verb that runs by which it takes less memory, in words; of those that have an effect."""
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
