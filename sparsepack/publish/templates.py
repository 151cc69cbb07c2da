"""The templates of this folder, filled in; what comes from a manifest is escaped, as a stranger may have written it."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsepack.tables import in_a_line


def render(template: str, **values: Any) -> str:
    """A template with these values: HTML by its name, else Markdown. `Markup` stands as it is.

    Raises `jinja2.UndefinedError` for a value that is missing.
    """
    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=PackageLoader("sparsepack.publish", "."),
        autoescape=html,
        finalize=None if html else _in_a_line,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _in_a_line(value: Any) -> Any:
    """Text that ends no line and no cell of a Markdown table, and opens no HTML."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return in_a_line(value)
