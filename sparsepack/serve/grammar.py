"""Texts that keep to a JSON schema, a grammar or a form of calls: which tokens may come next, by llguidance."""

import json
import logging
import math
import re
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
from sparsepack.serve.reasoning import Reasoning
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tool_formats import VARIABLES, ToolFormat

WHITESPACE = r"( |\n {0,16})?"
"""What may stand between two parts of JSON: a space, or a line end with an indent. With more room, a model that is fond
of spaces or lines goes on with them for long."""

_VARYING = {"NUMBER": "/[0-9]{1,3}/", "ID": "/[a-zA-Z0-9]{9}/"}
_SPECIAL = re.compile("\ue000([0-9]+)\ue001")  # a special token within a grammar, by its id

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

LONGEST_MARK = 64
"""A mark of calls or of reasoning has at most so many tokens."""

COMBINING = frozenset(("allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties"))
ALTERNATIVES = frozenset(("$ref", "anyOf", "oneOf"))
"""Keywords of schemas that combine several; the second ones do where they stand beside properties."""
SAYING = frozenset(("additionalProperties", "patternProperties", "minProperties"))
"""Keywords of a schema that says of itself whether an object has other properties than those it names."""

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
            raise UserError(f"the grammar cannot be followed ({_line(self._matcher.get_error())}); give a simpler one")


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
        _check_schema(schema, param)
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
            raise _refused("a JSON schema goes into response_format", param)
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
            _check_schema(parameters or {}, param)
            parts = VARIABLES.split(format.call.replace("$NAME", name))
            varying = {**_VARYING, "ARGUMENTS": f"arguments_{number}"}
            written = [self._literal(part) if n % 2 == 0 else varying[part] for n, part in enumerate(parts)]
            rules.append(f"call_{number}: {' '.join(written)}")
            with _refusals(param):
                rules += self._arguments(format, f"arguments_{number}", parameters or NO_ARGUMENTS)
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
        except Refusal:  # what no grammar keeps to is read as the model writes it
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
            raise _refused(str(error), param) from error
        with _refusals(param):
            matcher = LLMatcher(self._tokenizer, _SPECIAL.sub(r"<[\1]>", grammar), log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param)
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


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose objects have the properties that it names and no others, where it does not say whether they may:
    small models would otherwise write more of them without end. It stays as it is where parts are combined, since an
    object of one part may need the properties of another."""
    parts = list(_schemas(schema))
    if any(part.keys() & COMBINING or ("properties" in part and part.keys() & ALTERNATIVES) for part in parts):
        return schema
    return dict(_closed(schema))


def _closed(part: Any, names: bool = False) -> Any:
    """A part of a schema with its objects closed; of `names`, each value is a part."""
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    written = {
        name: value if name in DATA and not names else _closed(value, names=name in NAMED and not names)
        for name, value in part.items()
    }
    properties = part.get("properties")
    if names or not isinstance(properties, Mapping) or part.keys() & SAYING:
        return written
    names_all = {*(part.get("required") or ())} <= properties.keys()
    return {**written, "additionalProperties": False} if names_all else written


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
