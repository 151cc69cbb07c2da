"""Requests in the spellings of llama.cpp, vLLM and older clients, in the one form that `schema` has; and the log of
fields that are ignored."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import PydanticCustomError, from_json

from sparsepack.option import LARGEST_COUNT
from sparsepack.progress import say
from sparsepack.runtime.options import GENERATE_NAMES, unsupported_option

Json = dict[str, Any]

SMALLEST_TOP_P = 1e-300
"""In place of 0, of which nothing could be drawn: the likeliest token alone."""

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, 2),
        "top_p": (SMALLEST_TOP_P, 1),
        "top_k": (1, math.inf),
        "max_tokens": (0, math.inf),
        "max_completion_tokens": (0, math.inf),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
    }
)
"""The values that OpenAI takes, where other servers take more; with `--strict` there are no others."""

ALIASES = MappingProxyType(
    {name: {"tokens": "max_tokens"}.get(field, field) for name, field in GENERATE_NAMES.items() if name not in BOUNDS}
)
"""Parameters by the names of other programs; the name of ours counts where both are given."""

STRICT_STOPS = 4
"""OpenAI takes so many stop strings."""

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""What vLLM has as `guided_NAME`, and within `structured_outputs`."""


def unsupported(name: str, reason: str) -> PydanticCustomError:
    """The error of a parameter, within what is validated, that this server does not take as it is."""
    return PydanticCustomError("unsupported", "{name}: {reason}", {"name": name, "reason": reason})


def check_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `unsupported` for a parameter that is neither null nor one of the values with which it does nothing."""
    if found := unsupported_option(body, neutral):
        name, remedy = found
        raise unsupported(name, f"not supported by this server; {remedy}")


def check_strict(body: Mapping[str, Any]) -> None:
    """Raise `unsupported` for a value that OpenAI does not take."""
    if not body.get("model"):
        raise unsupported("model", "missing; it must be given")
    for name, (least, most) in BOUNDS.items():
        if isinstance(value := body.get(name), int | float) and not least <= value <= most:
            raise unsupported(name, f"expected {least:g} to {most:g}")
    stops = body.get("stop")
    if stops == "" or (isinstance(stops, list) and (len(stops) > STRICT_STOPS or "" in stops)):
        raise unsupported("stop", f"expected a text, or at most {STRICT_STOPS} of them, none of them empty")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise unsupported("stream_options", "only with stream: true")
    if body.get("tool_choice") not in (None, "none", "auto") and not body.get("tools"):
        raise unsupported("tool_choice", "only with tools")


def standard_form(body: Json) -> Json:
    """Return a body in the form of `schema.TextParameters`: null is left out, and what others spell otherwise is
    written as there. Raises `unsupported`."""
    unlimited = "max_tokens" in body and body["max_tokens"] is None
    body = {name: value for name, value in body.items() if value is not None}
    if "repetition_penalty" in body:  # transformers' and vLLM's counts every token, llama.cpp's the last 64
        body.setdefault("repeat_last_n", -1)
    for name, standard in ALIASES.items():
        if name in body:
            body.setdefault(standard, body.pop(name))
            body.pop(name, None)
    if unlimited:
        body.setdefault("max_tokens", -1)
    for name, rewrite in _REWRITTEN.items():
        if name in body and (value := rewrite(body.pop(name))) is not None:
            body[name] = value
    _rewrite_functions(body)
    _rewrite_structured_outputs(body)
    of, n = body.pop("best_of", None), body.get("n", 1)
    if _is_number(of) and _is_number(n) and of > n:
        raise unsupported("best_of", "not more than n: this server returns every text that it generates")
    return body


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stop(stop: Any) -> Any:
    return [each for each in stop if each not in ("", None)] if isinstance(stop, list) else stop or None


def _top_k(value: Any) -> Any:
    return LARGEST_COUNT if value in (0, -1) and _is_number(value) else value


def _logit_bias(value: Any) -> Any:
    """llama.cpp takes pairs of a token id and a bias, false for never."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(id): -100 if bias is False else bias for id, bias in value}


def _response_format(value: Any) -> Any:
    """A format by any of the names that servers have for it; None: plain text."""
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, dict):
        return value
    kind = "json_object" if value.get("type") == "json" else value.get("type")
    schema = value.get("json_schema", value.get("schema", value.get("value")))
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        return {**value, "type": kind}
    if "json_schema" not in value or not ({"schema", "name", "strict"} & schema.keys()):
        schema = {"schema": schema}
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(value: Any) -> Any:
    """The name of a function may stand next to the type, as in OpenAI's Responses; Mistral has "any"."""
    if isinstance(value, dict) and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    return "required" if value == "any" else value


_REWRITTEN: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "stop": _stop,
        "top_k": _top_k,
        "top_p": lambda value: SMALLEST_TOP_P if value == 0 and _is_number(value) else value,
        "seed": lambda value: None if value == -1 else value,
        "logprobs": lambda value: None if value is False else value,
        "logit_bias": _logit_bias,
        "response_format": _response_format,
        "tool_choice": _tool_choice,
    }
)
"""What becomes of a parameter's value; None: the parameter is left out."""


def _rewrite_functions(body: Json) -> None:
    """Write `functions` and `function_call` of OpenAI's protocol of 2023 as tools."""
    functions, choice = body.pop("functions", None), _tool_choice(body.pop("function_call", None))
    if functions and not isinstance(functions, list):
        raise unsupported("functions", "expected a list of functions")
    if functions:
        body.setdefault("tools", [{"type": "function", "function": function} for function in functions])
        if choice is not None:
            body.setdefault("tool_choice", choice)


def _rewrite_structured_outputs(body: Json) -> None:
    """Write what vLLM and llama.cpp have for JSON of a schema, regular expressions, choices and grammars as
    `response_format`, `regex` and `grammar`."""
    given = body.pop("structured_outputs", {})
    if not isinstance(given, dict):
        raise unsupported("structured_outputs", f"expected an object with one of {', '.join(STRUCTURED)}")
    if given.get("structural_tag") is not None:
        raise unsupported("structured_outputs", f"structural_tag is not supported; give one of {', '.join(STRUCTURED)}")
    given = {name: value for name, value in given.items() if value is not None}
    body |= {f"structured_outputs.{name}": given.pop(name) for name in given.keys() - set(STRUCTURED)}
    of = body.get("response_format")
    if isinstance(of, dict) and (kind := of.get("type")) in ("regex", "grammar"):
        del body["response_format"]
        if (value := next((of[name] for name in (kind, "pattern", "value") if of.get(name)), None)) is None:
            raise unsupported("response_format", f"{kind}: missing; it must be given")
        given[kind] = value
    for name in STRUCTURED:
        if (value := body.pop(f"guided_{name}", None)) is not None:
            given.setdefault(name, value)
    if (schema := body.pop("json_schema", None)) is not None:
        given.setdefault("json", schema)
    given = {name: value for name, value in given.items() if value is not False}
    if len(given) > 1:
        raise unsupported("structured_outputs", f"{' and '.join(given)}; give one of them")
    for name, value in given.items():
        match name:
            case "json":
                body["response_format"] = {"type": "json_schema", "json_schema": {"schema": _schema(value)}}
            case "json_object":
                body["response_format"] = {"type": "json_object"}
            case "choice":
                if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
                    raise unsupported("structured_outputs", "choice: expected a list of texts")
                body["grammar"] = f"start: {' | '.join(map(json.dumps, value))}"
            case _:
                body[name] = value


def _schema(value: Any) -> Any:
    """A JSON schema, which may be given as text."""
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise unsupported("structured_outputs", f"json: not JSON ({error}); expected a JSON schema") from error


MOST_NAMED = 100
"""So many ignored fields are named in the log; a client can make up any number of names."""

_named: set[str] = set()


def say_ignored(locations: Iterable[tuple[int | str, ...]]) -> None:
    """Name fields that are ignored, each once a run.

    locations -- keys and indices that lead to a field
    """
    names = {".".join(part for part in place if isinstance(part, str))[:80] for place in locations}
    new = sorted(name for name in names - _named if name.isprintable())[: MOST_NAMED - len(_named)]
    if new:
        _named.update(new)
        say(f"note: ignored in requests, not known to this server: {', '.join(new)}; --strict refuses them")
