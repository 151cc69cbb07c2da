"""What an evaluation is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass
from pathlib import Path

from sparsepack.errors import UserError
from sparsepack.eval.protocols import PROTOCOLS


@dataclass(frozen=True)
class EvalRequest:
    """What to measure.

    perplexity -- texts; each gives a row per protocol;  context -- tokens per window (None: 2048, or what the
                  model was made for if that is less);  windows -- at most so many
    against    -- source checkpoint for KL divergence and top-token agreement
    tasks, task_path, limit, num_fewshot, apply_chat_template -- lm-eval tasks, and lm-eval's options of these names
    batch      -- windows, and requests of a task, at a time (None: 1 window, 8 requests)
    runtime    -- "transformers": the stock model with the subject's weights and rules; or a backend of the engine
                  (`runtime.backends`), which runs a zigzag artifact as its users do
    protocol   -- decode, all or dense; None: decode where the subject is sparse, else dense
    """

    subject: str
    thresholds: Path | None = None
    perplexity: tuple[str, ...] = ()
    protocol: str | None = None
    context: int | None = None
    windows: int | None = None
    against: str | None = None
    tasks: tuple[str, ...] = ()
    task_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    runtime: str = "transformers"

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
        from sparsepack.runtime.backends import BACKENDS, backend_named

        runtimes = ("transformers", *BACKENDS)
        if not self.perplexity and not self.tasks:
            raise UserError("nothing to evaluate; give --perplexity TEXT or --tasks NAMES, or both")
        if self.protocol is not None and self.protocol not in PROTOCOLS:
            raise UserError(f"protocol {self.protocol!r}: expected one of {', '.join(PROTOCOLS)}")
        if self.runtime not in runtimes:
            raise UserError(f"runtime {self.runtime!r}: expected one of {', '.join(runtimes)}")
        if self.runtime != "transformers":
            backend_named(self.runtime).check_device(self.device)
            if self.thresholds or self.dtype != "float32":
                raise UserError(
                    f"runtime {self.runtime}: takes a zigzag artifact's own thresholds and types; "
                    "leave out --thresholds and --dtype"
                )
        if self.apply_chat_template and not self.tasks:
            raise UserError("--apply-chat-template is for tasks, perplexity has no conversations; give --tasks NAMES")
        counts = (self.batch, self.windows, self.context and self.context - 1)
        if any(count is not None and count < 1 for count in counts):
            raise UserError(
                f"context {self.context}, batch {self.batch}, windows {self.windows}: "
                "expected a context of at least 2, batch and windows of at least 1"
            )
