"""lm-eval tasks, run through a sparse scorer: names in, a JSON-able table out."""

from __future__ import annotations

import difflib
import errno
import math
import os
import random
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparsepack.errors import UserError
from sparsepack.workers.exchange import EACH_ALONE, Each

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

    from sparsepack.eval.options import EvalRequest
    from sparsepack.eval.protocols import Scorer

SEED = 1234  # lm-eval's own default: the same few-shot examples as its command line draws
BOOTSTRAP_ITERS = 1000  # only for metrics that are not means; their standard error is then good to 2 %


def run_tasks(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    request: EvalRequest,
    protocol: str,
    each: Each = EACH_ALONE,
    vocabulary: int | None = None,
    end_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    """Evaluates the lm-eval tasks, groups, tags or glob patterns of a request that was checked, under a protocol of
    `SparseLM`, and returns what is worth keeping of the result.

    With `task_path`, only the YAML files of that folder are known and nothing is looked up on the network (unless
    the environment says HF_HUB_OFFLINE=0); without it lm-eval's own tasks are known, whose data need a hub or a
    filled HF_HOME. Code that the files of `task_path` ask for (`!function`) runs only with `trust_tasks`.
    `each` shares batches of requests among several workers, who all return the same. `vocabulary` as in `SparseLM`.
    `limit` takes the first documents of each task. `num_fewshot` overrides the task files, except
    those that say 0 (as in lm-eval); each row says what was used. `apply_chat_template` is lm-eval's: a document is a
    user's message, and so are few-shot examples, with their answers as the assistant's.

    Returns `{"protocol", "limit", "lm_eval_version", "truncated_requests", "apply_chat_template", "tasks", "groups"}`;
    `tasks[name]` is
    `{"metrics", "samples", "samples_available", "num_fewshot", "version"}`, `groups[name]` is `{"metrics", "tasks"}`,
    and `metrics[key]` is `{"value", "stderr", "higher_is_better"}` with numbers or None. A metric's key is lm-eval's
    name for it, followed by `,filter` where the task has a named filter.

    Raises UserError for an unknown task, data that cannot be reached and a task that cannot run here.
    """
    from sparsepack.eval.harness import no_code, offline, quiet

    with ExitStack() as stack:
        stack.enter_context(quiet())
        if request.task_path is not None:
            stack.enter_context(offline())
            if not request.trust_tasks:
                stack.enter_context(no_code())
        from lm_eval.evaluator import evaluate

        from sparsepack.eval.lm_eval_model import SparseLM

        _seed()
        loaded = load_tasks(request.tasks, request.task_path)
        for task in loaded["tasks"].values():
            _set_fewshot(task, request.num_fewshot)
        model = SparseLM(
            scorer,
            tokenizer,
            protocol=protocol,
            batch_size=request.requests_at_once,
            each=each,
            vocabulary=vocabulary,
            end_tokens=end_tokens,
        )
        if request.apply_chat_template:
            model.chat_template()  # refused before anything runs where there is none
        # not simple_evaluate: that calls git, and describes the machine for seconds
        with _task_errors(request.tasks):
            found = evaluate(
                lm=model,
                task_dict=loaded,
                limit=request.limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
                apply_chat_template=request.apply_chat_template,
                fewshot_as_multiturn=request.apply_chat_template,
            )
    report = _report(found, protocol=protocol, limit=request.limit, truncated=model.truncated_requests)
    return {**report, "apply_chat_template": request.apply_chat_template}


@contextmanager
def _task_errors(names: Sequence[str]) -> Iterator[None]:
    """Say in one line what lm-eval raises over a task's own settings: its filters, metrics and templates. What our
    code, which it calls, raises stays as it is."""
    try:
        yield
    except Exception as error:
        frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [name for name in frames if name.partition(".")[0] in ("sparsepack", "lm_eval")]
        own_remedy = isinstance(error, UserError | OSError | MemoryError)
        if own_remedy or not ours or not ours[-1].startswith("lm_eval"):
            raise
        part = " of a filter (filter_list)" if ".filters." in ours[-1] else ""
        raise UserError(
            f"task {', '.join(names)}: lm-eval fails over the settings{part} ({type(error).__name__}: "
            f"{_first_line(error)}); correct the task's YAML file"
        ) from error


def load_tasks(names: Sequence[str], task_path: Path | None) -> dict[str, Any]:
    """The named tasks with their data, in the form that `lm_eval.evaluator.evaluate` takes.

    Raises UserError for an unknown name, with the nearest known ones, and for a task whose data or YAML file fails.
    """
    from lm_eval.tasks import TaskManager

    if task_path is not None and not task_path.is_dir():
        raise UserError(f"task path {task_path} is not a folder; give the folder that holds the tasks' YAML files")
    manager = TaskManager(include_path=task_path, include_defaults=task_path is None)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            raise UserError(_unknown(name, manager.all_tasks, task_path))
        for match in matches:
            part = _load_task(manager, match, task_path)
            for key, values in loaded.items():
                values.update(part.get(key, {}))
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"task {name} runs the code that the model writes, which sparsepack does not; leave it out")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"task {name} needs images or sound; sparsepack evaluates text models, leave it out")
    return loaded


def _load_task(manager: TaskManager, name: str, task_path: Path | None) -> dict[str, Any]:
    from jinja2.exceptions import SecurityError

    try:
        part: dict[str, Any] = manager.load([name])
    except (UserError, SecurityError):
        raise
    except Exception as error:  # task files run code of their own: anything can come out
        problem = f"{type(error).__name__}: {_first_line(error)}"
        if not _is_data_error(error):
            raise UserError(f"task {name} cannot be built from its YAML file ({problem}); correct the file") from error
        remedy = _data_remedy(error, task_path)
        raise UserError(f"the data of task {name} cannot be reached ({problem}); {remedy}") from error
    return part


def _data_remedy(error: Exception, task_path: Path | None) -> str:
    """What helps against an error of a task's data: of the cache into which data sets are written, or of the data."""
    import datasets.config

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    named = getattr(error, "filename", None)
    in_cache = named is not None and Path(os.fsdecode(named)).is_relative_to(cache)
    if isinstance(error, OSError) and (in_cache or not _can_write(cache)):
        return f"{cache}, the cache of data sets, cannot be written: set HF_DATASETS_CACHE to a folder that can be"
    if isinstance(error, PermissionError):
        return "give yourself the right to read it (chmod)"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space: data sets are written to {cache}, HF_DATASETS_CACHE names another folder"
    if task_path is None:
        return "set HF_HOME to a folder that has the data, or use --task-path with local task files"
    hub = "data from the hub must lie under HF_HOME, or be allowed with HF_HUB_OFFLINE=0"
    return f"correct the path in the YAML file; {hub}"


def _can_write(folder: Path) -> bool:
    """Whether a folder can be written, or made where it is not there yet."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _is_data_error(error: Exception) -> bool:
    from datasets.exceptions import DatasetsError

    if isinstance(error, (OSError, DatasetsError)):
        return True
    # datasets raises a bare ValueError for a hub data set whose cache lacks the configuration
    return isinstance(error, ValueError) and "cache" in str(error)


def _unknown(name: str, known: list[str], task_path: Path | None) -> str:
    where = "among lm-eval's own tasks" if task_path is None else f"in {task_path}"
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = f"nearest: {', '.join(near)}"
    elif known:
        hint = f"it has {', '.join(known[:8])}" + (f" and {len(known) - 8} more" if len(known) > 8 else "")
    else:
        hint = "it has no task; give the folder of the tasks' YAML files with --task-path"
    if task_path is not None and (broken := _unreadable(task_path)):
        hint += f"; not readable: {', '.join(broken)}"
    return f"task {name!r} not found {where}; {hint}"


def _unreadable(folder: Path) -> list[str]:
    """The YAML files with syntax errors, which lm-eval passes over in silence."""
    broken = []
    for path in sorted(folder.rglob("*.yaml")):
        try:
            yaml.compose(path.read_text(encoding="utf-8"))
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            broken.append(f"{path}{line} ({error.problem})")
        except (OSError, ValueError, yaml.YAMLError) as error:
            broken.append(f"{path} ({_first_line(error)})")
    return broken


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    default = task.get_config("num_fewshot")
    if default is None or (num_fewshot is not None and default != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=SEED)


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _report(found: dict[str, Any], *, protocol: str, limit: int | None, truncated: int) -> dict[str, Any]:
    from lm_eval import __version__ as lm_eval_version

    counts = found["n-samples"]
    return {
        "protocol": protocol,
        "limit": limit,
        "lm_eval_version": lm_eval_version,
        "truncated_requests": truncated,
        "tasks": {
            name: {
                "metrics": _metrics(found["results"][name], found["higher_is_better"].get(name, {})),
                "samples": count["effective"],
                "samples_available": count["original"],
                "num_fewshot": found["n-shot"].get(name, 0),
                "version": found["versions"].get(name),
            }
            for name, count in counts.items()
        },
        "groups": {
            name: {
                "metrics": _metrics(found["results"].get(name, {}), found["higher_is_better"].get(name, {})),
                "tasks": sorted(children),
            }
            for name, children in found.get("group_subtasks", {}).items()
        },
    }


def _metrics(row: dict[str, Any], higher_is_better: dict[str, bool | None]) -> dict[str, dict[str, Any]]:
    """lm-eval keys each value `metric,filter` and its error `metric_stderr,filter`; what is not known is "N/A"."""
    pairs: Iterable[tuple[str, str, str]] = (key.partition(",") for key in row)
    return {
        name if chosen == "none" else f"{name},{chosen}": {
            "value": _number(row[f"{name},{chosen}"]),
            "stderr": _number(row.get(f"{name}_stderr,{chosen}")),
            "higher_is_better": higher_is_better.get(name),
        }
        for name, comma, chosen in pairs
        if comma and not name.endswith("_stderr")
    }


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
