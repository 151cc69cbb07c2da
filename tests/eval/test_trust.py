"""What a task file may not do unless it is trusted: run code."""

import json
from pathlib import Path

import pytest
from commands_for_tests import fails, succeeds
from task_files import MULTIPLE_CHOICE, OUR_DATA

from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.tasks import run_tasks
from sparsepack.models.tokenizer import sandbox

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nprocess = lambda documents: documents\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    document = {"query": "Two and two make", "choices": ["five hundred", "4"], "gold": 1}
    (tasks / "data.jsonl").write_text(json.dumps(document) + "\n")
    (tasks / "code.py").write_text(CODE)
    (tasks / "evil_metric.py").write_text(CODE)
    asks = "process_docs: !function code.process\n"
    (tasks / "clean.yaml").write_text(f"task: clean\n{OUR_DATA}{MULTIPLE_CHOICE}")
    (tasks / "direct.yaml").write_text(f"task: direct\n{OUR_DATA}{asks}{MULTIPLE_CHOICE}")
    (tasks / "_base").write_text(f"{asks}{MULTIPLE_CHOICE}")
    (tasks / "included.yaml").write_text(f"task: included\ninclude: _base\n{OUR_DATA}")
    (tasks / "group.yaml").write_text("group: group\ntask: [clean, included]\n")
    (tasks / "classed.yaml").write_text("task: classed\nclass: !function code.process\n")
    metric = MULTIPLE_CHOICE.replace("metric: acc,", f"metric: {tasks / 'evil_metric.py'},")
    (tasks / "metric.yaml").write_text(f"task: metric\n{OUR_DATA}{metric}")
    # From any object to every class of the program, one of which opens files.
    reach = "{{ query.__class__.__mro__[1].__subclasses__() | length }}"
    template = MULTIPLE_CHOICE.replace("doc_to_text: query", f"doc_to_text: {json.dumps(reach)}")
    (tasks / "template.yaml").write_text(f"task: template\n{OUR_DATA}{template}")
    return tasks


def run(scorer, tokenizer, folder, task, **options):
    return run_tasks(scorer, tokenizer, EvalRequest("m", tasks=(task,), task_path=folder, **options), "dense")


@pytest.mark.parametrize("task", ["direct", "included", "group", "classed", "metric", "template"])
def test_a_task_that_asks_for_code_is_refused_before_any_runs(scorer, byte_tokenizer, folder, task):
    with pytest.raises(UserError, match="--trust-tasks") as caught:
        run(scorer, byte_tokenizer, folder, task)
    assert "\n" not in str(caught.value)
    assert not (folder / "ran").exists()


def test_a_template_of_a_task_that_loops_on_and_on_is_ended(scorer, byte_tokenizer, folder, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = MULTIPLE_CHOICE.replace("doc_to_text: query", f"doc_to_text: {json.dumps(loops)}")
    (folder / "loops.yaml").write_text(f"task: loops\n{OUR_DATA}{template}")
    with pytest.raises(UserError, match="was ended") as caught:
        run(scorer, byte_tokenizer, folder, "loops")
    assert "\n" not in str(caught.value)


def test_the_code_of_a_trusted_task_runs(scorer, byte_tokenizer, folder):
    assert run(scorer, byte_tokenizer, folder, "included", trust_tasks=True)["tasks"]["included"]["samples"] == 1
    assert (folder / "ran").exists()


def test_a_file_by_the_name_of_our_own_loader_does_not_run(scorer, byte_tokenizer, folder):
    (folder / "sparsepack" / "eval").mkdir(parents=True)
    (folder / "sparsepack" / "eval" / "task_data.py").write_text(CODE + "jsonl = None\n")
    assert run(scorer, byte_tokenizer, folder, "clean")["tasks"]["clean"]["samples"] == 1
    assert not list(folder.rglob("ran"))


def test_the_command_line_can_trust(folder):
    asked = ("eval", "shipped:tiny", "--tasks", "direct", "--task-path", folder)
    assert "code.process" in fails(*asked)
    succeeds(*asked, "--trust-tasks")


def test_a_recipe_hands_its_trust_on(monkeypatch, tmp_path):
    from sparsepack.eval import run as evaluation
    from sparsepack.recipe.load import load_recipe
    from sparsepack.recipe.stage import Job
    from sparsepack.recipe.stages import EVAL

    class Asked(Exception):
        pass

    def asked(request, read):
        raise Asked(request.trust_tasks)

    (tmp_path / "r.yaml").write_text(
        f"{{schema: 1, name: r, model: shipped:tiny, eval: {{tasks: t, task_path: {tmp_path}, trust_tasks: true}}}}"
    )
    monkeypatch.setattr(evaluation, "evaluate", asked)
    recipe = load_recipe(tmp_path / "r.yaml")
    with pytest.raises(Asked, match="True"):
        EVAL.run(Job(recipe, None, tmp_path), recipe.section("eval"))
