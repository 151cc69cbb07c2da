"""What an operation is: declared once, in the module that has its options. `cli.operations` makes its command of that.

Nothing heavy is imported here or by such a module: what runs is named, and imported when it runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sparsepack.option import Condition, options_of


@dataclass(frozen=True)
class Input:
    """What an operation reads beside its model: a calibration, another model, a text.

    before -- the option that it stands before in the help; empty: the first, or where the dataclass has a field for it
    counts -- as those of an option
    """

    help: str
    required: bool = False
    before: str = ""
    counts: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What an operation takes, reckoned before anything runs: tokens through the model, and bytes of tensors at the
    peak; None: not known beforehand."""

    tokens: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Operation:
    """Something that is done to a model, and what comes of it.

    name     -- of the command, and of Python's function
    summary, help -- a line, and what `--help` says
    options  -- its option dataclass; fields whose types are option dataclasses, too, have these options together. One
                that has a field for the subject is a request: it has fields for all that `run` takes
    run      -- "module:function", which takes by their names the subject, `output`, `options`, `overwrite`, the
                `inputs`, and `text` or `shard` where it has them; of a request `request` alone, and `shard`
    table    -- what came of it as text for people, from what `run` returned and the output
    output   -- what it makes, a sentence; empty: it measures, and what it returns is shown, and JSON
    subject  -- the name of its argument, and what is expected there where it must be a file or folder
    inputs   -- by name
    groups   -- heading of the help -> options that stand under it
    flags    -- of options whose flags are not just their names
    dtype_counts -- when --dtype counts
    notes    -- says what else came of it, from what `run` returned, once the table has been told
    forecast -- "module:function", which takes what `run` takes but the output, with a number of workers, and says what
                it would take them, from what it measures; empty: one process runs it
    cost     -- from a checkpoint, options, and the windows of the calibration with the tokens of each to what it takes,
                for recipes, whose calibration is still to be made
    predict  -- of one that makes a checkpoint: from the one that it is made from and options to that and its record, as
                far as they are known before; None: it makes no other
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
    output: str = ""
    subject: tuple[str, str] = ("model", "")
    inputs: Mapping[str, Input] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dtype_counts: tuple[Condition, ...] = ()
    notes: Callable[[Any], None] = lambda made: None
    forecast: str = ""
    cost: Callable[..., Cost] = lambda checkpoint, options, windows: Cost()
    predict: Callable[..., tuple[Any, Any]] | None = None
    merge: tuple[str, str] | None = None
    examples: Mapping[str, str] = field(default_factory=dict)
    check: Callable[..., None] = lambda options, **inputs: None


def parts_of(options: type) -> dict[str, type]:
    """The fields of an option dataclass whose types are option dataclasses, too."""
    hints = get_type_hints(options)
    return {name: part for name, hint in hints.items() for part in (hint, *get_args(hint)) if _has_options(part)}


def _has_options(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and bool(options_of(kind))


def function(name: str) -> Callable[..., Any]:
    """The function of a "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
