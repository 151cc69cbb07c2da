"""`sparsepack eval`, and what came of it as text for people."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.cli.command import PATH, Ruled, command, emit, from_options, group, json_output, options_from
from sparsepack.cli.shared import (
    RUNS,
    device_option,
    devices_option,
    dry_run_option,
    engine_flags,
    engine_options,
    shard_of,
    slots,
    tell_forecast,
    torch_threads,
)
from sparsepack.eval.options import EvalRequest
from sparsepack.option import only_with
from sparsepack.tables import Table, markdown


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


@command(name="eval", short_help="Measure accuracy: perplexity, KL divergence, lm-eval tasks.")
@click.argument("subject")
@click.option("--thresholds", type=PATH, help="Run a checkpoint with this table.")
@from_options(EvalRequest, "--perplexity", metavar="TEXT")
@options_from(EvalRequest, "--protocol", "--context", "--windows")
@click.option(
    "--against",
    cls=Ruled,
    metavar="MODEL",
    help="The source model: adds KL divergence and top-token agreement.",
    counts=(only_with("perplexity"),),
)
@group(
    "Tasks of lm-eval",
    from_options(
        EvalRequest,
        "--tasks",
        multiple=False,
        default="",
        show_default=False,
        callback=_names,
        help="lm-eval tasks, comma-separated.",
    ),
    options_from(
        EvalRequest, "--task-path", "--trust-tasks", "--limit", "--num-fewshot", "--apply-chat-template", "--batch"
    ),
)
@group(RUNS, from_options(EvalRequest, "--backend", "runtime"))
@slots
@engine_flags
@device_option
@devices_option
@dry_run_option
@group(RUNS, from_options(CalibrateOptions, "--dtype", counts=(only_with("runtime", "transformers"),)))
@torch_threads
@json_output
def evaluate(json_path: str | None, dry_run: int | None, **asked: Any) -> None:
    """Measure the accuracy of SUBJECT: a checkpoint, a checkpoint with --thresholds, or an artifact.

    With --devices, or under torchrun, several workers share the windows and the requests of tasks; the figures are the
    same to the last digit.
    """
    engine = engine_options(asked, EvalRequest)
    EvalRequest(engine=engine, **asked).check()
    if dry_run is not None:
        from sparsepack.eval.run import forecast

        tell_forecast(partial(forecast, EvalRequest(engine=engine, **asked)), dry_run)
        return
    from sparsepack.eval.run import evaluate as measure

    with shard_of(asked) as shard:
        found = measure(EvalRequest(engine=engine, **asked), shard=shard)
        if not shard.first:
            return
    emit(found, json_path, evaluation_table)


def evaluation_table(result: Mapping[str, Any]) -> str:
    """What `eval` measured."""
    from sparsepack.calibrate.collect import precision
    from sparsepack.eval.results import accuracy_tables, share_read, skipped
    from sparsepack.models.sparse_attention import in_words
    from sparsepack.placement.traffic import describe_hits

    tasks, attention = result["tasks"], result["subject"]["attention"]
    parts: list[str | Table] = [
        f"{result['subject']['name']} ({result['subject']['kind']})\ncomputed in {precision(result['compute'])}",
        *accuracy_tables([result]),
    ]
    measured = [*result["perplexity"], *([tasks] if tasks else [])]
    if tasks:
        parts.append(f"skipped in tasks: {skipped(tasks['realised_sparsity'])} of the block weights")
        if tasks["served"]:
            parts.append(f"in tasks: {describe_hits(tasks['served'])}")
        if tasks["tokens_read"]:
            parts.append(f"read in tasks: {share_read(tasks['tokens_read'])} of the tokens seen")
    if any(row["realised_sparsity"]["neurons_counted"] is False for row in measured):
        parts.append(
            "skipped: not counted, transformers computes inactive neurons like all others; with --backend cpu they are "
            "left out, as by generate"
        )
    if attention is not None:
        told = f"{in_words(attention)}\ntokens read: by layers that read a share"
        reads = any(row["tokens_read"] for row in measured)
        parts.append(f"attention: {told if reads else 'not used by protocol ' + result['protocol']}")
    return markdown(*parts)
