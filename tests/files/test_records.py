"""Results as flat records, opened by pandas."""

from pathlib import Path
from typing import Any

import pandas
import pytest

from sparsepack.files.records import records, write_result

SUBJECT = {"name": "m.gguf", "sha256": "ab"}
RESULTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "eval": (
        {
            "subject": SUBJECT,
            "perplexity": [{"text": "a", "perplexity": 3.0, "kl": {"mean": 0.1}}, {"text": "b", "perplexity": 4.0}],
            "tasks": {"limit": None, "tasks": {"arc": {"metrics": {"acc": {"value": 0.5}}, "samples": 10}}},
        },
        3,
        {"table": "perplexity", "subject.name": "m.gguf", "text": "a", "perplexity": 3, "kl.mean": 0.1},
    ),
    "bench": (
        {"runtime": "cpu", "notes": [], "tests": [{"name": "tg8", "tokens_per_second": [1.0, 2.0]}]},
        1,
        {"table": "tests", "runtime": "cpu", "name": "tg8", "tokens_per_second": "[1.0, 2.0]"},
    ),
    "simulate": ({"results": [{"policy": "slow", "hit_rate": {"value": 0.9}}]}, 1, {"hit_rate.value": 0.9}),
    "thresholds": (
        {"sparsity": 0.5, "rows": [{"layer": 0, "site": "mlp_in"}, {"layer": 1, "site": "mlp_in"}]},
        2,
        {"table": "rows", "sparsity": 0.5, "layer": 0, "site": "mlp_in"},
    ),
    "inspect": (
        {"kind": "q4_k", "bits_per_weight": {"file": 4.5}, "loads_in": [{"name": "cpu"}]},
        1,
        {"kind": "q4_k", "bits_per_weight.file": 4.5},
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_pandas_opens_a_result_as_one_table(name: str, tmp_path: Path) -> None:
    result, rows, first = RESULTS[name]
    write_result(tmp_path / "result.jsonl", result)
    frame = pandas.read_json(tmp_path / "result.jsonl", lines=True)
    assert len(frame) == rows
    assert frame.iloc[0][[*first]].to_dict() == first
    assert pandas.DataFrame(records(result)).columns.to_list() == frame.columns.to_list()


def test_another_name_has_the_whole_result(tmp_path: Path) -> None:
    result = RESULTS["inspect"][0]
    write_result(tmp_path / "result.json", result)
    assert pandas.read_json(tmp_path / "result.json", typ="series").to_dict() == result
