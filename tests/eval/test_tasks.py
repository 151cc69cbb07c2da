"""Running lm-eval tasks by name: what comes back, what is refused and how, no network, no noise."""

import copy
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from task_files import MULTIPLE_CHOICE, OUR_DATA
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.tasks import run_tasks

TASKS = Path(__file__).parents[1] / "tasks"
QUESTIONS = [
    {"query": "The cat sat on the", "choices": ["mat", "mathematics"], "gold": 0},
    {"query": "Two and two make", "choices": ["five hundred", "4"], "gold": 1},
    {"query": "é", "choices": ["x", "y", "z"], "gold": 2},
]


@pytest.fixture
def folder(tmp_path):
    """A user's own task folder: `own` through our loader, `stock` through the json builder of datasets."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = tasks / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tasks / "own.yaml").write_text(f"task: own\n{OUR_DATA}{MULTIPLE_CHOICE}")
    builder = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}/cache}}"
    (tasks / "stock.yaml").write_text(f"task: stock\n{builder}{MULTIPLE_CHOICE}")
    (tasks / "hub.yaml").write_text(f"task: hub\ndataset_path: nobody/nothing{MULTIPLE_CHOICE}")
    (tasks / "lost.yaml").write_text(f"task: lost\n{OUR_DATA.replace('file: data', 'file: no')}{MULTIPLE_CHOICE}")
    (tasks / "wrong.yaml").write_text(f"task: wrong\n{OUR_DATA}{MULTIPLE_CHOICE.replace('split: test', 'split: tset')}")
    (tasks / "broken.yaml").write_text("task: broken\n  doc_to_text: [\n")
    (tasks / "both.yaml").write_text("group: both\ntask: [own, stock]\n")
    return tasks


def run(scorer, tokenizer, folder, tasks=("own",), protocol="decode", **more):
    request = EvalRequest("m", tasks=tuple(tasks), task_path=folder, **{"batch": 4, **more})
    return run_tasks(scorer, tokenizer, request, protocol)


def test_the_result_is_json_with_numbers_or_none(scorer, byte_tokenizer, folder):
    result = run(scorer, byte_tokenizer, folder, tasks=["both"], protocol="all")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["protocol"], result["limit"], result["lm_eval_version"][:2]) == ("all", None, "0.")
    assert result["groups"]["both"]["tasks"] == ["own", "stock"]
    row = result["tasks"]["own"]
    assert (row["samples"], row["samples_available"], row["num_fewshot"], row["version"]) == (3, 3, 0, 2.0)
    assert set(row["metrics"]) == {"acc", "acc_norm"}
    assert row["metrics"] == result["tasks"]["stock"]["metrics"]
    assert all(isinstance(metric["stderr"], float) for metric in row["metrics"].values())
    alone = run(scorer, byte_tokenizer, folder, limit=1, num_fewshot=1)["tasks"]["own"]
    assert (alone["samples"], alone["num_fewshot"]) == (1, 1)
    assert alone["metrics"]["acc"]["stderr"] is None  # one document has no standard error; lm-eval says "N/A"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("onw", r"task 'onw' not found in .*tasks; nearest: own.*not readable: .*broken.yaml:2"),
        ("zzzzzz", r"not found in .*; it has both, hub, lost, own, stock, wrong"),
        ("hub", r"data of task hub cannot be reached .*nobody/nothing.*HF_HOME"),
        ("lost", r"data file no.jsonl not found: no .*tasks/no.jsonl"),
        ("wrong", r"task wrong cannot be built from its YAML file \(KeyError"),
    ],
)
def test_a_task_that_cannot_run_is_one_line_with_a_remedy(scorer, byte_tokenizer, folder, task, message):
    with pytest.raises(UserError, match=message) as caught:
        run(scorer, byte_tokenizer, folder, tasks=[task])
    assert "\n" not in str(caught.value)


def test_local_tasks_need_no_network_and_print_nothing(scorer, byte_tokenizer, folder, tmp_path, monkeypatch, capfd):
    asked = []

    def no_network(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)  # no git checkout: lm-eval's front end would complain
    run(scorer, byte_tokenizer, folder, tasks=["own", "stock"])
    with pytest.raises(UserError):
        run(scorer, byte_tokenizer, folder, tasks=["hub"])
    assert asked == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def shared():
    folder = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[3] / "shared")).resolve()
    if not (folder / "tasks").is_dir():
        pytest.skip(f"no tasks in {folder}; set SPARSEPACK_SHARED")
    return folder


@pytest.mark.long
def test_every_task_file_of_the_project_runs(scorer, plain_scorer, byte_tokenizer, shared, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPACK_SHARED", str(shared))
    monkeypatch.chdir(tmp_path)
    rows = run(plain_scorer(scorer.model, context=2000), byte_tokenizer, TASKS, tasks=["sp_*"], limit=2)["tasks"]
    assert set(rows) == {
        f"sp_{name}" for name in ("arc_challenge", "arc_easy", "blimp", "hellaswag", "openbookqa", "winogrande")
    }
    assert {name: row["samples"] for name, row in rows.items()} == dict.fromkeys(rows, 2)


def test_winogrande_scores_what_follows_the_gap_after_each_filling(byte_tokenizer, shared, monkeypatch):
    from sparsepack.eval.tasks import load_tasks

    monkeypatch.setenv("SPARSEPACK_SHARED", str(shared))
    task = load_tasks(["sp_winogrande"], TASKS)["tasks"]["sp_winogrande"]
    doc = {"query": "Ann beat Eve so _ won the cup.", "choices": ["Ann", "Eve"], "gold": 0}
    pairs = task.construct_requests(doc, task.fewshot_context(doc, 0), metadata=("t", 0, 1))
    assert [pair.args for pair in pairs] == [
        ("Ann beat Eve so Ann", " won the cup."),
        ("Ann beat Eve so Eve", " won the cup."),
    ]


@pytest.mark.slow
def test_the_real_model_tells_minimal_pairs_apart(plain_scorer, shared, monkeypatch):
    monkeypatch.setenv("SPARSEPACK_SHARED", str(shared))
    source = shared / "models" / "books-26m-silu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    result = run(
        plain_scorer(model, context=8192),
        AutoTokenizer.from_pretrained(source),
        TASKS,
        tasks=["sp_blimp"],
        protocol="dense",
        limit=100,
        batch=32,
    )
    assert 0.60 <= result["tasks"]["sp_blimp"]["metrics"]["acc"]["value"] <= 0.76


def test_documents_are_put_into_the_chat_template(scorer, byte_tokenizer, folder):
    tokenizer = copy.copy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    plain = run(scorer, tokenizer, folder)
    scorer.calls.clear()
    result = run(scorer, tokenizer, folder, apply_chat_template=True)
    assert (plain["apply_chat_template"], result["apply_chat_template"]) == (False, True)
    rows = [(row, length) for ids, lengths, _ in scorer.calls for row, length in zip(ids, lengths, strict=True)]
    seen = [tokenizer.decode(row[:length]) for row, length in rows]
    assert seen
    assert all(text.removeprefix("<s>").startswith("[user]") and "[A]" in text for text in seen)
    with pytest.raises(UserError, match="no chat template"):
        run(scorer, byte_tokenizer, folder, apply_chat_template=True)


@pytest.mark.parametrize("group", [0, 3])
def test_a_filter_that_fails_is_one_line(scorer, byte_tokenizer, folder, group):
    """Without a capture group the whole match counts; a group that no answer has is the file's mistake."""
    (folder / "regex.yaml").write_text(
        f"task: regex\n{OUR_DATA}output_type: generate_until\ntest_split: test\n"
        "doc_to_text: query\ndoc_to_target: gold\n"
        "generation_kwargs: {max_gen_toks: 3, do_sample: false, temperature: 0.0}\n"
        "filter_list:\n  - name: any\n    filter:\n"
        f'      - {{function: regex, regex_pattern: "(?s).+", group_select: {group}}}\n'
        "      - {function: take_first}\n"
        "metric_list:\n  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
    )
    if group:
        with pytest.raises(UserError, match=r"task regex: .* of a filter \(filter_list\) \(IndexError") as caught:
            run(scorer, byte_tokenizer, folder, tasks=["regex"])
        assert "\n" not in str(caught.value)
    else:
        assert "exact_match,any" in run(scorer, byte_tokenizer, folder, tasks=["regex"])["tasks"]["regex"]["metrics"]


def test_a_cache_that_cannot_be_written_is_told_by_that(scorer, byte_tokenizer, folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "file"))
    (folder / "stock.yaml").write_text(
        "task: stock\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}{MULTIPLE_CHOICE}"
    )
    with pytest.raises(UserError, match="set HF_DATASETS_CACHE to a folder that can be"):
        run(scorer, byte_tokenizer, folder, tasks=["stock"])
