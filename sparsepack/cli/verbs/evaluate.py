"""`sparsepack eval`."""

from functools import partial
from typing import Any

import click

from sparsepack.calibration.options import CalibrateOptions
from sparsepack.cli.options.declared import PATH, from_options, options_from
from sparsepack.cli.options.output import emit, json_output
from sparsepack.cli.options.shared import RUNS, device_option, engine_flags, engine_options, slots, torch_threads
from sparsepack.cli.options.verb import Ruled, group, verb
from sparsepack.cli.options.workers import devices_option, dry_run_option, tell_forecast, workers_of
from sparsepack.eval.options import EvalRequest
from sparsepack.option import only_with


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


@verb(name="eval", short_help="Measure accuracy: perplexity, KL divergence, lm-eval tasks.")
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
        from sparsepack.eval.forecast import forecast

        tell_forecast(partial(forecast, EvalRequest(engine=engine, **asked)), dry_run)
        return
    from sparsepack.cli.tables.evaluation import evaluation_table
    from sparsepack.eval.run import evaluate as measure

    with workers_of(asked) as workers:
        found = measure(EvalRequest(engine=engine, **asked), workers=workers)
        if not workers.first:
            return
    emit(found, json_path, evaluation_table)
