"""Texts by every kind of name, and each way in which one can be unusable."""

import gzip
import hashlib
import json
import lzma
import sys

import datasets
import pandas
import pytest

from sparsepack.errors import TextError, UserError
from sparsepack.files.text import read_text

ROWS = '{"title": "a", "text": "One."}\n\n{"text": "Zwei ü."}\n{"text": "  "}\n'


def written(path, content):
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(content)
    return path


def documents(name) -> tuple[str, ...]:
    return tuple(document if isinstance(document, str) else "".join(document) for document in read_text(name).documents)


def one_line(path) -> str:
    with pytest.raises(TextError) as caught:
        read_text(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("end", ["", ".xz", ".gz"])
def test_a_txt_is_one_document_and_a_jsonl_one_a_line(tmp_path, end):
    assert documents(str(written(tmp_path / f"a.txt{end}", "One.\n\nTwo."))) == ("One.\n\nTwo.",)
    assert documents(str(written(tmp_path / f"a.jsonl{end}", ROWS))) == ("One.", "Zwei ü.")


TABLE = {"id": [1, 2, 3], "body": ["One, \n2.", None, 'Zwei "ü".'], "url": ["a", "b", "c"]}


@pytest.fixture(params=["csv", "tsv", "csv.gz", "json", "records.json", "lines.json", "jsonl.xz", "parquet", "saved"])
def table(request, tmp_path):
    """A table in each of the ways in which people keep one."""
    path, frame = tmp_path / f"table.{request.param}", pandas.DataFrame(TABLE).fillna("")
    if ".csv" in path.name or ".tsv" in path.name:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    elif request.param == "parquet":
        pandas.DataFrame(TABLE).to_parquet(path)
    elif request.param == "saved":
        datasets.Dataset.from_dict(TABLE).save_to_disk(path)
    elif request.param == "json":
        frame.to_json(path)
    else:
        frame.to_json(path, orient="records", lines="records" not in request.param)
    return path


def test_a_table_of_any_kind_is_read_by_the_field_that_is_named(table):
    assert documents(f"{table}:body") == ("One, \n2.", 'Zwei "ü".')
    for name in (f"{table}:none", table):
        assert "it has id, body, url: name one, as PATH:FIELD" in one_line(name)


def test_the_only_field_with_text_need_not_be_named(tmp_path):
    frame = pandas.DataFrame({"id": [1, 2], "body": ["One.", "Two."]})
    frame.to_parquet(tmp_path / "a.parquet")
    frame[["body"]].to_csv(tmp_path / "b.csv", index=False)
    (tmp_path / "deep").mkdir()
    frame.to_json(tmp_path / "deep" / "c.json", orient="records")
    (tmp_path / "notes.md").write_text("no text")
    text = read_text(str(tmp_path))
    assert [*text.documents] == ["One.", "Two."] * 3 == [*text.documents]


def test_a_saved_data_set_with_splits_is_read_by_one_of_them(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["One."]})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    assert f"name one of them: {tmp_path / 'saved' / 'test'}, " in one_line(tmp_path / "saved")
    assert documents(str(tmp_path / "saved" / "train")) == ("One.",)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    pandas.DataFrame({"text": ["One."]}).to_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.delattr("pyarrow.parquet", raising=False)
    with pytest.raises(UserError, match=r"a Parquet file needs pyarrow.* pip install 'sparsepack\[datasets\]'"):
        read_text(str(tmp_path / "a.parquet"))


def test_a_quote_that_does_not_end_is_refused(tmp_path):
    assert "not CSV (unexpected end of data)" in one_line(written(tmp_path / "a.csv", 'text\n"One.\n'))


def test_several_texts_are_read_as_one(tmp_path):
    one, other = written(tmp_path / "a.txt", "One."), written(tmp_path / "b.jsonl", ROWS)
    both = read_text([str(one), str(other)])
    assert both.joined == "One.\n\nOne.\n\nZwei ü."
    assert both.name == f"{one}, {other}"


def test_the_hash_is_of_the_documents_whatever_file_they_came_in(tmp_path):
    plain = read_text(str(written(tmp_path / "a.jsonl", ROWS)))
    assert read_text(str(written(tmp_path / "b.jsonl.xz", ROWS))).sha256 == plain.sha256
    moved = '{"text": "One.Z"}\n{"text": "wei ü."}\n'
    assert read_text(str(written(tmp_path / "c.jsonl", moved))).sha256 != plain.sha256


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(ROWS, encoding="utf-8-sig")
    assert documents(str(path)) == ("One.", "Zwei ü.")


@pytest.mark.parametrize(
    "line", ['{"txt": "no such field"}', '{"text": 3}', '["text"]', "not json", '{"text": "open', "[" * 100_000]
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    message = one_line(written(tmp_path / "a.jsonl", f'{{"text": "good"}}\n\n{line}\n'))
    assert f"{tmp_path / 'a.jsonl'}, line 3" in message
    assert '"text"' in message


@pytest.mark.parametrize("end", [".xz", ".gz"])
def test_a_truncated_archive_is_refused(tmp_path, end):
    path = written(tmp_path / f"a.txt{end}", "word " * 10_000)
    path.write_bytes(path.read_bytes()[:-20])
    assert "is it whole?" in one_line(path)


@pytest.mark.parametrize("end", [".xz", ".gz"])
def test_a_damaged_archive_is_refused(tmp_path, end):
    path = written(tmp_path / f"a.txt{end}", "".join(f"{n * n} " for n in range(20_000)))
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(range(100, 240))
    path.write_bytes(data)
    assert "cannot be read" in one_line(path)


@pytest.mark.parametrize("content", ["", " \n\t\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_blank_text_is_refused(tmp_path, name, content):
    assert "not blank" in one_line(written(tmp_path / name, content))


def test_what_is_no_text_file_is_refused(tmp_path):
    assert "a folder without a text" in one_line(tmp_path)
    assert "expected .txt, .jsonl" in one_line(written(tmp_path / "a.pdf", "x"))
    assert "expected .txt, .jsonl" in one_line(written(tmp_path / "a.xz", "x"))
    assert "is it whole?" in one_line(written(tmp_path / "a.parquet", "x"))
    assert "a .txt file has no fields" in one_line(f"{written(tmp_path / 'a.txt', 'x')}:body")
    assert "no such file" in one_line(tmp_path / "none.txt.xz")
    assert "no such file" in one_line(tmp_path / "none")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8 text (byte 3)" in one_line(tmp_path / "a.txt")


def test_shipped_texts_are_read_by_name_and_share_no_document():
    train, heldout = read_text("shipped:train"), read_text("shipped:heldout")
    assert len(train.joined) > len(heldout.joined) > 10_000
    assert not set(train.documents) & set(heldout.documents)
    assert "shipped:train" in one_line("shipped:nothing")


def test_a_data_set_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "neither a local file nor a data set" in one_line("no-such-org/no-such-set:config:test")
    assert "neither a local file nor a data set" in one_line("a:b:c:d:e")


class _Rows(dict):
    @property
    def column_names(self):
        return list(self)


def test_a_data_set_is_named_by_config_split_and_field(monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return _Rows(body=["One.", None, "Two."], number=[1, 2, 3])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert documents("set:small:test:body") == ("One.", "Two.")
    assert asked == [("set", "small", "test")]
    assert "no field 'text'; the data set has body, number" in one_line("set")
    assert asked[1] == ("set", None, "train")
    assert "does not hold strings" in one_line("set:::number")


def test_half_a_character_in_json_is_replaced_and_whole_ones_stay(tmp_path):
    path = written(tmp_path / "a.jsonl", json.dumps({"text": "a\ud800b \U0001f600"}))
    assert documents(str(path)) == ("a\ufffdb \U0001f600",)


MIXED = "\ufeffÜber — „naïve“\r\nline\rlast 😀\n" + "ein Wort " * 400_000


@pytest.mark.parametrize("end", ["", ".xz", ".gz"])
def test_a_long_file_comes_in_pieces_that_are_its_whole_text(tmp_path, end):
    path = tmp_path / f"a.txt{end}"
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(end, open)
    with opener(path, "wb") as file:
        file.write(MIXED.encode())
    text = read_text(str(path))
    pieces = list(text.pieces())
    expected = MIXED[1:].replace("\r\n", "\n").replace("\r", "\n")
    assert len(pieces) > 3
    assert max(map(len, pieces)) <= 1 << 20
    assert "".join(pieces) == expected == text.joined
    assert text.characters == len(expected)
    data = expected.encode()
    assert text.sha256 == hashlib.sha256(len(data).to_bytes(8, "little") + data).hexdigest()


def test_a_character_between_two_reads_is_whole_and_a_wrong_byte_named_by_its_place_in_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "ü".encode() + b"b" * 10)
    assert read_text(str(path)).joined == "a" * ((1 << 20) - 1) + "ü" + "b" * 10
    path.write_bytes(b"\xef\xbb\xbf" + b"a" * (3 << 20) + b"\xc3\xc3")
    assert f"not UTF-8 text (byte {3 + (3 << 20)})" in one_line(path)
    path.write_bytes(b"a" * ((1 << 20) - 1) + b"\xc3")
    assert f"not UTF-8 text (byte {(1 << 20) - 1})" in one_line(path)


def test_a_line_longer_than_a_read_is_one_document(tmp_path):
    long = "wort " * 500_000
    path = written(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": t}) for t in ("One.", long, "Two.")))
    assert documents(str(path)) == ("One.", long, "Two.")


def test_a_file_that_changes_while_it_is_in_use_is_refused(tmp_path):
    text = read_text(str(written(tmp_path / "a.txt", "One.")))
    written(tmp_path / "a.txt", "Another one.")
    with pytest.raises(TextError, match=r"a\.txt: it changed while it was in use"):
        list(text.pieces())
