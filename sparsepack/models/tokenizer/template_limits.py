"""Limits for Jinja templates of strangers: beside what jinja2's sandbox forbids, time and the size of values.

A template counts the turns of its loops and its calls. Every few of them the processor time of its thread is looked
at, so that a loaded machine refuses no template that another one takes.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0
"""A template has this much processor time for one text; templates of known models take thousandths of a second."""
LARGEST = 1 << 24
"""No product, sum or joined text of a template has more characters, items or bits than this."""

_EVERY = 256
_TURNS, _SIZED = "sparsepack_turns", "sparsepack_sized"


class TooMuch(TemplateError):
    """A template took too long, or made too large a value."""


class _Clock(threading.local):
    """The time until which the template of this thread may run; None where none runs."""

    until: float | None = None
    turns = 0

    def tick(self) -> None:
        """Count a turn of a loop or a call. Raises `TooMuch` where time is up."""
        self.turns += 1
        if self.turns % _EVERY == 0 and self.until is not None and time.thread_time() > self.until:
            raise TooMuch(f"it ran for more than {SECONDS:g} s and was ended")


_clock = _Clock()


@contextmanager
def _timed() -> Iterator[None]:
    before = _clock.until
    _clock.until = before or time.thread_time() + SECONDS  # a template that includes another has one limit
    try:
        yield
    finally:
        _clock.until = before


class _Timed(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _timed():
            return super().render(*args, **kwargs)


class _Limits(SandboxedEnvironment):
    """A sandbox with the limits; made by `limited`."""

    template_class = _Timed
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting(self).visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _clock.tick()
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > LARGEST:
                raise TooMuch(f"it calls something with the number {str(value)[:20]}")
        return _sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _bits(left) * abs(right if isinstance(right, int) else 1) > LARGEST:
            raise TooMuch("it raises a number to a power that is too large")
        if operator == "*" and _size(left) * abs(right if isinstance(right, int) else 1) > LARGEST:
            raise TooMuch("it makes too large a product")
        if operator == "*" and _size(right) * abs(left if isinstance(left, int) else 1) > LARGEST:
            raise TooMuch("it makes too large a product")
        return _sized(super().call_binop(context, operator, left, right))


class _Immutable(_Limits, ImmutableSandboxedEnvironment):
    pass


class _Counting(NodeTransformer):
    """Puts a filter that counts around what a loop goes through, and one that measures around joined text."""

    def __init__(self, environment: SandboxedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)  # its declaration says Node
        node.iter = self._filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._filtered(node, _SIZED)

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made


def limited(like: Any, immutable: bool = True) -> SandboxedEnvironment:
    """A sandbox with the limits that has the settings, filters, tests and names of another environment.

    immutable -- whether its templates may change no list or dictionary
    """
    made = (_Immutable if immutable else _Limits)(
        trim_blocks=like.trim_blocks,
        lstrip_blocks=like.lstrip_blocks,
        keep_trailing_newline=like.keep_trailing_newline,
        undefined=like.undefined,
        loader=like.loader,
        extensions=[type(extension) for extension in like.extensions.values()],
    )
    made.filters |= {**like.filters, _TURNS: _turns, _SIZED: _measured}
    made.tests |= like.tests
    made.globals |= {**like.globals, "range": made.globals["range"]}
    made.globals.pop("lipsum", None)  # which makes as much text as it is asked for
    return made


@pass_context
def _turns(_: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _clock.tick()
        yield value


@pass_context
def _measured(_: Context, value: Any) -> Any:
    return _sized(value)


def _sized(value: Any) -> Any:
    if _size(value) > LARGEST:
        raise TooMuch(f"it makes a value of more than {LARGEST:,} characters or items")
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
