"""English that every Python carries beside its manual: the docstrings of its standard library."""

import ast
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparsepack.data.topics import clean_paragraphs, heldout_text, training_text, without_copies, word_runs

NOT_LIBRARY = frozenset({"dist-packages", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test", "tests"})


def docstrings() -> list[str]:
    """The standard library's docstrings, a document per module, without what the topics have too."""
    root = Path(sysconfig.get_paths()["stdlib"])
    avoid = word_runs("\n\n".join(heldout_text() + training_text()).split("\n\n"))
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
            document = "\n\n".join(without_copies(_module_paragraphs(path), avoid, seen))
            if len(document) > 200:
                documents.append(document)
    return documents


def _module_paragraphs(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [paragraph for text in texts for paragraph in clean_paragraphs(text)]
