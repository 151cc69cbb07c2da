"""Local task data: which file is read, from where, and in which order."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from sparsepack.errors import UserError
from sparsepack.eval.task_data import jsonl, spread

DOCUMENTS = [{"query": f"q{i}", "choices": ["a", "b"], "gold": i % 2} for i in range(10)]
LINES = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)


def read(file: str, folder: Path) -> list[dict]:
    return list(jsonl(file=file, config_source=str(folder / "task.yaml"), version=1.0)["test"])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 50, 67_000])
def test_spread_is_a_permutation(count):
    assert sorted(spread(count)) == list(range(count))


def test_every_beginning_of_a_spread_visits_all_parts_in_proportion():
    parts = [index // 1000 for index in spread(67_000)]
    for limit in (67 * 2, 500, 2000):
        counts = [parts[:limit].count(part) for part in range(67)]
        assert min(counts) >= limit // 67 - 1
        assert max(counts) <= limit // 67 + 2


@pytest.mark.parametrize(("name", "opener"), [("d.jsonl", open), ("d.jsonl.xz", lzma.open), ("d.jsonl.gz", gzip.open)])
def test_plain_and_compressed_files_load_the_same(tmp_path, name, opener):
    with opener(tmp_path / name, "wt") as file:
        file.write(LINES)
    assert read(name, tmp_path) == [DOCUMENTS[index] for index in spread(10)]


def test_a_relative_path_is_beside_the_yaml_file_before_the_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "tasks", tmp_path / "elsewhere"
    for folder, query in ((here, "beside"), (there, "cwd")):
        folder.mkdir()
        (folder / "d.jsonl").write_text(json.dumps({"query": query}))
    monkeypatch.chdir(there)
    assert read("d.jsonl", here)[0]["query"] == "beside"
    (here / "d.jsonl").unlink()
    assert read("d.jsonl", here)[0]["query"] == "cwd"


def test_the_environment_names_the_folder_and_the_default_stands_in(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text(LINES)
    file = "${SP_TEST_DATA:-../nowhere}/d.jsonl"
    monkeypatch.setenv("SP_TEST_DATA", str(tmp_path))
    assert len(read(file, tmp_path / "tasks")) == 10
    monkeypatch.delenv("SP_TEST_DATA")
    with pytest.raises(UserError, match=r"nowhere.*set SP_TEST_DATA or correct"):
        read(file, tmp_path / "tasks")
    with pytest.raises(UserError, match="SP_TEST_DATA is not set"):
        read("${SP_TEST_DATA}/d.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("", "no document in it"), (LINES + "{oops\n", "line 11 cannot be read")]
)
def test_a_file_that_is_not_json_lines_is_refused(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read("d.jsonl", tmp_path)
