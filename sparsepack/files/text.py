"""Text for calibration and evaluation: local files, the shipped topics, or a `datasets` name.

A text is named by one of
- a file: `.txt` (one document) or `.jsonl` (one document a line, field `text`), either with `.xz` or `.gz`;
- `shipped:train`, `shipped:heldout`: topics of the language reference, those that the tiny model saw and the others;
- `NAME[:CONFIG[:SPLIT[:FIELD]]]` of the `datasets` library (split `train` and field `text` unless given).
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsepack.errors import TextError

_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True)
class Text:
    """Documents with the name they were asked for by and the hash of their content."""

    name: str
    documents: tuple[str, ...]
    sha256: str

    @property
    def joined(self) -> str:
        """The whole text: documents separated by one blank line."""
        return "\n\n".join(self.documents)


def read_text(names: str | Sequence[str]) -> Text:
    """Read one or several texts as one.

    Raises `TextError` for a missing or damaged file, a line without `text`, or a text that is all blank.
    """
    names = [names] if isinstance(names, str) else list(names)
    documents: list[str] = []
    for name in names:
        documents += _documents(name)
    documents = [_without_surrogates(document) for document in documents if document.strip()]
    label = ", ".join(names)
    if not documents:
        raise TextError(f"{label}: no text in it; expected at least one document that is not blank")
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return Text(label, tuple(documents), digest.hexdigest())


def _without_surrogates(document: str) -> str:
    """JSON can hold halves of a character, which no tokenizer takes: they become U+FFFD."""
    return document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _documents(name: str) -> list[str]:
    if name.startswith("shipped:"):
        return _shipped(name)
    if not name.strip():
        raise TextError("a text without a name; expected a file, shipped:train or the like, or a data set")
    path = Path(name)
    plain = path.with_suffix("") if path.suffix in _OPENERS else path
    if path.is_dir():
        raise TextError(f"{name}: a folder; expected a file ending in .txt or .jsonl, or those with .xz or .gz")
    if path.is_file():
        if plain.suffix not in _SUFFIXES:
            raise TextError(f"{name}: unknown kind of text file; expected .txt or .jsonl, or those with .xz or .gz")
        return _read_file(path, lines=plain.suffix == ".jsonl")
    if plain.suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        raise TextError(f"{name}: no such file")
    return _read_dataset(name)


def _read_file(path: Path, lines: bool) -> list[str]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:  # type: ignore[operator]
            content = file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise TextError(f"{path}: cannot be read ({error.strerror})") from error
        raise TextError(f"{path}: cannot be read ({error}); is it whole?") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error
    if not lines:
        return [content]
    documents = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            document = None
        if not isinstance(document, str):
            raise TextError(f'{path}, line {number}: expected a JSON object with a string field "text"')
        documents.append(document)
    return documents


def _shipped(name: str) -> list[str]:
    from sparsepack.data import topics

    parts = {"shipped:train": topics.training_text, "shipped:heldout": topics.heldout_text}
    if name not in parts:
        raise TextError(f"{name}: no such shipped text; there are {' and '.join(parts)}")
    return list(parts[name]())


def _read_dataset(name: str) -> list[str]:
    import datasets

    given = name.split(":")
    repository, config, split, field = given + [""] * (4 - len(given)) if len(given) < 5 else (name, "", "", "")
    split, field = split or "train", field or "text"
    try:
        rows = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # the library raises many kinds; all mean that the name leads nowhere from here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise TextError(f"{name}: neither a local file nor a data set that can be reached ({reason})") from error
    if field not in rows.column_names:
        raise TextError(f"{name}: no field {field!r}; the data set has {', '.join(rows.column_names)}")
    documents = [row for row in rows[field] if row is not None]
    if not all(isinstance(document, str) for document in documents):
        raise TextError(f"{name}: the field {field!r} does not hold strings; name another: NAME:CONFIG:SPLIT:FIELD")
    return documents
