"""English text that comes with every Python: the language reference in `pydoc_data.topics`, in two parts.

The split is by topic name. Topics repeat each other (`try` is a section of `compound`), so names alone would not
keep the parts apart: each paragraph is used once, and a training paragraph that shares `SHARED_WORDS` consecutive
words with a held-out topic is dropped. That holds for whatever the running Python's topics say; topics that a newer
Python adds are training text.
"""

import re
from collections.abc import Iterable
from pydoc_data.topics import topics

HELD_OUT_TOPICS = frozenset(
    {
        "comparisons",
        "dynamic-features",
        "exceptions",
        "execmodel",
        "import",
        "in",
        "naming",
        "typesmapping",
    }
)
"""The held-out topics are about an eighth of the text, of three kinds: concepts, expressions and statements, a built-in
type."""

SHARED_WORDS = 10
"""Two paragraphs with this many consecutive words in common count as copies of each other."""

_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "-", "–": "-", "…": "...", "\u00a0": " "})
_RULER = re.compile(r"[-=*~^\"#+|_ ]{3,}|-\[ .* \]-")
_TABLE = re.compile(r"\s*[+|]")
_WRAPPED_AT = 52  # a line of prose that is not its paragraph's last is at least this long
_SHORTEST_DOCUMENT = 200


def training_text() -> list[str]:
    """The training documents, one per topic, longest topic first; nothing in them is also in a held-out topic."""
    seen = word_runs(paragraph for document in heldout_text() for paragraph in document.split("\n\n"))
    names = [name for name in topics if name not in HELD_OUT_TOPICS]
    return _documents(names, avoid=seen)


def heldout_text() -> list[str]:
    """The held-out documents, one per topic of `HELD_OUT_TOPICS`, longest topic first."""
    return _documents([name for name in topics if name in HELD_OUT_TOPICS], avoid=set())


def clean_paragraphs(text: str) -> list[str]:
    """The paragraphs of `text` in plain ASCII punctuation, without rulers, tables and grammar productions.

    Prose is joined into one line; code keeps its lines, less the indentation they all share.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.translate(_ASCII).expandtabs(4)):
        lines = [line.rstrip() for line in block.split("\n") if line.strip() and not _RULER.fullmatch(line.strip())]
        if not lines or "::=" in block or any(_TABLE.match(line) for line in lines):
            continue
        paragraphs.append(_unwrap(lines) if _is_prose(lines) else _dedent(lines))
    return paragraphs


def word_runs(paragraphs: Iterable[str]) -> set[tuple[str, ...]]:
    """Every run of `SHARED_WORDS` consecutive words of each paragraph, in lower case, punctuation left out."""
    runs: set[tuple[str, ...]] = set()
    for paragraph in paragraphs:
        words = re.findall(r"\w+", paragraph.lower())
        runs.update(tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))
    return runs


def without_copies(paragraphs: Iterable[str], avoid: set[tuple[str, ...]], seen: set[str] | None = None) -> list[str]:
    """The paragraphs that share no run of words with `avoid` and are not in `seen`, to which they are added."""
    seen = set() if seen is None else seen
    kept = []
    for paragraph in paragraphs:
        if paragraph in seen or not avoid.isdisjoint(word_runs([paragraph])):
            continue
        seen.add(paragraph)
        kept.append(paragraph)
    return kept


def _documents(names: list[str], avoid: set[tuple[str, ...]]) -> list[str]:
    seen: set[str] = set()
    documents = []
    for name in sorted(names, key=lambda name: (-len(topics[name]), name)):
        document = "\n\n".join(without_copies(clean_paragraphs(topics[name]), avoid, seen))
        if len(document) >= _SHORTEST_DOCUMENT:
            documents.append(document)
    return documents


def _is_prose(lines: list[str]) -> bool:
    if lines[0].lstrip().startswith(">>>"):
        return False
    return all(len(line) >= _WRAPPED_AT for line in lines[:-1])


def _unwrap(lines: list[str]) -> str:
    joined = lines[0].strip()
    for line in lines[1:]:
        hyphenated = re.search(r"[a-z]-$", joined)
        joined += ("" if hyphenated else " ") + line.strip()
    return re.sub(r" {2,}", " ", joined)


def _dedent(lines: list[str]) -> str:
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:] for line in lines)
