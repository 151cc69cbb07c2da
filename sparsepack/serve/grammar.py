"""Texts that keep to a JSON schema or a grammar: which tokens may come next, by llguidance."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
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

Function = tuple[str, Mapping[str, Any] | None]
"""A function's name, and the JSON schema of its arguments; None: any object."""


class GrammarConstraint:
    """What a text may still be, by a matcher of its own; see `runtime.sampling.Constraint`."""

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
    """Makes constraints for one model; in any thread."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def of_json(self, schema: Mapping[str, Any], param: str) -> Callable[[], GrammarConstraint]:
        """A text that is JSON of a schema. Raises `Refusal` where the schema is none, or asks for what llguidance does
        not know."""
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults={"whitespace_pattern": WHITESPACE})
        return self._constraint(grammar, param)

    def of_grammar(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        """A text of a grammar in llama.cpp's notation (GBNF) or in Lark's. Raises `Refusal` where it is none."""
        try:
            return self._constraint(grammar_from("grammar", grammar), param)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error) or "it is nested too deeply", param) from error

    def of_call(self, format: ToolFormat, functions: Sequence[Function], param: str) -> Callable[[], GrammarConstraint]:
        """A text that calls one of the functions. Raises `Refusal` as `of_json` does."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, format.arguments: parameters or {"type": "object"}},
                "required": ["name", format.arguments],
                "additionalProperties": False,
            }
            for name, parameters in functions
        ]
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        call = json.dumps({**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **options})
        start = " ".join((*(json.dumps(part) for part in format.begins), "call", *map(json.dumps, format.ends)))
        return self._constraint(LLMatcher.grammar_from_lark(f"start: {start}\ncall: %json {call}\n"), param)

    def _constraint(self, grammar: str, param: str) -> Callable[[], GrammarConstraint]:
        if not self._model.engine.architecture.eos:
            raise Refusal(400, f"{param}: this model has no token that ends a text; leave it out", param)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param)
        return lambda: GrammarConstraint(matcher.deep_copy())

    @cached_property
    def _tokenizer(self) -> Any:
        architecture = self._model.engine.architecture
        tokenizer = self._model.tokenizer.to_str()
        return LLTokenizer(tokenizer, n_vocab=architecture.vocabulary, eos_token=list(architecture.eos))


def _refused(reason: str, param: str) -> Refusal:
    return Refusal(400, f"{param}: it cannot be kept to ({_line(reason)}); give another", param, "invalid_value")


def _line(reason: str) -> str:
    """A reason in one line of bounded length."""
    return " ".join(reason.split())[:300]
