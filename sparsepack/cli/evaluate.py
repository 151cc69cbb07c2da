"""`sparsepack eval`."""

from typing import Any

import click

from sparsepack.cli.options import PATH, RUNTIMES, compute, emit, from_options, json_output, torch_threads, window
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.protocols import PROTOCOLS


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


@click.command(name="eval")
@click.argument("subject")
@click.option("--thresholds", type=PATH, help="Run a checkpoint with this table.")
@click.option("--perplexity", multiple=True, metavar="TEXT", help="Rolling perplexity of a text; repeats.")
@click.option("--protocol", type=click.Choice(PROTOCOLS), help="Default: decode if sparse, else dense.")
@window
@click.option("--windows", type=click.IntRange(1), help="At most so many windows, from the first.")
@click.option("--against", metavar="MODEL", help="The source model: adds KL divergence and top-token agreement.")
@click.option("--tasks", default="", callback=_names, help="lm-eval tasks, comma-separated.")
@click.option("--task-path", type=PATH, help="Folder of local task YAML; nothing is looked up on a network then.")
@click.option("--limit", type=click.IntRange(1), help="Documents per task.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Overrides the tasks' own.")
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="Put each document of a task, and its examples, into the model's chat template.",
)
@click.option(
    "--batch", type=click.IntRange(1), help="Windows, and requests of a task, at a time (default 1 window, 8 requests)."
)
@from_options(
    EvalRequest,
    "--runtime",
    type=click.Choice(RUNTIMES),
    help="What runs SUBJECT: transformers, or a zigzag artifact's engine with its own kernels and rounding (cuda: with "
    "--device cuda).",
)
@compute
@torch_threads
@json_output
def evaluate(json_path: str | None, **asked: Any) -> None:
    """Measure the accuracy of SUBJECT: a checkpoint, a checkpoint with --thresholds, or an artifact."""
    from sparsepack.cli.tables import evaluation_table
    from sparsepack.eval.run import evaluate as measure

    emit(measure(EvalRequest(**asked)), json_path, evaluation_table)
