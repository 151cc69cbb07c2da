"""Text for calibration and evaluation: local files, the shipped topics, or a `datasets` name.

A text is named by one of
- a file: `.txt` (one document), or records with a document each, `.jsonl`, `.json`, `.csv`, `.tsv`, these with `.xz`
  or `.gz`, too, or `.parquet`. `PATH:FIELD` names the field of the text; else it is `text`, or the only one with text;
- a folder of such files, or what `save_to_disk` of the `datasets` library has written;
- `shipped:train`, `shipped:heldout`: topics of the language reference, those that the tiny model saw and the others;
- `NAME[:CONFIG[:SPLIT[:FIELD]]]` of the `datasets` library (split `train` and field `text` unless given).

The characters of a text file, in pieces: no file is in memory as a whole.
"""

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from sparsepack.errors import TextError, requires_extra

OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_BYTES = 1 << 20


class TextFile:
    """A file of UTF-8 text, plain or compressed. Iterating over it reads it, each time anew, about 1 MiB at a time.

    Ends of lines become `\\n`, a byte order mark is left out. Raises `TextError` where the file cannot be read, is
    damaged or not UTF-8, and where it is no longer the file that was read first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            with OPENERS.get(self.path.suffix, open)(self.path, "rb") as file:  # type: ignore[operator]
                self.check_unchanged(os.fstat(file.fileno()))
                yield from _decoded(file)
        except UnicodeDecodeError as error:
            raise TextError(f"{self.path}: not UTF-8 text (byte {error.start}); convert it first") from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            if isinstance(error, OSError) and error.strerror:
                raise TextError(f"{self.path}: cannot be read ({error.strerror})") from error
            raise TextError(f"{self.path}: cannot be read ({error}); is it whole?") from error

    def lines(self) -> Iterator[str]:
        """The lines without their ends; of the last one what there is."""
        rest: list[str] = []
        for piece in self:
            first, *others = piece.split("\n")
            rest.append(first)
            for line in others:
                yield "".join(rest)
                rest = [line]
        yield "".join(rest)

    @property
    def blank(self) -> bool:
        """Whether there is nothing but white space in it."""
        return all(not piece.strip() for piece in self)

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise `TextError` where it is no longer the file that was read first."""
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._first not in (None, found):
            raise TextError(f"{self.path}: it changed while it was in use; run again")
        self._first = found


def _decoded(file: io.BufferedIOBase) -> Iterator[str]:
    """UnicodeDecodeError's `start` is the place in the whole file."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    data = file.read(_BYTES)
    before = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    data = data[before:]
    while True:
        waiting = len(utf8.getstate()[0])  # bytes of a character whose end is still to come
        try:
            piece = lines.decode(data, final=not data)
        except UnicodeDecodeError as error:
            error.start += before - waiting
            raise
        if piece:
            yield piece
        if not data:
            return
        before += len(data)
        data = file.read(_BYTES)


_BETWEEN = "\n\n"

Document = str | TextFile
"""A short document is a string; a file that is one document is read in pieces whenever its text is needed."""


@dataclass(frozen=True, eq=False)
class Text:
    """Documents with the name they were asked for by and the hash of their content.

    documents  -- can be gone through again and again; those of files are read anew each time
    count      -- how many they are
    characters -- of the whole text, the blank lines between documents included
    known      -- what has been made of the text so far, for whoever needs it again: see `models.tokenizer.tokens`
    """

    name: str
    documents: Iterable[Document]
    sha256: str
    count: int = 1
    characters: int = 0
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def pieces(self) -> Iterator[str]:
        """The whole text, documents separated by one blank line, in pieces of any length."""
        for number, document in enumerate(self.documents):
            if number:
                yield _BETWEEN
            yield from _pieces(document)

    @property
    def joined(self) -> str:
        """The whole text as one string: for texts that are known to be short."""
        return "".join(self.pieces())


def read_text(names: str | Sequence[str]) -> Text:
    """One or several texts as one. All of it is read once, but a piece at a time, and none of it kept.

    Raises `TextError` for a missing or damaged file, a line without `text`, or a text that is all blank.
    """
    names = [names] if isinstance(names, str) else list(names)
    documents = _Documents([_source(name) for name in names])
    label = ", ".join(names)
    digest, count, characters = hashlib.sha256(), 0, 0
    for document in documents:
        # The length comes first, so a document that is not in memory is gone through twice.
        length = sum(len(piece.encode()) for piece in _pieces(document))
        digest.update(length.to_bytes(8, "little"))
        for piece in _pieces(document):
            digest.update(piece.encode())
            characters += len(piece)
        count += 1
    if not count:
        raise TextError(f"{label}: no text in it; expected at least one document that is not blank")
    return Text(label, documents, digest.hexdigest(), count, characters + (count - 1) * len(_BETWEEN))


def _pieces(document: Document) -> Iterable[str]:
    return (document,) if isinstance(document, str) else document


@dataclass(frozen=True)
class _Documents:
    """The documents of the sources without the blank ones."""

    sources: Sequence[Iterable[Document]]

    def __iter__(self) -> Iterator[Document]:
        for document in itertools.chain.from_iterable(self.sources):
            if isinstance(document, str):
                if document.strip():
                    # JSON can hold halves of a character, which no tokenizer takes: they become U+FFFD.
                    yield document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            elif not document.blank:
                yield document


def _source(name: str) -> Iterable[Document]:
    if name.startswith("shipped:"):
        return _shipped(name)
    if not name.strip():
        raise TextError("a text without a name; expected a file, shipped:train or the like, or a data set")
    path, field = path_and_field(name)
    if path.is_dir():
        return _folder(path, field)
    if path.is_file():
        return _file(path, field)
    if _suffix(path) in TEXT_SUFFIXES or name.startswith((".", "/", "~")):
        raise TextError(f"{name}: no such file; expected a text, or the name of a data set on the hub")
    return _dataset(name)


def path_and_field(name: str) -> tuple[Path, str]:
    """The two of PATH:FIELD, where PATH is there; the field is empty where none was named."""
    path, colon, field = name.rpartition(":")
    return (Path(path), field) if colon and not Path(name).exists() and Path(path).exists() else (Path(name), "")


def _suffix(path: Path) -> str:
    """The kind of a file, that of what is compressed."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def _file(path: Path, field: str) -> Iterable[Document]:
    suffix = _suffix(path)
    if suffix not in TEXT_SUFFIXES or (suffix == PARQUET and suffix != path.suffix):
        raise TextError(
            f"{path}: unknown kind of text file; expected {', '.join(TEXT_SUFFIXES)}, all but the last also with .xz "
            "or .gz"
        )
    if suffix == ".txt":
        if field:
            raise TextError(f"{path}:{field}: a .txt file has no fields; leave {field} out")
        return (TextFile(path),)
    return _Records(TextFile(path), _READERS[suffix], field)


def _folder(path: Path, field: str) -> Iterable[Document]:
    """The documents of the files in a folder, by their names; or of a data set that `save_to_disk` has written."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise TextError(f"{path}: a data set with splits; name one of them: {', '.join(f'{path / s}' for s in splits)}")
    if (path / "dataset_info.json").exists() and (path / "state.json").exists():
        try:
            with requires_extra("datasets", f"{path}: a saved data set"):
                from datasets import load_from_disk
            rows = load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise TextError(f"{path}: cannot be read as a data set ({error}); is it whole?") from error
        field = _field(field, rows.column_names, rows.column_names, path)
        return _Rows(str(path), field, rows[field])
    files = sorted(each for each in path.rglob("*") if each.is_file() and _suffix(each) in TEXT_SUFFIXES)
    if not files:
        raise TextError(f"{path}: a folder without a text; expected files ending in {', '.join(TEXT_SUFFIXES)}")
    return _Documents([_file(each, field) for each in files])


def _field(field: str, columns: Sequence[str], of_text: Sequence[str], where: object) -> str:
    """The column with the text: the one that was named, else `text`, else the only one. Raises `TextError`."""
    if field in columns or (not field and "text" in columns):
        return field or "text"
    if not field and len(of_text) == 1:
        return of_text[0]
    missing = f"no field {field!r}" if field else 'no field "text", and not one other with text alone'
    raise TextError(f"{where}: {missing}; it has {', '.join(map(str, columns))}: name one, as PATH:FIELD")


Row = tuple[str, Any]
"""Where a record stands, and the record."""


@dataclass(frozen=True)
class _Records:
    """The documents of a file of records, each a field of one of them.

    rows  -- reads the records
    field -- the name that was given; empty: `text`, or the only field of the first record that is a string
    """

    file: TextFile
    rows: Callable[[TextFile, str], Iterator[Row]]
    field: str

    def __iter__(self) -> Iterator[str]:
        field, path, chosen = self.field, self.file.path, False
        for place, record in self.rows(self.file, field):
            if isinstance(record, dict) and not chosen:
                texts = [name for name, value in record.items() if isinstance(value, str)]
                field, chosen = _field(field, [*record], texts, f"{path}, {place}"), True
            document = record.get(field) if isinstance(record, dict) else None
            if not isinstance(document, str):
                raise TextError(f'{path}, {place}: expected a JSON object with a string field "{field or "text"}"')
            yield document


def _jsonl_rows(file: TextFile, field: str) -> Iterator[Row]:
    for number, line in enumerate(file.lines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError):
                yield f"line {number}", None


def _json_rows(file: TextFile, field: str) -> Iterator[Row]:
    """A list of objects, or as pandas writes a table: an object with a list, or an object, for each column."""
    try:
        found = json.loads("".join(file))
    except (ValueError, RecursionError):  # one object a line is often called .json, too
        yield from _jsonl_rows(file, field)
        return
    if isinstance(found, dict) and all(isinstance(column, list | dict) for column in found.values()):
        columns = [column.values() if isinstance(column, dict) else column for column in found.values()]
        found = [dict(zip(found, row, strict=False)) for row in zip(*columns, strict=False)]
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        yield f"record {number}", {"text": record} if isinstance(record, str) else record


def _csv_rows(file: TextFile, field: str, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader((f"{line}\n" for line in file.lines()), delimiter=delimiter, strict=True)
    try:
        for record in reader:
            record.pop(None, None)  # type: ignore[call-overload]  # what stands behind the last column
            yield f"line {reader.line_num}", {name: value or "" for name, value in record.items()}
    except csv.Error as error:
        raise TextError(f"{file.path}, line {reader.line_num}: not CSV ({error})") from error


PARQUET = ".parquet"


def _parquet_rows(file: TextFile, field: str) -> Iterator[Row]:
    with requires_extra("datasets", f"{file.path}: a Parquet file"):
        from pyarrow import parquet
    try:
        with open(file.path, "rb") as opened:
            file.check_unchanged(os.fstat(opened.fileno()))
            table = parquet.ParquetFile(opened)
            texts = [column.name for column in table.schema_arrow if str(column.type) in ("string", "large_string")]
            name = _field(field, table.schema_arrow.names, texts, file.path)
            batches = table.iter_batches(batch_size=256, columns=[name])
            documents = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for number, document in enumerate(documents, 1):
                if document is not None:
                    yield f"row {number}", {name: document}
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        raise TextError(f"{file.path}: cannot be read ({str(error)[:200]}); is it whole?") from error


_READERS: Mapping[str, Callable[[TextFile, str], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
    PARQUET: _parquet_rows,
}
TEXT_SUFFIXES = (".txt", *_READERS)


@cache  # to look for copies in them takes most of a second
def _shipped(name: str) -> list[str]:
    from sparsepack.data import topics

    parts = {"shipped:train": topics.training_text, "shipped:heldout": topics.heldout_text}
    if name not in parts:
        raise TextError(f"{name}: no such shipped text; there are {' and '.join(parts)}")
    return parts[name]()


def _dataset(name: str) -> "_Rows":
    with requires_extra("datasets", f"{name}: no local file; a data set of the hub"):
        import datasets

    given = name.split(":")
    repository, config, split, column = given + [""] * (4 - len(given)) if len(given) < 5 else (name, "", "", "")
    split, column = split or "train", column or "text"
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # the library raises many kinds; all mean that the name leads nowhere from here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise TextError(f"{name}: neither a local file nor a data set that can be reached ({reason})") from error
    if column not in rows.column_names:
        raise TextError(f"{name}: no field {column!r}; the data set has {', '.join(rows.column_names)}")
    return _Rows(name, column, rows[column])


@dataclass(frozen=True)
class _Rows:
    """The documents of a data set: a column that lies on disk, read a few rows at a time."""

    name: str
    field: str
    column: Iterable[Any]

    def __iter__(self) -> Iterator[str]:
        for document in self.column:
            if document is None:
                continue
            if not isinstance(document, str):
                raise TextError(
                    f"{self.name}: the field {self.field!r} does not hold strings; "
                    "name another: NAME:CONFIG:SPLIT:FIELD"
                )
            yield document
