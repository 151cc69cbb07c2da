"""`sparsepack pack`."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.cli.command import OUTPUT, PATH, command, from_options, group, options_from, overwrite_flag
from sparsepack.cli.shared import (
    CALIBRATION,
    RUNS,
    SKIPPED,
    allocation,
    allocation_options,
    attention,
    attention_options,
    device_option,
    devices_option,
    dry_run_option,
    refit,
    refit_options,
    shard_of,
    tell_forecast,
)
from sparsepack.option import only_with
from sparsepack.packing import PackRequest
from sparsepack.terminal import tell


@command(short_help="Pack a model into one artifact: a GGUF file or a folder.")
@click.argument("model")
@from_options(PackRequest, "--format")
@click.option(
    "--calibration",
    type=CALIBRATION,
    help="A folder made by `sparsepack calibrate`; needed for --sparsity, --refit, --quantiser gptq, --attention and "
    "neuron-q4_k, for which a trace does, too.",
)
@group(
    SKIPPED,
    click.option("--thresholds", type=PATH, help="A table made by `sparsepack thresholds`, in place of --sparsity."),
)
@allocation
@refit
@attention
@group("Types", options_from(PackRequest, "--output-type", "--embedding-type", "--gates"))
@group("Pruned models", options_from(PackRequest, "--keep", "--of"))
@group(
    OUTPUT,
    click.option("-o", "--output", type=PATH, required=True, help="The file or folder to make."),
    from_options(PackRequest, "score", "--score/--no-score"),
)
@device_option
@devices_option
@dry_run_option
@group(RUNS, from_options(CalibrateOptions, "--dtype", counts=(only_with("calibration"),)))
@overwrite_flag
def pack(output: Path, dry_run: int | None, **asked: Any) -> None:
    """Pack MODEL into one artifact, with the thresholds of a calibration inside if --sparsity is given, its heavy
    channels of attention if --attention is, and weights fitted to their inputs if --refit or --quantiser gptq is.

    With a calibration it also says what was lost on the text that this holds out (docs/what-is-lost.md), and warns from
    5 % of perplexity on; --no-score leaves it out.

    With --devices, or under torchrun, several workers share the blocks and write them into one file, which all must
    reach; the artifact has the same bytes."""
    options, attention, refit = allocation_options(asked), attention_options(asked), refit_options(asked)
    del asked["dtype"]  # that thresholds are searched with, and weights are fitted with
    request = PackRequest(output=output, allocation=options, sparse_attention=attention, fitting=refit, **asked)
    request.check()
    if dry_run is not None:
        from sparsepack.packing_forecast import forecast

        tell_forecast(partial(forecast, request), dry_run)
        return
    from sparsepack.cli.tables import artifact_line
    from sparsepack.formats.inspect import describe
    from sparsepack.inspection import score_rows
    from sparsepack.packing import pack as make
    from sparsepack.progress import say

    with shard_of(asked) as shard:
        made = make(replace(request, device=asked["device"]), shard=shard)
        if not shard.first:
            return
    say(*(f"note: {note}" for note in made.notes))
    scored = [f"{text}: {figures}" for text, figures in score_rows(made.score)]
    tell("\n".join([artifact_line(describe(output)), *scored]))
    say(*([f"note: {made.unscored}"] if made.unscored else []))
    if made.warning:
        tell(f"WARNING: {made.warning}", sys.stderr)
