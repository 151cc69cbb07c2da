"""A task file may not run code unless the user trusts the file.

Three ways lead from the YAML file of an lm-eval task to code: `!function MODULE.NAME`, in it or in what it includes;
a metric that lm-eval does not have, for which Hugging Face's `evaluate` runs a script; and a template, which in plain
Jinja reaches every object of the program. lm-eval has no switch for any of them, so they are closed where it looks
them up.
A template runs in a child process that limits its time and memory, too.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from jinja2.exceptions import TemplateError

from sparsepack.errors import UserError
from sparsepack.eval.task_data import jsonl
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError

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
