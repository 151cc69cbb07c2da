"""Texts that keep to a JSON schema or a grammar: which tokens may come next, by llguidance."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError, decoding_json
from sparsepack.models.tokenizer.tokenizer import check_tokenizer
from sparsepack.option import LARGEST_COUNT
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tools import ToolFormat

WHITESPACE = r"[ \n\r\t]{0,20}"
"""So much may stand between two parts of JSON: a model that is fond of spaces would otherwise never go on."""

LARGEST_DIVISOR = 10_000
"""The numbers that `multipleOf` names in a schema have at most this least common multiple, powers of ten left out.
llguidance makes a state for each remainder, without a limit of its own: 999,983 takes seconds, and ten times that
minutes."""

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters, by OpenAI's reference."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose value has a schema for each of some names, which are no keywords."""

DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema whose value is no schema."""

Function = tuple[str, Mapping[str, Any] | None]
"""A function's name, and the JSON schema of its arguments; None or empty: it has none."""


class GrammarConstraint:
    """What a text may still be, by a matcher of its own; see `runtime.generation.sampling.Constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Tensor:
        """bool [vocabulary]. Raises `UserError` where the grammar is too complex to tell."""
        with _llguidance_errors(UserError):
            mask = self._matcher.compute_logit_bias()
        self._check()
        return torch.frombuffer(bytearray(mask), dtype=torch.uint8) != 0

    def take(self, id: int) -> None:
        """Raises `UserError` as `allowed` does."""
        with _llguidance_errors(UserError):
            self._matcher.consume_token(id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the grammar cannot be followed ({_line(self._matcher.get_error())}); give a simpler one")


class Grammars:
    """Makes constraints for one model; in any thread. What they share is made at once: it takes a tenth of a second and
    more, in which no other thread runs."""

    def __init__(self, model: Model) -> None:
        self._model, self._tokenizer = model, _tokenizer_of(model)

    def of_json(self, schema: Mapping[str, Any], param: str) -> Callable[[], GrammarConstraint]:
        """A text that is JSON of a schema. Raises `Refusal` where the schema is none, or asks for what llguidance does
        not know or does not keep to."""
        _check_schema(schema, param)
        with _refusals(param):
            written = json.dumps(schema)
            grammar = LLMatcher.grammar_from_json_schema(written, defaults={"whitespace_pattern": WHITESPACE})
        return self._constraint(grammar, param)

    def of_grammar(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        """A text of a grammar in llama.cpp's notation (GBNF) or in Lark's. Raises `Refusal` where it is none, and where
        a JSON schema is in it: `of_json` checks those."""
        if "%json" in grammar:
            raise _refused("a JSON schema goes into response_format", param)
        with _refusals(param):
            read = grammar_from("grammar", grammar)
        return self._constraint(read, param)

    def of_regex(self, pattern: str, param: str) -> Callable[[], GrammarConstraint]:
        """A text that a regular expression matches as a whole. Raises `Refusal` where llguidance does not know it."""
        with _refusals(param):
            read = grammar_from("regex", pattern)
        return self._constraint(read, param)

    def of_call(self, format: ToolFormat, functions: Sequence[Function], param: str) -> Callable[[], GrammarConstraint]:
        """A text that calls one of the functions. Raises `Refusal` as `of_json` does."""
        calls = [f"call_{number}" for number in range(len(functions))]
        start = " ".join((*map(json.dumps, format.begins), "call", *map(json.dumps, format.ends)))
        rules = [f"start: {start}", f"call: {' | '.join(calls)}"]
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        for call, (name, parameters) in zip(calls, functions, strict=True):
            _check_schema(parameters or {}, param)
            # Each schema stands alone: what it refers to begins at its own root.
            with _refusals(param):
                schema = json.dumps({**(parameters or NO_ARGUMENTS), **options})
            head = json.dumps(f'{{"name": {json.dumps(name)}, "{format.arguments}": ')
            rules += [f'{call}: {head} arguments_of_{call} "}}"', f"arguments_of_{call}: %json {schema}"]
        with _refusals(param):
            grammar = LLMatcher.grammar_from_lark("\n".join(rules))
        return self._constraint(grammar, param)

    def _constraint(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        if not self._model.engine.architecture.eos:
            raise Refusal(400, f"{param}: this model has no token that ends a text; leave it out", param)
        if self._tokenizer is None:
            raise Refusal(400, f"{param}: this model's tokenizer has no token for each byte; leave it out", param)
        try:
            SANDBOX.call("compile_grammar", grammar)  # llguidance has no limit of its own for some patterns
        except SandboxError as error:
            raise _refused(str(error), param) from error
        with _refusals(param):
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param)
        return lambda: GrammarConstraint(matcher.deep_copy())


def _tokenizer_of(model: Model) -> Any:
    """The model's tokenizer as llguidance takes it; None: it takes none of its kind, or no token ends a text."""
    architecture, packed = model.engine.architecture, model.packed
    if not architecture.eos:
        return None
    try:
        # llguidance reads the vocabulary and the decoder; what cuts texts may take all time to compile.
        read = decoding_json(check_tokenizer(packed.tokenizer_json))
        return LLTokenizer(read, n_vocab=architecture.vocabulary, eos_token=list(architecture.eos))
    except ValueError as error:
        logging.getLogger(__name__).warning("no JSON schemas and no grammars: %s", _line(str(error)))
        return None


@contextmanager
def _llguidance_errors(kind: Callable[[str], Exception]) -> Iterator[None]:
    """Turn what llguidance and json raise, a panic among it, into an exception of one line."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise kind(_line(str(error)) or "it is nested too deeply") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"llguidance failed: {_line(str(error))}") from error


def _refusals(param: str) -> AbstractContextManager[None]:
    return _llguidance_errors(lambda reason: _refused(reason, param))


def _check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raise `Refusal` where llguidance would round a number of a schema, ignore it, or take all time for it."""
    if "x-guidance" in schema:
        raise _refused("x-guidance is this server's own", param)
    together = 1
    for part in _schemas(schema):
        for name in BOUNDS:
            _check_bound(name, part.get(name, 0), param)
        for name in COUNTS:
            if isinstance(count := part.get(name), int) and count > LARGEST_COUNT:
                raise _refused(f"{name} of more than {LARGEST_COUNT:,}", param)
        values = (value for name in ("const", "enum") for value in _values(part.get(name)))
        if any(isinstance(value, int) and not -(2**63) <= value < 2**64 for value in values):
            raise _refused("const or enum with an integer beyond 64 bits", param)
        if isinstance(reference := part.get("$ref"), str) and not _names_schema(reference):
            raise _refused(f"$ref {reference[:60]!r} names no schema", param)
        together = math.lcm(together, _figures(part.get("multipleOf")))
        if together > LARGEST_DIVISOR:
            raise _refused(f"multipleOf of more than {LARGEST_DIVISOR:,}, alone or together", param)


def _check_bound(name: str, bound: Any, param: str) -> None:
    """Raise `Refusal` for a bound that llguidance clamps or rounds: it counts in 64 bits, and reads doubles."""
    if isinstance(bound, bool) and name.startswith("exclusive"):
        return  # as in draft 4 of JSON schema
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise _refused(f"{name} is no number", param)
    if not -(2**63) <= bound < 2**63 or int(float(bound)) != int(bound):
        raise _refused(f"{name} {str(Decimal(bound))[:30]}: a number beyond 64 bits, or that no double is", param)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it, wherever a reference may find one."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, Mapping):
            yield part
            for name, value in part.items():
                if name in NAMED and isinstance(value, Mapping):
                    parts += value.values()
                elif name not in DATA:
                    parts.append(value)


def _names_schema(reference: str) -> bool:
    """Whether a reference leads to what `_schemas` yields: not into data, and not to several schemas with names."""
    named = False
    for name in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not named and name in DATA:
            return False
        named = not named and name in NAMED
    return not named


def _values(data: Any) -> Iterator[Any]:
    """The numbers and texts in a value."""
    parts = [data]
    while parts:
        part = parts.pop()
        if isinstance(part, list | Mapping):
            parts += part.values() if isinstance(part, Mapping) else part
        else:
            yield part


def _figures(number: Any) -> int:
    """A number without its sign, its point and the zeros at its ends: 25 of -0.0250; 1 of what is no number or 0."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1
    exact = Decimal(repr(number) if isinstance(number, float) else number)
    return int("".join(map(str, exact.normalize().as_tuple().digits))) or 1 if exact.is_finite() else 1


def _refused(reason: str, param: str) -> Refusal:
    return Refusal(400, f"{param}: it cannot be kept to ({_line(reason)}); give another", param, "invalid_value")


def _line(reason: str) -> str:
    """A reason in one line of bounded length."""
    return " ".join(reason.split())[:300]
