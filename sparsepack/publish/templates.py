"""The templates of this folder, filled in. What comes from a manifest is data, as a stranger may have written it: in
HTML it is escaped; in Markdown it becomes code wherever it could be anything but plain words."""

import json
import re
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsepack.tables import Table, markdown
from sparsepack.terminal import printable

_PLAIN = re.compile(r"(?!.*(://|www\.))[\w ,;:/%=()+±'.-]*", re.IGNORECASE)
"""Words of which no Markdown makes a link, a picture, HTML or emphasis; no address of a page or of mail is one."""


def render(template: str, **values: Any) -> str:
    """A template with these values: HTML by its name, else Markdown. `Markup` stands as it is.

    Raises `jinja2.UndefinedError` for a value that is missing.
    """
    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=PackageLoader("sparsepack.publish", "."),
        autoescape=html,
        finalize=None if html else _as_data,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": code, "shell": shell, "python": _python}
    return environment.get_template(template).render(**values)


def words(text: str) -> str:
    """A stranger's words for Markdown, in one line: as they are where they are plain, else as code."""
    line = _line(text)
    return line if _PLAIN.fullmatch(line) else str(code(line))


def code(text: Any) -> Markup:
    """A stranger's words as code within a line of Markdown, a cell of a table too: nothing in them counts."""
    line = _line(str(text)).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return Markup(f"{fence}{space}{line}{space}{fence}")


def shell(text: Any) -> Markup:
    """A stranger's words as one word of a command line that somebody may copy."""
    return Markup(shlex.quote(_line(str(text))))


def table(drawn: Table) -> Markup:
    """A table in Markdown whose cells may hold a stranger's words, as may what stands above and below it."""
    notes = ["\n".join(map(words, note.splitlines())) for note in drawn.notes]
    return Markup(markdown(Table(drawn.columns, drawn.rows, words(drawn.title), notes), cell=words))


def _python(text: Any) -> Markup:
    """A stranger's words as a string of a Python program that somebody may copy."""
    return Markup(json.dumps(_line(str(text)), ensure_ascii=False))


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _as_data(value: Any) -> Any:
    return Markup(words(value)) if isinstance(value, str) and not isinstance(value, Markup) else value
