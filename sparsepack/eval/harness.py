"""lm-eval as a guest: without its network look-ups and without its noise, and without running the code of a task file
unless the user trusts the file."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from jinja2.exceptions import TemplateError

from sparsepack.errors import UserError
from sparsepack.eval.task_data import jsonl
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

if TYPE_CHECKING:
    pass


_OURS = f"{jsonl.__module__}.{jsonl.__name__}"
_REMEDY = "give --trust-tasks (in a recipe eval.trust_tasks: true) if you trust these files as you trust a program"


@contextmanager
def no_code() -> Iterator[None]:
    """Within the context, lm-eval loads and runs tasks without any code of theirs; our own loader of data stands.

    Raises `UserError` where a task asks for code, before it runs.
    """
    import lm_eval.api.metrics
    import lm_eval.api.task
    import lm_eval.tasks._yaml_loader
    import lm_eval.utils
    import yaml
    from lm_eval.api.registry import get_metric, metric_registry

    def function(name: str, folder: Path) -> Any:
        # Ours by itself: lm-eval would prefer a file of that name beside the task.
        if name == _OURS:
            return jsonl
        raise UserError(f"a task in {folder} runs the code {name!r} (!function); {_REMEDY}")

    def metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in metric_registry:
            raise UserError(f"the metric {name!r} of a task is none of lm-eval's, a script would run for it; {_REMEDY}")
        return get_metric(name)

    # Without libyaml lm-eval takes a loader that knows Python's names.
    safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with (
        mock.patch.multiple(lm_eval.tasks._yaml_loader, _import_func_in_yml=function, _Base=safe),
        mock.patch.object(lm_eval.api.task, "get_metric", metric),
        mock.patch.object(lm_eval.utils, "apply_template", _rendered),
    ):
        yield


def _rendered(template: str, document: Mapping[str, Any]) -> str:
    """The text that a task's template makes of a document, in a child process.

    Raises `UserError` for a template that reaches for code or takes too much, and what jinja2 raises for a wrong one.
    """
    # A document holds what JSON can say, but for dates and the like, of which templates write the text.
    plain = json.loads(json.dumps(document, default=str))
    try:
        text, _ = SANDBOX.call("render_task_template", template, plain)
    except SandboxError as error:
        if error.kind == "SecurityError":
            raise UserError(f"a template of a task reaches for code ({error}); {_REMEDY}") from error
        if error.kind in (None, "MemoryError"):
            raise UserError(f"a template of a task asks for too much: {error}; {_REMEDY}") from error
        raise TemplateError(f"{error.kind}: {error}") from error
    return str(text)


@contextmanager
def offline() -> Iterator[None]:
    """Hugging Face libraries look nothing up and report nothing; HF_HUB_OFFLINE=0 in the environment overrules.

    The switches are set where the libraries read them, not in the environment: they read that once, when imported,
    which by now has happened (the model is loaded).
    """
    if os.environ.get("HF_HUB_OFFLINE", "1").lower() in {"0", "no", "off", "false"}:
        yield
        return
    import datasets.config
    import huggingface_hub.constants

    with (
        mock.patch.multiple(huggingface_hub.constants, HF_HUB_OFFLINE=True, HF_HUB_DISABLE_TELEMETRY=True),
        mock.patch.multiple(datasets.config, HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Only warnings that concern the user; nothing on standard output, which belongs to results."""
    import datasets
    import lm_eval.api.task

    logger = logging.getLogger("lm_eval")
    task_logger = logging.getLogger("lm_eval.api.task")
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(max(logger.level, logging.WARNING))
        stack.callback(task_logger.removeFilter, _concerns_the_user)
        task_logger.addFilter(_concerns_the_user)
        if not sys.stderr.isatty() and not datasets.are_progress_bars_disabled():
            stack.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        # the bootstrap would fork a process that holds a model and threads
        stack.enter_context(mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"))
        hidden_bar = functools.partial(lm_eval.api.task.tqdm, disable=True)
        stack.enter_context(mock.patch.object(lm_eval.api.task, "tqdm", hidden_bar))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _concerns_the_user(record: logging.LogRecord) -> bool:
    # lm-eval warns so about every task with a `custom_dataset`; it is advice for its own command line
    return "Custom kwargs can be passed to `--metadata`" not in record.getMessage()
