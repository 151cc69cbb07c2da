"""What an operation is: declared once, in the module that has its options. `cli.operations` makes its command of that.

Nothing heavy is imported here or by such a module: what runs is named, and imported when it runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsepack.option import Condition


@dataclass(frozen=True)
class Input:
    """What an operation reads beside its model: a calibration, or another model.

    before -- the option that it stands before in the help; empty: the first
    counts -- as those of an option
    """

    help: str
    required: bool = False
    before: str = ""
    counts: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Operation:
    """Something that is done to a model, and what comes of it.

    name     -- of the command, and of Python's function
    summary, help -- a line, and what `--help` says
    options  -- its option dataclass
    run      -- "module:function", which takes by their names `model`, `output`, `options`, `overwrite`, the `inputs`,
                and `text` or `shard` where it has them
    table    -- what came of it as text for people, from what `run` returned and the output
    output   -- what it makes, a sentence
    inputs   -- by name
    groups   -- heading of the help -> options that stand under it
    forecast -- "module:function", which takes what `run` takes but the output, with a number of workers, and says what
                it would take them; empty: one process runs it
    merge    -- of an operation over text: what two of its outputs are called, and the "module:function" that merges
                them
    examples -- a value of each option that has to be given, though its flag is another command's, too
    check    -- raises `UserError` for options that do not go with the inputs
    """

    name: str
    summary: str
    help: str
    options: type
    run: str
    table: Callable[[Any, Path], str]
    output: str
    inputs: Mapping[str, Input] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forecast: str = ""
    merge: tuple[str, str] | None = None
    examples: Mapping[str, str] = field(default_factory=dict)
    check: Callable[..., None] = lambda options, **inputs: None


def function(name: str) -> Callable[..., Any]:
    """The function of a "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
