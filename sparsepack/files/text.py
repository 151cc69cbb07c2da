"""Text for calibration and evaluation: local files, the shipped topics, or a `datasets` name.

A text is named by one of
- a file: `.txt` (one document) or `.jsonl` (one document a line, field `text`), either with `.xz` or `.gz`;
- `shipped:train`, `shipped:heldout`: topics of the language reference, those that the tiny model saw and the others;
- `NAME[:CONFIG[:SPLIT[:FIELD]]]` of the `datasets` library (split `train` and field `text` unless given).

The characters of a text file, in pieces: no file is in memory as a whole.
"""

import codecs
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
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
                self._check_unchanged(os.fstat(file.fileno()))
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

    def _check_unchanged(self, status: os.stat_result) -> None:
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


_SUFFIXES = (".txt", ".jsonl")
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
    path = Path(name)
    plain = path.with_suffix("") if path.suffix in OPENERS else path
    if path.is_dir():
        raise TextError(f"{name}: a folder; expected a file ending in .txt or .jsonl, or those with .xz or .gz")
    if path.is_file():
        if plain.suffix not in _SUFFIXES:
            raise TextError(f"{name}: unknown kind of text file; expected .txt or .jsonl, or those with .xz or .gz")
        file = TextFile(path)
        return _Lines(file) if plain.suffix == ".jsonl" else (file,)
    if plain.suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        raise TextError(f"{name}: no such file; expected a text, or the name of a data set on the hub")
    return _dataset(name)


@dataclass(frozen=True)
class _Lines:
    """The documents of a `.jsonl` file."""

    file: TextFile

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self.file.lines(), 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                document = None
            if not isinstance(document, str):
                raise TextError(f'{self.file.path}, line {number}: expected a JSON object with a string field "text"')
            yield document


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
