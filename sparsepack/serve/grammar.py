"""Texts that keep to a JSON schema, a grammar or a form of calls: which tokens may come next, by llguidance."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.sandbox import SANDBOX, SandboxError, decoding_json
from sparsepack.models.tokenizer.tokenizer import check_tokenizer
from sparsepack.progress import say
from sparsepack.serve.json_schema import check_schema, closed, one_line, refused
from sparsepack.serve.reasoning import Reasoning
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tool_formats import VARIABLES, ToolFormat

WHITESPACE = r"( |\n {0,16})?"
"""What may stand between two parts of JSON: a space, or a line end with an indent. With more room, a model that is fond
of spaces or lines goes on with them for long."""

_VARYING = {"NUMBER": "/[0-9]{1,3}/", "ID": "/[a-zA-Z0-9]{9}/"}
_SPECIAL = re.compile("\ue000([0-9]+)\ue001")  # a special token within a grammar, by its id

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters, by OpenAI's reference."""

LONGEST_MARK = 64
"""A mark of calls or of reasoning has at most so many tokens."""

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

    def follows(self, ids: Sequence[int]) -> bool:
        """Go on after tokens where all of them are allowed, else return false."""
        with _llguidance_errors(UserError):
            return bool(self._matcher.try_consume_tokens(list(ids)) == len(ids))

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error())
            raise UserError(f"the grammar cannot be followed ({reason}); give a simpler one")


class LazyConstraint:
    """Leaves an answer free until calls begin, and keeps them to a grammar from there.

    make      -- makes what the calls keep to
    starts    -- texts with which they begin
    reasoning -- what may come before, in which none begin
    """

    def __init__(
        self,
        make: Callable[[], GrammarConstraint],
        starts: Sequence[str],
        reasoning: Reasoning | None,
        tokenizer: Any,
        vocabulary: int,
    ) -> None:
        self._make, self._tokenizer, self._reasoning = make, tokenizer, reasoning
        self._starts = re.compile("|".join(map(re.escape, sorted(starts, key=len, reverse=True))))
        self._free = torch.ones(vocabulary, dtype=torch.bool)
        self._last: list[int] = []  # tokens in which a mark may be
        self._reasons = bool(reasoning and reasoning.open)
        self._calls: GrammarConstraint | None = None
        self._is_text = False

    def allowed(self) -> Tensor:
        """As `GrammarConstraint.allowed`."""
        return self._free if self._calls is None else self._calls.allowed()

    def take(self, id: int) -> None:
        """As `GrammarConstraint.take`."""
        if self._calls is not None:
            self._calls.take(id)
        elif not self._is_text:
            self._last = [*self._last[-LONGEST_MARK:], id]
            self._look_for_calls(self._tokenizer.decode_str(self._last))

    def _look_for_calls(self, text: str) -> None:
        if self._reasoning is not None:
            format = self._reasoning.format
            self._reasons |= self._reasoning.open is False and format.begin in text
            if self._reasons:
                _, ended, text = text.partition(format.end)
                if not ended:
                    return
                self._reasons, self._reasoning = False, None
                self._last = self._tokenizer.tokenize_str(text, parse_special=True)
        if (found := self._starts.search(text)) is None:
            return
        calls = self._make()
        self._is_text = not calls.follows(self._tokenizer.tokenize_str(text[found.start() :], parse_special=True))
        self._calls = None if self._is_text else calls


class Grammars:
    """Makes constraints for one model; in any thread. What they share is made at once: it takes a tenth of a second and
    more, in which no other thread runs."""

    def __init__(self, model: Model) -> None:
        self._model, self._tokenizer = model, _tokenizer_of(model)
        vocabulary, eos = model.engine.architecture.vocabulary, model.engine.architecture.eos
        added = model.tokenizer.get_added_tokens_decoder().items()
        special = {str(token.content): id for id, token in added if token.special and id < vocabulary}
        self._special = {text: "" if id in eos else f"\ue000{id}\ue001" for text, id in special.items()}
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def of_json(
        self, schema: Mapping[str, Any], param: str, reasoning: Reasoning | None = None
    ) -> Callable[[], GrammarConstraint]:
        """A text that is JSON of a schema. Raises `Refusal` where the schema is none, or asks for what llguidance does
        not know or does not keep to.

        reasoning -- what may come before it
        """
        check_schema(schema, param)
        with _refusals(param):
            written = json.dumps(closed(schema))
            grammar = LLMatcher.grammar_from_json_schema(written, defaults={"whitespace_pattern": WHITESPACE})
        return self._constraint(grammar, param, reasoning)

    def of_grammar(
        self, grammar: str, param: str, reasoning: Reasoning | None = None
    ) -> Callable[[], GrammarConstraint]:
        """A text of a grammar in llama.cpp's notation (GBNF) or in Lark's. Raises `Refusal` where it is none, and where
        a JSON schema is in it: `of_json` checks those."""
        if "%json" in grammar:
            raise refused("a JSON schema goes into response_format", param)
        with _refusals(param):
            read = grammar_from("grammar", grammar)
        return self._constraint(read, param, reasoning)

    def of_regex(self, pattern: str, param: str, reasoning: Reasoning | None = None) -> Callable[[], GrammarConstraint]:
        """A text that a regular expression matches as a whole. Raises `Refusal` where llguidance does not know it."""
        with _refusals(param):
            read = grammar_from("regex", pattern)
        return self._constraint(read, param, reasoning)

    def of_calls(
        self,
        format: ToolFormat,
        functions: Sequence[Function],
        param: str,
        reasoning: Reasoning | None = None,
        several: bool = False,
    ) -> Callable[[], GrammarConstraint]:
        """A text that calls one of the functions, or `several` times. Raises `Refusal` as `of_json` does."""
        numbers = range(len(functions))
        more = f"({self._literal(format.separator)} call)*" if several else ""
        rules = [
            f"start: {self._literal(format.begin)} call {more} {self._literal(format.end)}",
            f"call: {' | '.join(f'call_{number}' for number in numbers)}",
        ]
        for number, (name, parameters) in enumerate(functions):
            check_schema(parameters or {}, param)
            parts = VARIABLES.split(format.call.replace("$NAME", name))
            varying = {**_VARYING, "ARGUMENTS": f"arguments_{number}"}
            written = [self._literal(part) if n % 2 == 0 else varying[part] for n, part in enumerate(parts)]
            rules.append(f"call_{number}: {' '.join(written)}")
            with _refusals(param):
                # Without a type a schema takes a text or a list, too, which is no call's arguments.
                schema = {"type": "object", **parameters} if parameters else NO_ARGUMENTS
                rules += self._arguments(format, f"arguments_{number}", schema)
        return self._constraint("\n".join(rules), param, reasoning, calls=True)

    def of_optional_calls(
        self,
        format: ToolFormat,
        functions: Sequence[Function],
        param: str,
        reasoning: Reasoning | None = None,
        several: bool = False,
    ) -> Callable[[], LazyConstraint] | None:
        """A text in which calls, once begun, are such of the functions. None: nothing marks their beginning, or the
        model has no grammars."""
        if not format.starts or self._tokenizer is None:
            return None
        try:
            make = self.of_calls(format, functions, param, None, several)
        except Refusal as refusal:
            say(f"note: {refusal.message}; until then calls are read as the model writes them, without a grammar")
            return None
        vocabulary = self._model.engine.architecture.vocabulary
        return lambda: LazyConstraint(make, format.starts, reasoning, self._tokenizer, vocabulary)

    def _literal(self, text: str) -> str:
        """A text in Lark's notation, its special tokens as such; those that end an answer left out."""
        parts, at = [], 0
        for found in self._marks.finditer(text):
            parts += [json.dumps(text[at : found.start()])] if text[at : found.start()] else []
            parts.append(self._special[found[0]])
            at = found.end()
        return " ".join([*parts, *([json.dumps(text[at:])] if text[at:] else [])])

    def _arguments(self, format: ToolFormat, rule: str, schema: Mapping[str, Any]) -> list[str]:
        """The rules of a function's arguments, the first of them called `rule`. Each schema stands alone: what it
        refers to begins at its own root."""
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        schema = closed(schema)
        properties = schema.get("properties")
        if format.parameters is None:
            return [f"{rule}: %json {json.dumps({**schema, **options})}"]
        if not isinstance(properties, Mapping):
            properties = {}
        needed = schema.get("required") or ()
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rules, before = [], self._literal(format.parameters.separator)
        # One rule for what may follow from each parameter on, where none is written yet, and where one is.
        for n, (key, each) in enumerate(properties.items()):
            begin = self._literal(format.parameters.begin.replace("$KEY", key))
            value = f"{rule}_value_{n}"
            first, later = (f"{rule}_{n}" if n else rule), f"{rule}_more_{n}"
            behind_first, behind_later = f"{rule}_{n + 1}", f"{rule}_more_{n + 1}"
            skipped = "" if key in needed else f" | {behind_first}"
            rules.append(f"{first}: {begin} {value} {behind_later}{skipped}")
            skipped = "" if key in needed else f" | {behind_later}"
            rules.append(f"{later}: {before} {begin} {value} {behind_later}{skipped}")
            rules += self._value(format, value, each if isinstance(each, Mapping) else {}, {**definitions, **options})
        count = len(properties)
        return [*rules, f'{f"{rule}_{count}" if count else rule}: ""', *([f'{rule}_more_{count}: ""'] if count else [])]

    def _value(self, format: ToolFormat, rule: str, schema: Mapping[str, Any], more: Mapping[str, Any]) -> list[str]:
        """The rule of one parameter's value with what stands behind it."""
        assert format.parameters is not None
        end = format.parameters.end
        if format.parameters.raw and schema.get("type") == "string":
            if all(isinstance(value, str) for value in schema.get("enum", [None])):
                return [f"{rule}: ({' | '.join(map(json.dumps, schema['enum']))}) {self._literal(end)}"]
            return [f"{rule}[lazy]: /(?s:.*){_escaped(end)}/"]
        return [f"{rule}: {rule}_json {self._literal(end)}", f"{rule}_json: %json {json.dumps({**schema, **more})}"]

    def _thinking(self, reasoning: Reasoning) -> list[str]:
        """The rules of the reasoning before an answer."""
        format, end = reasoning.format, self._literal(reasoning.format.end)
        rules = [f"thoughts: /(?s:.*)/ {end}"] if _SPECIAL.fullmatch(end) else []
        rules = rules or [f"thoughts[lazy]: /(?s:.*){_escaped(format.end)}/"]
        behind = self._literal(format.between) or "/[ \\n]{0,4}/"
        begin = "" if reasoning.open else self._literal(format.begin)
        return [*rules, f"reasoning: {begin} thoughts {behind}"]

    def _constraint(
        self, grammar: str, param: str, reasoning: Reasoning | None = None, calls: bool = False
    ) -> Callable[[], GrammarConstraint]:
        if not self._model.engine.architecture.eos:
            raise Refusal(400, f"{param}: this model has no token that ends a text; leave it out", param)
        if self._tokenizer is None:
            raise Refusal(400, f"{param}: this model's tokenizer has no token for each byte; leave it out", param)
        if reasoning is not None:
            opening, closing = ("", "") if calls else (reasoning.format.opening, reasoning.format.closing)
            before = {None: "", True: "reasoning", False: "reasoning?"}[reasoning.open]
            rules = [f"start: {before} {self._literal(opening)} @answer {self._literal(closing)}"]
            rules += [] if reasoning.open is None else self._thinking(reasoning)
            answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
            both = [{"lark_grammar": "\n".join(rules)}, {**answer, "name": "answer"}]
            grammar = json.dumps({"grammars": both}, ensure_ascii=False)
        quote = '\\"' if grammar.startswith("{") else '"'
        try:
            # llguidance has no limit of its own for some patterns. The child has no special tokens.
            SANDBOX.call("compile_grammar", _SPECIAL.sub(f"{quote}@{quote}", grammar))
        except SandboxError as error:
            raise refused(str(error), param) from error
        with _refusals(param):
            matcher = LLMatcher(self._tokenizer, _SPECIAL.sub(r"<[\1]>", grammar), log_level=0)
        if matcher.is_error():
            raise refused(matcher.get_error(), param)
        return lambda: GrammarConstraint(matcher.deep_copy())


def _escaped(text: str) -> str:
    """A text within a regular expression of Lark's notation."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


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
        logging.getLogger(__name__).warning("no JSON schemas and no grammars: %s", one_line(str(error)))
        return None


@contextmanager
def _llguidance_errors(kind: Callable[[str], Exception]) -> Iterator[None]:
    """Turn what llguidance and json raise, a panic among it, into an exception of one line."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise kind(one_line(str(error)) or "it is nested too deeply") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"llguidance failed: {one_line(str(error))}") from error


def _refusals(param: str) -> AbstractContextManager[None]:
    return _llguidance_errors(lambda reason: refused(reason, param))
