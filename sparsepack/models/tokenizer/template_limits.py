"""Limits for Jinja templates of strangers: beside what jinja2's sandbox forbids, time and the size of values.

A template counts the turns of its loops, its filters and its calls. Every few of them the processor time of its thread
is looked at, so that a loaded machine refuses no template that another one takes.
"""

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sparsepack.models.tokenizer.template_sizes import (
    TooMuch,
    check_braces,
    check_call,
    check_percent,
    check_power,
    check_product,
    counted,
    joined,
)
from sparsepack.models.tokenizer.template_sizes import sized as within_limit

__all__ = ["SECONDS", "TooMuch", "limited"]

SECONDS = 5.0
"""A template has this much processor time for one text; templates of known models take thousandths of a second."""

MOST_MADE = 1 << 28
"""The texts and lists that a template makes for one text have at most this many characters and items together: each may
be kept in a variable of its own."""

_EVERY = 16
_TURNS, _SIZED = "sparsepack_turns", "sparsepack_sized"


class _Clock(threading.local):
    """The time until which the template of this thread may run, None where none runs; and what it has made."""

    until: float | None = None
    turns = made = 0

    def tick(self) -> None:
        """Count a turn of a loop or a call. Raises `TooMuch` where time is up."""
        self.turns += 1
        if self.turns % _EVERY == 0 and self.until is not None and time.thread_time() > self.until:
            raise TooMuch(f"it ran for more than {SECONDS:g} s and was ended")

    def make(self, size: int) -> None:
        """Count a value of so many characters or items. Raises `TooMuch` where all are too many."""
        self.made += size if self.until is not None else 0
        if self.made > MOST_MADE:
            raise TooMuch(f"it makes texts and lists of more than {MOST_MADE:,} characters and items together")


_clock = _Clock()


@contextmanager
def _timed() -> Iterator[None]:
    before = _clock.until
    if before is None:  # a template that includes another has one limit
        _clock.until, _clock.made = time.thread_time() + SECONDS, 0
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

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        return str(sized(joined(_turns(None, pieces))))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _clock.tick()
        method = inspect.unwrap(obj)  # the sandbox wraps a text's `format`
        name, of = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        check_call(name, (of, *args), kwargs)
        if name in ("format", "format_map"):
            check_braces(of)
        return sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            check_power(left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "%":
            check_percent(left)
        return sized(super().call_binop(context, operator, left, right))


class _Immutable(_Limits, ImmutableSandboxedEnvironment):
    pass


class _Counting(NodeTransformer):
    """Puts a filter that counts around what a loop goes through, and one that measures around joined text and around
    what is put together of other values."""

    def __init__(self, environment: SandboxedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)  # its declaration says Node
        node.iter = self._filtered(node.iter, _TURNS)
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._filtered(node, _SIZED)

    visit_List = visit_Dict = visit_Concat

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self.visit_Concat(node) if node.ctx == "load" else node

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
    made.filters = {name: _limited(name, each) for name, each in {**made.filters, **like.filters}.items()}
    made.filters |= {_TURNS: _turns, _SIZED: _measured}
    made.tests |= like.tests
    made.globals |= {**like.globals, "range": made.globals["range"]}
    made.globals.pop("lipsum", None)  # which makes as much text as it is asked for
    return made


def sized(value: Any) -> Any:
    """The value, counted. Raises `TooMuch` where it is too large, alone or with those before it."""
    if isinstance(value, str | bytes | list | tuple):  # what is in a list was counted when it was made
        _clock.make(len(value))
    return within_limit(value)


@pass_context
def _turns(_: Context | None, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _clock.tick()
        yield value


@pass_context
def _measured(_: Context, value: Any) -> Any:
    return sized(value)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits; what makes its items one by one is counted as it does."""

    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        _clock.tick()
        values = [_one_by_one(each) for each in args]
        given = [each for each in values if not isinstance(each, _CONTEXTS)]
        check_call(name, given, kwargs)
        if name == "format":
            check_percent(given[0])
        return sized(_one_by_one(function(*values, **kwargs)))

    return within


_CONTEXTS = (Context, EvalContext, Environment)
"""What jinja2 hands to some filters before the value."""


def _one_by_one(value: Any) -> Any:
    return counted(_turns(None, value)) if isinstance(value, Iterator) else value
