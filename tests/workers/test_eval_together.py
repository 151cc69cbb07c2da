"""Several processes evaluate together: the figures of one, to the last digit."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from calibrated_models import small, small_calibration, text
from forks_for_tests import on_devices
from linked import together
from task_files import MULTIPLE_CHOICE, OUR_DATA

from sparsepack.calibrate.find_thresholds import make_thresholds
from sparsepack.calibrate.folder import Calibration, save
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import WorkersError
from sparsepack.eval import lm_eval_model
from sparsepack.eval.lm_eval_model import SparseLM
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.workers.shard import Shard

__all__ = ["on_devices", "small", "small_calibration", "text"]

GENERATION = """
output_type: generate_until
test_split: test
doc_to_text: query
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: true, temperature: 1.0}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def given(small: Checkpoint, small_calibration: Calibration, text: Text, tmp_path_factory) -> Path:
    """A folder with a text, thresholds and tasks."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text.txt").write_text("".join(text.documents))
    save(small_calibration, folder / "c")
    make_thresholds(small, folder / "c", AllocationOptions(sparsity=0.5, allocation="uniform"), folder / "t.json")
    (folder / "tasks").mkdir()
    rows = [
        {"query": "and so " * number, "choices": ["x" * (number % 3 + 1), "y z"], "gold": number % 2}
        for number in range(1, 12)
    ]
    (folder / "tasks" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / "own.yaml").write_text(f"task: own\n{OUR_DATA}{MULTIPLE_CHOICE}")
    (folder / "tasks" / "said.yaml").write_text(f"task: said\n{OUR_DATA}{GENERATION}")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("count", "protocol", "batch"), [(2, "decode", 1), (3, "all", 2)])
def test_devices_find_the_figures_of_one(
    small: Checkpoint,
    given: Path,
    tmp_path: Path,
    count: int,
    protocol: str,
    batch: int,
    on_devices: Callable[..., str],
) -> None:
    asked = ["--perplexity", str(given / "text.txt"), "--context", "64", "--windows", "7", "--protocol", protocol]
    asked += ["--against", str(small.path), "--thresholds", str(given / "t.json"), "--batch", str(batch)]
    asked += ["--tasks", "own,said", "--task-path", str(given / "tasks")]
    request = EvalRequest(
        str(small.path),
        thresholds=given / "t.json",
        perplexity=(str(given / "text.txt"),),
        context=64,
        windows=7,
        protocol=protocol,
        against=str(small.path),
        batch=batch,
        tasks=("own", "said"),
        task_path=given / "tasks",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has
    try:
        alone = evaluate(request)
    finally:
        torch.set_num_threads(threads)
    command = ["eval", str(small.path), *asked, "--json", str(tmp_path / "e.json")]
    on_devices(count, *command)
    found = json.loads((tmp_path / "e.json").read_text())
    assert found == json.loads(json.dumps(alone))
    assert 0.1 < found["perplexity"][0]["realised_sparsity"]["overall"] < 0.9
    assert found["tasks"]["tasks"]["own"]["samples"] == 11


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"windows": 1}, "2 workers for 1 batches of 1 windows"),
        ({"runtime": "cpu"}, "--backend cpu: measured in one process"),
    ],
)
def test_what_workers_cannot_share_is_refused(small: Checkpoint, given: Path, asked: dict, line: str) -> None:
    request = EvalRequest(str(small.path), perplexity=(str(given / "text.txt"),), context=64, **asked)
    with pytest.raises(WorkersError, match=line):
        evaluate(request, shard=Shard(0, 2))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_progress_over_requests_ends_with_their_number(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def told(label: str, total: int) -> Iterator[Callable[[int], None]]:
        yield advanced[threading.get_ident()].append

    def work(shard: Shard) -> tuple[dict[int, int], int]:
        lm = SparseLM.__new__(SparseLM)
        lm.each, lm.batch_size = shard.each, 2
        found = lm._answers([*range(11)], lambda batch: {item: -item for item in batch}, "scoring", [])
        return found, sum(advanced[threading.get_ident()])

    monkeypatch.setattr(lm_eval_model, "progress", told)
    answers, shown = zip(*together(count, work), strict=True)
    assert answers == ({item: -item for item in range(11)},) * count
    assert shown[0] == 11
    assert max(shown) == 11
