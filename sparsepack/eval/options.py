"""What an evaluation is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.errors import UserError, WorkersError, requires_extra
from sparsepack.eval.protocols import PROTOCOLS
from sparsepack.operation import Input, Operation
from sparsepack.option import check_options, only_with, option
from sparsepack.runtime.backends import BACKENDS, find_backend
from sparsepack.runtime.options import EngineOptions

_PERPLEXITY = (only_with("perplexity"),)
_TASKS = (only_with("tasks"),)


def require_lm_eval() -> None:
    """Raise `UserError` with pip's command where lm-eval is not installed, before a model is opened."""
    with requires_extra("eval", "--tasks"):
        import lm_eval  # noqa: F401


@dataclass(frozen=True)
class EvalRequest:
    """What to measure.

    thresholds  -- a table to run a checkpoint with
    against     -- source checkpoint for KL divergence and top-token agreement, or what that was made from
    second_half -- score only the second half of each window under every protocol, as under decode, so that the
                   figures of several are of the same tokens
    engine      -- how a backend runs an artifact; `device` and `runtime` say where, and which
    """

    subject: str
    thresholds: Path | None = None
    perplexity: tuple[str, ...] = option("Rolling perplexity of these texts.", default=())
    protocol: str | None = option(
        "Which tokens are sparse. Default: decode where the model is sparse, else dense.",
        default=None,
        choices=PROTOCOLS,
    )
    context: int | None = option(
        "Tokens per window (default 2048, or what the model was made for if that is less).",
        default=None,
        least=2,
        counts=_PERPLEXITY,
    )
    windows: int | None = option(
        "At most so many windows of each text, from the first (default: all).",
        default=None,
        least=1,
        counts=_PERPLEXITY,
    )
    against: str | None = None
    tasks: tuple[str, ...] = option("lm-eval tasks.", default=(), commas=True)
    task_path: Path | None = option(  # noqa: RUF009, it is what `field` is
        "Folder of local task YAML; nothing is looked up on a network then.",
        default=None,
        counts=_TASKS,
    )
    trust_tasks: bool = option(
        "Run the code that the files of the task folder ask for (!function, metrics of their own); else they are "
        "refused.",
        default=False,
        counts=(only_with("task_path"),),
    )
    runtime: str = option(
        "What runs the model: transformers, or the engine's backend that runs an artifact for its users, with "
        "its own kernels and rounding (cuda: on device cuda).",
        default="transformers",
        choices=("transformers", *BACKENDS),
    )
    limit: int | None = option("Documents per task (default: all).", default=None, least=1, counts=_TASKS)
    num_fewshot: int | None = option(
        "Examples before each question (default: the task's own number).", default=None, least=0, counts=_TASKS
    )
    apply_chat_template: bool = option(
        "Put each document of a task, and its examples, into the model's chat template.", default=False, counts=_TASKS
    )
    batch: int | None = option(
        "Windows, and requests of a task, at a time (default 1 window, 8 requests).", default=None, least=1
    )
    second_half: bool = False
    device: str = "cpu"
    dtype: str = CalibrateOptions.dtype
    engine: EngineOptions = field(default_factory=EngineOptions)

    @property
    def engine_options(self) -> EngineOptions:
        """What the engine of a backend is told."""
        return replace(self.engine, device=self.device, backend=self.runtime)

    @property
    def windows_at_once(self) -> int:
        """Windows of a text that are run together."""
        return self.batch or 1

    @property
    def requests_at_once(self) -> int:
        """Requests of an lm-eval task that are run together: they are short."""
        return self.batch or 8

    def check(self) -> None:
        """Raise `UserError` for a request that measures nothing or makes no sense."""
        if not self.perplexity and not self.tasks:
            raise UserError("nothing to evaluate; give --perplexity TEXT or --tasks NAMES, or both")
        if self.tasks:
            require_lm_eval()
        check_options(self, UserError)
        if self.against is not None and not self.perplexity:
            raise UserError(f"against {self.against}: it does nothing without perplexity; give both, or neither")
        if self.runtime != "transformers":
            find_backend(self.runtime).check_device(self.device)
            if self.thresholds or self.dtype not in ("auto", "float32"):
                raise UserError(
                    f"backend {self.runtime}: takes the artifact's own thresholds and types; "
                    "leave out --thresholds and --dtype"
                )
        if self.engine.divided_by:
            self._check_slots(self.engine.divided_by)
        if self.engine.hold:
            self._check_threshold_control()

    def check_workers(self, count: int) -> None:
        """Raise `WorkersError` for what so many workers do not measure together."""
        if count > 1 and self.runtime != "transformers":
            raise WorkersError(
                f"--backend {self.runtime}: measured in one process; leave it out, or --devices and torchrun"
            )

    def _check_slots(self, name: str) -> None:
        if self.runtime == "transformers":
            able = " or ".join(row.name for row in BACKENDS.values() if row.divides(name))
            raise UserError(f"{name}: transformers gives neurons no slots; give --backend {able}")
        if self.protocol == "dense" and name == "cached":  # a card that is too small needs its budget all the same
            raise UserError(f"{name}: protocol dense decodes nothing that slots could serve; take decode or all")

    def _check_threshold_control(self) -> None:
        if self.runtime == "transformers":
            able = " or ".join(row.name for row in BACKENDS.values() if row.scales_thresholds)
            raise UserError(f"hold: transformers takes thresholds as they are; give --backend {able}")
        if self.protocol == "dense":
            raise UserError("hold: protocol dense skips nothing whose share could be held; take decode or all")


def _table(result: Any, output: Path) -> str:
    from sparsepack.eval.results import evaluation_table

    return evaluation_table(result)


EVAL = Operation(
    name="eval",
    summary="Measure accuracy: perplexity, KL divergence, lm-eval tasks.",
    help="""
Measure the accuracy of SUBJECT: a checkpoint, a checkpoint with --thresholds, or an artifact.

With --devices, or under torchrun, several workers share the windows and the requests of tasks; the figures are the
same to the last digit.
""",
    subject=("subject", ""),
    options=EvalRequest,
    inputs={
        "thresholds": Input("Run a checkpoint with this table."),
        "against": Input("The source model: adds KL divergence and top-token agreement.", counts=_PERPLEXITY),
    },
    groups={
        "Tasks of lm-eval": (
            *("tasks", "task_path", "trust_tasks"),
            *("limit", "num_fewshot", "apply_chat_template", "batch"),
        ),
        "How it runs": ("runtime",),
    },
    flags={"runtime": ("--backend", "runtime")},
    dtype_counts=(only_with("runtime", "transformers"),),
    run="sparsepack.eval.run:evaluate",
    forecast="sparsepack.eval.run:forecast",
    table=_table,
)
