"""What requests may ask beside a plain text, as the official client of OpenAI's protocol asks it."""

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch
from serving import Served, chat
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.runtime.generation.sampling import TokenLogprob
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.grammar import GrammarConstraint, Grammars
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.protocols.openai import OpenAIWriter, completion_logprobs
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tool_formats import HERMES as HERMES_FORMAT

PROMPT = "There was a king who had"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["king", "queen"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA}


def made(model: Model, **options: object) -> str:
    """What the model says without a server."""
    return model.generate(PROMPT, GenerateOptions(**options)).result().text  # type: ignore[arg-type]


def completion(served: Served, **asked: Any) -> Any:
    return served.client().completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 16, **asked})


def test_several_texts_are_those_of_following_seeds_and_each_comes_in_its_own_chunks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.model.engine, "dense", True)  # what is skipped may depend on the texts beside one
    expected = [made(served.model, tokens=16, temperature=1.0, seed=seed) for seed in (3, 4, 5)]
    answer = completion(served, n=3, seed=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    chunks = list(completion(served, n=3, seed=3, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    assert chunks[-1].usage == answer.usage
    assert answer.usage.completion_tokens <= 48
    ends = [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert len(ends) == 3


def test_several_texts_are_all_in_the_queue_or_none(model: Model) -> None:
    with Served(model, ServeOptions(queue=1)) as small:
        stream = completion(small, n=8, max_tokens=900, temperature=0, stream=True)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError, match="queue is full"):
            completion(small, n=2)
        assert small.scheduler.waiting == 0
        stream.close()


def test_more_texts_than_there_ever_is_room_for_are_refused_for_good(model: Model) -> None:
    with Served(model, ServeOptions(queue=1)) as small:
        most = small.scheduler.capacity + 1
        with pytest.raises(openai.BadRequestError, match=f"n: 16 texts.* give n of at most {most}") as refused:
            completion(small, n=16)
        assert refused.value.param == "n"
        assert len(completion(small, n=most, max_tokens=1).choices) == most


def logprobs_of(model: Model, text: str) -> torch.Tensor:
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    model.engine.reset()
    return model.engine.prefill([0, *ids]).double().log_softmax(0)


def test_logprobs_of_a_completion_are_the_model_s_and_its_tokens_are_the_text(served: Served) -> None:
    answer = completion(served, logprobs=3, temperature=0).choices[0]
    told = answer.logprobs
    assert "".join(told.tokens) == answer.text
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 16
    assert [
        answer.text[at : at + len(token)] for at, token in zip(told.text_offset, told.tokens, strict=True)
    ] == told.tokens
    expected = logprobs_of(served.model, PROMPT)
    assert told.token_logprobs[0] == pytest.approx(float(expected.max()), abs=1e-3)
    assert sorted(told.top_logprobs[0].values()) == pytest.approx(sorted(expected.topk(3).values.tolist()), abs=1e-3)
    assert completion(served, temperature=0).choices[0].logprobs is None
    chunks = [chunk.choices[0] for chunk in completion(served, logprobs=3, temperature=0, stream=True)]
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [token for part in streamed for token in part.tokens] == told.tokens
    assert [at for part in streamed for at in part.text_offset] == told.text_offset


def test_offsets_of_tokens_count_whole_characters_whatever_a_stream_holds_back() -> None:
    bytes_of = [b"a", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"bc"]
    tokens = [TokenLogprob(id, -1.0, ()) for id in (3, 1, 2, 0, 3)]
    whole = completion_logprobs(bytes_of.__getitem__)
    assert whole(tokens)["text_offset"] == [0, 2, 2, 3, 4]
    streamed = completion_logprobs(bytes_of.__getitem__)
    parts = [streamed(part)["text_offset"] for part in (tokens[:2], tokens[2:3], tokens[3:])]
    assert [at for part in parts for at in part] == [0, 2, 2, 3, 4]


def test_offsets_in_a_stream_are_those_of_the_whole_where_a_stop_string_holds_text_back(served: Served) -> None:
    asked = {"logprobs": 0, "temperature": 0, "max_tokens": 40}
    text = completion(served, **asked).choices[0].text
    stop_strings = [text[at : at + 3] + "\u2603" for at in range(0, len(text) - 3, 7)][:4]
    told = completion(served, **asked, stop=stop_strings).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in completion(served, **asked, stop=stop_strings, stream=True)]
    assert [at for part in chunks if part for at in part.text_offset] == told.text_offset


def test_health_answers_while_a_large_answer_is_written(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    whole = OpenAIWriter.whole
    monkeypatch.setattr(OpenAIWriter, "whole", lambda *told: threads.append(threading.current_thread()) or whole(*told))
    chat(served, logprobs=True, top_logprobs=20)
    assert threads
    assert threads[0].name != "test-server"


def test_logprobs_of_a_chat_have_bytes_and_the_likeliest_others(served: Served) -> None:
    answer = chat(served, logprobs=True, top_logprobs=2, temperature=0).choices[0]
    content = answer.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == answer.message.content
    for token in content:
        assert [len(token.top_logprobs), token.top_logprobs[0].token] == [2, token.token]
        assert math.exp(token.top_logprobs[0].logprob) + math.exp(token.top_logprobs[1].logprob) <= 1.0001
    assert chat(served, logprobs=True, temperature=0).choices[0].logprobs.content[0].top_logprobs == []
    streamed = list(chat(served, logprobs=True, top_logprobs=2, temperature=0, stream=True))
    told = [token for chunk in streamed for token in (chunk.choices[0].logprobs or _nothing()).content]
    assert [token.token for token in told] == [token.token for token in content]


def _nothing() -> Any:
    return type("Nothing", (), {"content": []})


def test_the_end_of_a_text_is_no_token_of_the_logprobs(served: Served) -> None:
    answer = completion(served, logprobs=0, extra_body={"grammar": 'root ::= "yes"'})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yes", "stop")
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
        ({"logit_bias": {"300": 100, "5": -100}}, {"logit_bias": ((300, 100.0), (5, -100.0))}),
        ({"extra_body": {"min_p": 0.3}}, {"min_p": 0.3}),
        ({"extra_body": {"repeat_penalty": 1.8}}, {"repeat_penalty": 1.8}),
    ],
    ids=str,
)
def test_what_changes_the_choice_of_tokens_reaches_it(
    served: Served, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = {"tokens": 40, "temperature": 1.0, "seed": 5}
    expected = made(served.model, **plain, **options)
    assert completion(served, max_tokens=40, seed=5, **asked).choices[0].text == expected
    assert expected != made(served.model, **plain)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_text_keeps_to_a_json_schema(served: Served, temperature: float, stream: bool) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": NAMED}, "max_tokens": 200, "seed": 1}
    answer = chat(served, **asked, temperature=temperature, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    found = json.loads(text)
    assert 1 <= found["age"] <= 99
    assert found["kind"] in ("king", "queen")
    assert len(found) == 2


def test_a_text_is_a_json_object_or_of_a_grammar(served: Served) -> None:
    answer = chat(served, response_format={"type": "json_object"}, temperature=0, max_tokens=500)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")
    for grammar in ('root ::= ("king" | "queen") "s"', 'start: ("king" | "queen") "s"'):
        assert completion(served, extra_body={"grammar": grammar}).choices[0].text in ("kings", "queens")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, "no"),
        ({"extra_body": {"grammar": 'root ::= "yes'}}, "Unexpected end"),
        ({"extra_body": {"grammar": "start: missing"}}, "missing"),
        ({"extra_body": {"grammar": "(" * 16_000}}, "cannot be kept to"),
        ({"extra_body": {"grammar": 'start: %json {"multipleOf": 9999991}'}}, "goes into response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {**NAMED, "schema": {"multipleOf": 9999991}},
                }
            },
            "multipleOf of more than 10,000",
        ),
    ],
    ids=["schema", "gbnf", "lark", "deep", "schema in a grammar", "remainders"],
)
def test_what_is_no_schema_or_grammar_is_refused_in_one_line(served: Served, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        (chat if "response_format" in asked else completion)(served, **asked)
    message = caught.value.body["message"]  # type: ignore[index]
    assert says in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 3.14159},
        {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
        {"properties": {"a": {"anyOf": [{"type": "integer", "multipleOf": 10**18 + 9}]}}},
    ],
    ids=["decimals", "together", "within"],
)
def test_a_schema_whose_remainders_are_too_many_is_refused_at_once(model: Model, schema: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="alone or together"):
        Grammars(model).of_json(schema, "response_format")


@pytest.mark.parametrize("figures", [300, 5000])
@pytest.mark.parametrize("stands", ["response_format", "tools"])
def test_a_schema_with_a_number_of_many_figures_is_a_refusal_or_taken(model: Model, stands: str, figures: int) -> None:
    schema = {"type": "integer", "maximum": 10**figures}
    with contextlib.suppress(Refusal):
        if stands == "tools":
            Grammars(model).of_calls(HERMES_FORMAT, [("f", schema)], stands)
        else:
            Grammars(model).of_json(schema, stands)


@pytest.mark.parametrize("divisor", [5, 0.01, 2.5, 1e9, 10_000, 9973])
def test_a_schema_of_usual_multiples_is_taken(model: Model, divisor: float) -> None:
    assert Grammars(model).of_json({"type": "number", "multipleOf": divisor}, "response_format")() is not None


def test_a_tokenizer_that_keeps_to_no_grammar_is_a_refusal(model: Model) -> None:
    words = Tokenizer(WordLevel({"<unk>": 0}, "<unk>")).to_str()
    grammars = Grammars(replace(model, packed=replace(model.packed, tokenizer_json=words)))
    for _ in range(2):
        with pytest.raises(Refusal, match="this model's tokenizer has no token for each byte"):
            grammars.of_json({"type": "object"}, "response_format")


def test_what_grammars_share_is_made_before_the_first_is_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(model)
    monkeypatch.setattr("sparsepack.serve.grammar.LLTokenizer", lambda *_, **__: 1 / 0)
    assert grammars.of_json({"type": "object"}, "response_format")().allowed().any()


def test_a_grammar_that_fails_while_a_text_is_made_is_the_request_s_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: GrammarConstraint) -> torch.Tensor:
        raise UserError("the grammar cannot be followed (too complex); give a simpler one")

    monkeypatch.setattr(GrammarConstraint, "allowed", fails)
    with pytest.raises(openai.BadRequestError, match="give a simpler one"):
        chat(served, response_format={"type": "json_object"})
    with pytest.raises(openai.APIError, match="give a simpler one"):
        list(chat(served, response_format={"type": "json_object"}, stream=True))


# what a model's makers suggest

SUGGESTED = {"temperature": 0.7, "top_k": 5, "repeat_penalty": 1.3}


@pytest.fixture(scope="module")
def with_suggestions(model: Model) -> Iterator[Served]:
    packed = replace(model.packed, generation=SUGGESTED)
    with Served(replace(model, packed=packed), ServeOptions()) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, SUGGESTED),
        ({"temperature": 1.5}, {**SUGGESTED, "temperature": 1.5}),
        ({"extra_body": {"top_k": 700, "repeat_penalty": 1.0}}, {"temperature": 0.7, "top_k": 700}),
        ({"temperature": 0}, {"temperature": 0, "repeat_penalty": 1.3}),
    ],
    ids=str,
)
def test_tokens_are_chosen_as_the_makers_suggest_unless_a_request_says_otherwise(
    model: Model, with_suggestions: Served, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = made(model, tokens=40, **({"seed": 5} if options["temperature"] else {}), **options)
    assert completion(with_suggestions, max_tokens=40, seed=5, **asked).choices[0].text == expected
