"""The options of thresholds and of sparse attention, and the table of allocations: who gives each site its share of the
sparsity. Nothing heavy is imported here: the command line and recipes read the defaults.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sparsepack.calibrate.collect import CRITERIA, CalibrateOptions
from sparsepack.errors import PackingError, ThresholdsError
from sparsepack.formats.table import FORMATS
from sparsepack.models.activity import shown
from sparsepack.models.sparse_attention import LARGEST_DENOMINATOR, TokenPolicy
from sparsepack.operation import Cost, Input, Operation
from sparsepack.option import LARGEST_SEED, check_options, not_with, only_with, option
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class Allocation:
    """A way to share a target among sites.

    name           -- what users and tables call it
    module         -- what implements it: by `find_rules(checkpoint, calibration, options, weights, train, each)` where
                      all rules are found before blocks are run, else by `chooser(calibration, options, weights, each,
                      carried)`; `carried` are tensors from one block to the next
    at_once        -- whether all rules are found before
    even           -- every site gets the target itself; otherwise they have it on average
    dense_upstream -- whether its thresholds can be taken with everything upstream dense
    per_channel    -- whether it has channel weights of its own, whatever the criterion
    with_experts   -- whether it does without them where a block's MLP has experts, which share their thresholds
    trains         -- whether it trains the whole model's thresholds by `steps`, `batch` and `length`, and can learn
                      what inactive channels stand at; the others stream one block at a time
    """

    name: str
    module: str
    even: bool = False
    dense_upstream: bool = True
    per_channel: bool = False
    with_experts: bool = False
    trains: bool = False
    at_once: bool = False

    def problems(self, upstream: str, windows: bool) -> Iterator[tuple[str, str]]:
        """The options that the allocation cannot have, each with what is wrong and what was expected.

        windows -- whether somebody said how many to run
        """
        if windows and self.even and upstream == "dense":
            yield (
                "windows",
                f"{self.name} takes dense thresholds from the calibration's counts, and runs none; leave it",
            )
        if upstream == "dense" and not self.dense_upstream:
            yield "upstream", f"{self.name} runs the whole sparse model; expected sparse"


ALLOCATIONS = {
    row.name: row
    for row in (
        Allocation(
            "fisher",
            "sparsepack.calibrate.fisher",
            dense_upstream=False,
            per_channel=True,
            with_experts=True,
            at_once=True,
        ),
        Allocation("uniform", "sparsepack.calibrate.uniform", even=True),
        Allocation("teal", "sparsepack.calibrate.teal"),
        Allocation(
            "global",
            "sparsepack.calibrate.learned",
            dense_upstream=False,
            per_channel=True,
            trains=True,
            at_once=True,
        ),
    )
}
"""The rows by their names."""


UPSTREAMS = ("sparse", "dense")

_WITH_PLANES = tuple(row.name for row in FORMATS.values() if row.levels)
_SOUGHT = (only_with("sparsity"),)
"""A verb may be told no target; then no thresholds are sought."""
_LEARNT = (*_SOUGHT, only_with("allocation", *(row.name for row in ALLOCATIONS.values() if row.trains)))


@dataclass(frozen=True)
class AllocationOptions:
    """What the user asks for. Sites are named or matched by patterns: `blk.3.mlp_mid`, `blk.*.attn_in`, `re:...`."""

    sparsity: float = option(
        "Target: share of the weights that a decoded token skips, of the sites that may be sparse.", least=0, below=1
    )
    allocation: str = option(
        "How the target is shared out: each channel by the gradient of the model's output (fisher); evenly; TEAL's "
        "greedy per block; thresholds trained on the model's output (global).",
        default="fisher",
        choices=tuple(ALLOCATIONS),
        counts=_SOUGHT,
    )
    criterion: str = option(
        "Score of channel j: |x_j|, or |x_j| times the norm of its column.",
        default="magnitude",
        choices=CRITERIA,
        counts=(*_SOUGHT, not_with("allocation", "fisher")),
    )
    include: tuple[str, ...] = option(
        "Only these sites may be sparse: blk.3.mlp_mid, blk.*.attn_in, re:REGEX.", default=(), counts=_SOUGHT
    )
    ignore: tuple[str, ...] = option("These sites stay dense.", default=(), counts=_SOUGHT)
    upstream: str = option(
        "Activations that thresholds are taken on: with all before a site sparse, or dense as in the papers.",
        default="sparse",
        choices=UPSTREAMS,
        counts=_SOUGHT,
    )
    windows: int = option(
        "Calibration windows that thresholds are taken on.",
        default=16,
        least=1,
        counts=(*_SOUGHT, not_with("format", *_WITH_PLANES)),
    )
    offsets: bool = option(
        "With global: also learn what inactive channels stand at (R-Sparse's idea); costs nothing later.",
        default=False,
        counts=_LEARNT,
    )
    steps: int = option("With global: optimiser steps.", default=300, least=1, counts=_LEARNT)
    batch: int = option("With global: windows per step.", default=4, least=1, counts=_LEARNT)
    length: int = option("With global: tokens per window.", default=1024, least=2, counts=_LEARNT)
    seed: int = option("With global: which windows are drawn.", default=0, least=0, most=LARGEST_SEED, counts=_LEARNT)
    device: str = "cpu"
    dtype: str = CalibrateOptions.dtype
    block: str = ""
    """Of a format with planes, the type of its blocks: the levels of channels are found, by `fisher` alone."""

    def check(self) -> None:
        """Raise `ThresholdsError` for values out of range."""
        check_options(self, ThresholdsError)
        if self.block and (self.allocation != "fisher" or self.upstream != "sparse"):
            raise ThresholdsError(
                f"allocation {self.allocation}, upstream {self.upstream}: levels of planes are found by fisher and "
                "sparse alone; leave them out, or pack as zigzag-q4_k"
            )
        for name, problem in ALLOCATIONS[self.allocation].problems(self.upstream, self.windows != type(self).windows):
            raise ThresholdsError(f"{name}: {problem}")


@dataclass(frozen=True)
class ThresholdsOptions(AllocationOptions):
    """The same of a table that is found by itself; `pack` knows which format it is for."""

    format: str | None = option(
        "Format with planes that the table is for: it says at which level a column is read; --sparsity is the share "
        "of the bits that is not read, 0.456 for 3.4 bits of zigzag-q6_p (default: a column is read or not).",
        default=None,
        choices=_WITH_PLANES,
        counts=_SOUGHT,
    )

    def settled(self) -> "ThresholdsOptions":
        """The same options with the type of the format's blocks. Raises `ThresholdsError` as `check`."""
        self.check()
        if self.format is None:
            return self
        settled = replace(self, block=FORMATS[self.format].matrices.block)
        settled.check()
        return settled


NONE, DOUBLE_SPARSITY = "none", "double"
AUTO = "auto"
_LARGEST = 2**31 - 1
_DOUBLE = (only_with("attention", DOUBLE_SPARSITY),)


@dataclass(frozen=True)
class AttentionOptions:
    """Which of the cached tokens decoded positions read, and how they find them (`models.sparse_attention`)."""

    attention: str = option(
        "Which tokens a decoded one attends to: all, or with Double Sparsity those that a few channels of their keys "
        "rank best.",
        default=NONE,
        choices=(NONE, DOUBLE_SPARSITY),
    )
    channels: int | None = option(
        "With --attention double: channels of each KV head that rank tokens (default: a quarter of them).",
        default=None,
        least=1,
        counts=_DOUBLE,
    )
    tokens: str = option(
        "With --attention double: share of the tokens that is read, 1/16 or 0.0625.", default="1/16", counts=_DOUBLE
    )
    sinks: int = option(
        "With --attention double: first tokens of the text, always read.",
        default=TokenPolicy.sinks,
        least=0,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    recent: int = option(
        "With --attention double: last tokens, always read, the new one included.",
        default=TokenPolicy.recent,
        least=1,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    min_context: int = option(
        "With --attention double: where fewer tokens than these are there, all are read.",
        default=TokenPolicy.min_context,
        least=1,
        most=_LARGEST,
        counts=_DOUBLE,
    )
    dense_layers: str = option(
        "With --attention double: layers that read all tokens, as 0,1 or none; auto: those where the best tokens miss "
        "more than half of the attention weight of the calibration text, and none for more than 1/4 of the tokens.",
        default=AUTO,
        counts=_DOUBLE,
    )

    @property
    def sparse(self) -> bool:
        """Whether fewer tokens than all are read."""
        return self.attention != NONE

    @property
    def policy(self) -> TokenPolicy:
        """How many tokens are read. Raises `PackingError` for a share that is none."""
        return TokenPolicy(_share(self.tokens), self.sinks, self.recent, self.min_context)

    @property
    def dense(self) -> frozenset[int] | None:
        """The layers that read all tokens; None: to be found. Raises `PackingError` for what are no layers."""
        return _layers(self.dense_layers)

    def check(self) -> None:
        """Raise `PackingError` for values that are out of range or do not go together."""
        check_options(self, PackingError)
        always = self.sinks + self.recent
        if self.min_context < always:
            raise PackingError(
                f"min_context {self.min_context}: expected at least sinks + recent, {always}, which are always read"
            )
        if _share(self.tokens) == 1:
            raise PackingError(
                f"tokens {self.tokens!r}: all of them, which is no sparse attention; expected a smaller share, or "
                f"attention {NONE}"
            )
        _layers(self.dense_layers)


def _layers(text: str) -> frozenset[int] | None:
    """Raise `PackingError` unless it is a word that we know, or numbers."""
    words = {AUTO: None, NONE: frozenset[int]()}
    if text in words:
        return words[text]
    if not re.fullmatch(r"\d{1,9}( *, *\d{1,9})*", text):
        raise PackingError(f"dense layers {text[:60]!r}: expected {AUTO}, {NONE}, or numbers of layers as 0,1")
    return frozenset(map(int, text.split(",")))


def _share(text: str) -> Fraction:
    """Raise `PackingError` unless it is a share above 0 and at most 1."""
    try:
        if not re.fullmatch(r"\d{1,7}/\d{1,7}|\d{0,7}\.?\d{1,12}(e-\d{1,2})?", text):
            raise ValueError
        share = Fraction(text)
        if not 0 < share <= 1:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise PackingError(
            f"tokens {text[:60]!r}: expected a share above 0 and at most 1, such as 1/16 or 0.0625"
        ) from None
    if share.denominator > LARGEST_DENOMINATOR:
        raise PackingError(f"tokens {text[:60]!r}: {share}; expected a fraction of smaller numbers, such as 1/16")
    return share


def cost(checkpoint: "Checkpoint", options: AllocationOptions, windows: tuple[int, int]) -> Cost:
    """One block and its activations; what an allocation that trains takes of memory is not known."""
    from sparsepack.calibrate.find_thresholds import BATCH
    from sparsepack.calibrate.training import trained_tokens
    from sparsepack.files.tensors import arithmetic
    from sparsepack.models.hf_model.forecast import block_by_block_bytes

    count, context = min(options.windows, windows[0]), windows[1]
    tokens = count * context if options.upstream == "sparse" else 0
    if ALLOCATIONS[options.allocation].trains:
        return Cost(tokens + trained_tokens(options.steps, options.batch, min(options.length, context)))
    size = arithmetic(options.dtype, checkpoint.dtype, options.device).itemsize
    return Cost(tokens, block_by_block_bytes(checkpoint, size, (count, context), BATCH))


def thresholds_table(summary: Mapping[str, Any]) -> str:
    """A thresholds table: a row per block, of each site what its threshold skips on the calibration text, and that."""
    rows = summary["rows"]
    sites = list(dict.fromkeys(row["site"] for row in rows))
    by_key = {(row["layer"], row["site"]): row for row in rows}
    body = []
    for layer in sorted({row["layer"] for row in rows}):
        cells = [by_key.get((layer, site)) for site in sites]
        body.append([layer, *(_site_cell(cell) if cell else "-" for cell in cells)])
    vectors = [name for name in ("channel_weights", "offset") if any(row.get(name) for row in rows)]
    head = (
        f"{summary['allocation']}, {summary['criterion']}, target {summary['sparsity']:.4g}, "
        f"upstream {summary['upstream']}" + (f"; per channel: {', '.join(vectors)}" if vectors else "")
    )
    outlook = summary.get("expected")
    said = "not known, measure it with `sparsepack eval`" if outlook is None else shown(**outlook)
    parts: list[str | Table] = [head, Table(["block", *(f"{site} (skips @ threshold)" for site in sites)], body)]
    of = "the bits of all block weights" if any(row.get("steps") for row in rows) else "all block weights"
    parts.append(f"a decoded token skips, on text like the calibration text: {said} of {of}")
    if notes := _edited(summary):
        parts.append("\n".join(f"note: {note}" for note in notes))
    return markdown(*parts)


def _site_cell(row: Mapping[str, Any]) -> str:
    expected = row.get("expected")
    if expected == 0 and row["threshold"] == 0:
        return "dense"
    return f"{'?' if expected is None else f'{100 * expected:.1f} %'} @ {row['threshold']:.4g}"


_FAR = 0.02
_MOST_NOTES = 8


def _edited(summary: Mapping[str, Any]) -> list[str]:
    """The lines that say which field counts where a table, as after an edit, asks for other than what will happen."""
    notes = [
        f"blk.{row['layer']}.{row['site']}: `threshold` counts, not `sparsity`: {row['threshold']:.4g} skips "
        f"{100 * row['expected']:.1f} %, not {100 * row['sparsity']:.1f} %"
        for row in summary["rows"]
        if row.get("expected") is not None and abs(row["expected"] - row["sparsity"]) > _FAR
    ]
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES:] = [f"the same of {len(notes) - _MOST_NOTES} more sites"]
    outlook = summary.get("expected")
    if outlook is not None and abs(outlook["of_sparse_sites"] - summary["sparsity"]) > _FAR:
        notes.append(f"the thresholds count, not the table's `sparsity` of {100 * summary['sparsity']:.1f} %")
    return notes


THRESHOLDS = Operation(
    name="thresholds",
    summary="Find from which size on a channel counts, for a sparsity.",
    help="""
Find the thresholds of MODEL for a sparsity: a table to print, edit, and give to `pack` or `eval`. With --format
zigzag-q6_p they are the levels at which columns are read; `pack --bits`, --kl and --loss find these by themselves.

A run that was killed goes on where it stopped when the same command is given again; so does `pack --sparsity`.
With --devices, or under torchrun, several workers share the windows; the table has the same bytes.
""",
    options=ThresholdsOptions,
    examples={"sparsity": "0.5"},
    groups={"What is skipped": ("format",)},
    inputs={"calibration": Input("A folder made by `sparsepack calibrate`.", required=True)},
    run="sparsepack.calibrate.find_thresholds:make_thresholds",
    forecast="sparsepack.calibrate.find_thresholds:forecast",
    cost=cost,
    table=lambda made, output: thresholds_table(made.summary()),
    output="The table to make, as JSON.",
)
