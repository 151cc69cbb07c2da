"""lm-eval as a guest: without its network look-ups and without its noise."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from unittest import mock


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
