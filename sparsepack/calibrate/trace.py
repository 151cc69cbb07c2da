"""`trace`: its options, what it declares, and what a trace was made of as text for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsepack.calibrate.collect import CalibrateOptions, made_from_table
from sparsepack.errors import PlacementError
from sparsepack.operation import Input, Operation
from sparsepack.option import check_options, option

MANIFEST = "trace.json"
"""A folder with this file is a trace."""


@dataclass(frozen=True)
class TraceOptions:
    """How many sessions, how long, and who counts as active."""

    sessions: int = option(
        "Stretches of text, one from the middle of each of so many documents; where the text has fewer that are long "
        "enough, evenly spread over the text as a whole.",
        default=12,
        least=1,
        most=100_000,
    )
    tokens: int = option("Tokens of a session.", default=2048, least=2)
    prompt: int = option("Its first tokens: they are known before anything is decoded.", default=256, least=0)
    share: float | None = option(
        "For models whose neurons are never exactly zero: the share of the neurons that counts as active, by a "
        "threshold for each block that has it on the text of --calibration (default: all that are not zero).",
        default=None,
        above=0,
        below=1,
    )
    batch: int = option("Sessions at a time.", default=2, least=1)
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `PlacementError` for values that make no sense."""
        check_options(self, PlacementError)
        if self.prompt >= self.tokens - 1:
            raise PlacementError(
                f"prompt {self.prompt}, tokens {self.tokens}: nothing would be decoded; expected prompt < tokens - 1"
            )


def trace_table(manifest: Mapping[str, Any]) -> str:
    """What a trace was made of."""
    rule, sessions = manifest["rule"], manifest["sessions"]
    documents = sum(row["document"] is not None for row in sessions)
    lengths = sorted({row["tokens"] for row in sessions})
    prompts = sorted({row["prompt"] for row in sessions})
    unit = "experts" if rule["active"] == "routed" else "neurons"
    which = {"nonzero": "not zero", "routed": "those that the router gives a token to"}.get(rule["active"])
    which = which or f"above a threshold that {100 * rule['share']:g} % pass"
    return made_from_table(
        manifest,
        {
            "sessions": f"{len(sessions)} of {_range(lengths)} tokens, the first {_range(prompts)} of them prompt; "
            f"{documents} from the middle of a document of their own",
            unit: f"{manifest['intermediate']:,} in a block; active: {which}",
        },
    )


def _range(values: Sequence[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


TRACE = Operation(
    name="trace",
    summary="Record which neurons are active for each token.",
    help="""
Record which neurons of MODEL are active for each token; or `trace merge A B -o C` of two traces of one model.

A neuron is active where its activation, times what multiplies it, is not zero. Of a mixture of experts it is the
experts that are recorded: those that the router gives a token to. `inspect` shows what a trace holds.
A run that was killed goes on where it stopped when the same command is given again.
""",
    options=TraceOptions,
    inputs={
        "calibration": Input("A folder made by `sparsepack calibrate`, for the thresholds of --share.", before="batch")
    },
    run="sparsepack.calibrate.tracing:trace",
    merge=("traces", "sparsepack.calibrate.trace_file:merge_folders"),
    table=lambda made, output: trace_table(made.manifest),
    output="The folder to make.",
)
