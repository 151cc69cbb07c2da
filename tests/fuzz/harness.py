"""Run a target on mutated inputs, and say which of them end in anything but success or one line for the user."""

import contextlib
import faulthandler
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from click.testing import CliRunner

from sparsepack.cli import main
from sparsepack.errors import UserError

SLOW = 20
"""Seconds of the processor after which a case counts as one that never ends."""


class Broken(AssertionError):
    """What a target found wrong by itself."""


@dataclass(frozen=True)
class Target:
    """A reader and how its inputs are made.

    write -- puts one mutated input into a folder; everything random from the `Random`
    read  -- reads what is in the folder in every way that users can; may raise UserError or Broken
    """

    name: str
    write: Callable[[Random, Path], None]
    read: Callable[[Path], None]


def command(*arguments: object) -> None:
    """A command line as users give it. Raises `Broken` unless it ends well, or with one line."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = result.stderr.splitlines()
    said = [line for line in lines if line.startswith("sparsepack: ")]
    if result.exit_code == 2 and (len(said) != 1 or len(said[0]) > 2000):
        raise Broken(f"exit 2 with {lines}")
    if result.exit_code not in (0, 1, 2, 3):
        raise Broken(f"exit {result.exit_code} with {lines}")


def run_case(target: Target, seed: int, case: int, folder: Path) -> str | None:
    """Run one case; what was wrong, or None. The input stays in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target.write(Random(f"{target.name}:{seed}:{case}"), folder)
    began = time.process_time()
    try:
        target.read(folder)
    except UserError:
        pass
    except Exception:
        return traceback.format_exc()
    if (spent := time.process_time() - began) > SLOW:
        return f"{spent:.0f} seconds"
    return None


def fuzz(target: Target, seed: int, seconds: float, kept: Path, first: int = 0, most: int | None = None) -> list[str]:
    """Cases one after the other until time is up; the failures, each with the command that repeats it.

    kept -- folder where inputs that failed stay; a crash of the process leaves its input in `TARGET-running`
    """
    faulthandler.enable()
    failures: list[str] = []
    until = time.monotonic() + seconds
    running, case = kept / f"{target.name}-running", first
    while time.monotonic() < until and (most is None or case < first + most):
        with contextlib.suppress(OSError):
            (kept / f"{target.name}-case").write_text(f"{seed} {case}\n")
        found = run_case(target, seed, case, running)
        if found is not None:
            stays = kept / f"{target.name}-{seed}-{case}"
            shutil.rmtree(stays, ignore_errors=True)
            shutil.copytree(running, stays, symlinks=True)
            failures.append(
                f"{target.name}: seed {seed}, case {case}; its input is kept in {stays}\n{found}\n"
                f"again: python -m tests.fuzz {target.name} --seed {seed} --case {case}"
            )
        case += 1
    print(f"{target.name}: seed {seed}, {case - first} cases, {len(failures)} failed", flush=True)
    return failures
