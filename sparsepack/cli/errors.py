"""What ends a command early, as one line and an exit status. Only click is imported here."""

import errno
import os
import re
import signal
import sys
from typing import Any

import click

from sparsepack.errors import UserError

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a program that Ctrl-C ended, as shells and `make` expect it."""


class Verbs(click.Group):
    """Lists the verbs in the order in which they are used, and says what ended one in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _say(error)
            ctx.exit(2)
        except KeyboardInterrupt as interrupt:
            _say(f"interrupted; {interrupt}" if str(interrupt) else "interrupted")
            ctx.exit(INTERRUPTED)
        except OSError as error:
            if error.errno != errno.ENOSPC or not _output_is_full():
                raise
            _say("standard output: the disk is full; free some space and run again")
            ctx.exit(1)
        except (MemoryError, RuntimeError) as error:
            if not (missing := _memory_missing(error)):
                raise
            _say(missing)
            ctx.exit(1)


def _memory_missing(error: Exception) -> str:
    """What is said where memory is full, or nothing where it is not: torch has several ways to say it."""
    remedy = "use a smaller --batch or --context"
    text = " ".join(str(error).split())
    gpu = re.search(r"Tried to allocate (.+?)\. (GPU \d+) has a total capacity of (.+?) of which (.+?) is free", text)
    if gpu:
        wanted, where, total, free = gpu.groups()
        return (
            f"out of memory on {where}: {wanted} more are needed, {free} of {total} are free; "
            f"{remedy}, another --device, or end what else uses it"
        )
    torch = sys.modules.get("torch")
    if torch and isinstance(error, torch.OutOfMemoryError):
        return f"out of memory on the device; {remedy}, or another --device"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        tried = re.search(r"you tried to allocate (\d+) bytes", text)
        return f"out of memory{f', {int(tried[1]) / 2**30:.1f} GiB more are needed' if tried else ''}; {remedy}"
    return ""


def _say(what: object) -> None:
    click.echo(f"sparsepack: {' '.join(str(what).split())}", err=True)


def _output_is_full() -> bool:
    """Whether not even a line's end can be printed. What was not is dropped then, so that leaving does not fail."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
