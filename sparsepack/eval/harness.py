"""lm-eval as a guest: without its network look-ups and without its noise.

Local data for lm-eval task files: JSON lines, plain, .xz or .gz, found from any working directory.

In the YAML file of a task, with sparsepack installed, under any lm-eval front end:

    custom_dataset: !function sparsepack.eval.harness.jsonl
    dataset_kwargs:
      file: ${MY_DATA:-../data}/questions.jsonl.xz

A task file may not run code unless the user trusts the file.

Three ways lead from the YAML file of an lm-eval task to code: `!function MODULE.NAME`, in it or in what it includes;
a metric that lm-eval does not have, for which Hugging Face's `evaluate` runs a script; and a template, which in plain
Jinja reaches every object of the program. lm-eval has no switch for any of them, so they are closed where it looks
them up.
A template runs in a child process that limits its time and memory, too.
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
import lzma
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest import mock

from jinja2.exceptions import TemplateError

from sparsepack.errors import UserError
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

if TYPE_CHECKING:
    from datasets import Dataset

_OPEN: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_GOLDEN = (math.sqrt(5) - 1) / 2


def jsonl(*, file: str, split: str = "test", config_source: str = "", **_metadata: Any) -> dict[str, Dataset]:
    """The lines of `file` as the data set `{split: documents}`, in spread order (see `spread`).

    `${NAME}` and `${NAME:-default}` in `file` are taken from the environment. A relative path is looked for beside
    the YAML file (`config_source`, which lm-eval passes with the task's other metadata), then in the working
    directory. Raises UserError for a file that is missing, empty or not JSON lines.
    """
    import datasets

    path = _find(file, Path(config_source).parent)
    documents = _read(path)
    if not documents:
        raise UserError(f"{path}: no document in it; expected one JSON object per line")
    return {split: datasets.Dataset.from_list([documents[index] for index in spread(len(documents))])}


def spread(count: int) -> list[int]:
    """A fixed permutation of `range(count)` of which every beginning is spread evenly over the whole.

    Files are often sorted by subset, so the first documents would stand for one subset only; steps of the golden
    ratio visit all of them in proportion, and the same documents for the same limit every time.
    """
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) != 1:
        step += 1
    return [index * step % count for index in range(count)]


def _find(file: str, folder: Path) -> Path:
    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1]) or match[2]
        if found is None:
            raise UserError(f"data file {file}: the environment variable {match[1]} is not set; set it")
        return found

    path = Path(os.path.expanduser(_VARIABLE.sub(value, file)))  # which leaves ~ alone where nobody has a home
    candidates = [folder / path, Path.cwd() / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " or ".join(dict.fromkeys(os.path.normpath(candidate) for candidate in candidates))
    variables = ", ".join(match[1] for match in _VARIABLE.finditer(file))
    remedy = f"set {variables} or correct the task's YAML file" if variables else "correct the task's YAML file"
    raise UserError(f"data file {file} not found: no {looked}; {remedy}")


def _read(path: Path) -> list[dict[str, Any]]:
    documents = []
    number = 0
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                if line.strip():
                    documents.append(json.loads(line))
    except (ValueError, EOFError, OSError, lzma.LZMAError) as error:
        raise UserError(f"{path}: line {number or 1} cannot be read ({error}); expected JSON lines") from error
    return documents


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
