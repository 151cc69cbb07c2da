"""Texts that keep to a JSON schema or a grammar: which tokens may come next, by llguidance."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tools import ToolFormat

WHITESPACE = r"[ \n\r\t]{0,20}"
"""So much may stand between two parts of JSON: a model that is fond of spaces would otherwise never go on."""

LARGEST_DIVISOR = 10_000
"""The numbers that `multipleOf` names in a schema have at most this least common multiple, powers of ten left out.
llguidance makes a state for each remainder, without a limit of its own: 999,983 takes seconds, and ten times that
minutes."""

Function = tuple[str, Mapping[str, Any] | None]
"""A function's name, and the JSON schema of its arguments; None: any object."""


class GrammarConstraint:
    """What a text may still be, by a matcher of its own; see `runtime.generation.sampling.Constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> Tensor:
        """bool [vocabulary]. Raises `UserError` where the grammar is too complex to tell."""
        mask = self._matcher.compute_logit_bias()
        self._check()
        return torch.frombuffer(bytearray(mask), dtype=torch.uint8) != 0

    def take(self, id: int) -> None:
        """Raises `UserError` as `allowed` does."""
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
        not know."""
        _check_divisors(schema, param)
        written = _written(schema, param)
        grammar = LLMatcher.grammar_from_json_schema(written, defaults={"whitespace_pattern": WHITESPACE})
        return self._constraint(grammar, param)

    def of_grammar(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        """A text of a grammar in llama.cpp's notation (GBNF) or in Lark's. Raises `Refusal` where it is none, and where
        a JSON schema is in it: `of_json` checks those."""
        if "%json" in grammar:
            raise _refused("a JSON schema goes into response_format", param)
        try:
            return self._constraint(grammar_from("grammar", grammar), param)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error) or "it is nested too deeply", param) from error

    def of_call(self, format: ToolFormat, functions: Sequence[Function], param: str) -> Callable[[], GrammarConstraint]:
        """A text that calls one of the functions. Raises `Refusal` as `of_json` does."""
        calls = [f"call_{number}" for number in range(len(functions))]
        start = " ".join((*map(json.dumps, format.begins), "call", *map(json.dumps, format.ends)))
        rules = [f"start: {start}", f"call: {' | '.join(calls)}"]
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        for call, (name, parameters) in zip(calls, functions, strict=True):
            _check_divisors(parameters, param)
            # Each schema stands alone: what it refers to begins at its own root.
            schema = _written({**(parameters or {"type": "object"}), **options}, param)
            head = json.dumps(f'{{"name": {json.dumps(name)}, "{format.arguments}": ')
            rules += [f'{call}: {head} arguments_of_{call} "}}"', f"arguments_of_{call}: %json {schema}"]
        return self._constraint(LLMatcher.grammar_from_lark("\n".join(rules)), param)

    def _constraint(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        if not self._model.engine.architecture.eos:
            raise Refusal(400, f"{param}: this model has no token that ends a text; leave it out", param)
        if self._tokenizer is None:
            raise Refusal(400, f"{param}: this model's tokenizer has no token for each byte; leave it out", param)
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
        return LLTokenizer(packed.tokenizer_json, n_vocab=architecture.vocabulary, eos_token=list(architecture.eos))
    except ValueError as error:
        logging.getLogger(__name__).warning("no JSON schemas and no grammars: %s", _line(str(error)))
        return None


def _written(schema: Mapping[str, Any], param: str) -> str:
    """A schema as JSON. Raises `Refusal` for numbers that Python writes down in no time that one would wait for."""
    try:
        return json.dumps(schema)
    except ValueError as error:
        raise _refused(str(error), param) from error


def _check_divisors(schema: Any, param: str) -> None:
    """Raise `Refusal` where the numbers that a schema's numbers must be multiples of are too large together."""
    together, parts = 1, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.values()
            together = math.lcm(together, _figures(part.get("multipleOf")))
        elif isinstance(part, list):
            parts += part
        if together > LARGEST_DIVISOR:
            raise _refused(f"multipleOf of more than {LARGEST_DIVISOR:,}, alone or together", param)


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
