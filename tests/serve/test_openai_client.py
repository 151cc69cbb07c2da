"""A model behind HTTP as the official client of OpenAI's protocol meets it."""

import openai
import pytest
from openai.types.chat import ChatCompletion
from serving import Served, wait_until

from sparsepack.loading import Model
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.options import ServeOptions

PROMPT = "There was a king who had"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was there?"}]


def expected(served: Served, prompt: str = PROMPT, **options: object) -> str:
    """What the model says without a server."""
    wait_until(served.idle)
    return served.model.generate(prompt, GenerateOptions(**options)).result().text  # type: ignore[arg-type]


def tokens_of(served: Served, text: str) -> list[int]:
    """The tokens of a text without BOS."""
    ids: list[int] = served.model.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_a_completion_is_what_the_model_says_and_its_usage_is_exact(served: Served) -> None:
    answer = served.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == expected(served, tokens=24)
    assert answer.choices[0].finish_reason == "length"
    ids = tokens_of(served, PROMPT)
    assert answer.usage.prompt_tokens == 1 + len(ids), "BOS and the prompt"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 25 + len(ids))
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"


def test_a_stream_has_the_same_text_in_pieces_and_its_usage_where_asked_for(served: Served) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = served.client().completions.create(**asked)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(served.client().completions.create(**asked, stream=True, **options))
        with_choices = [chunk for chunk in chunks if chunk.choices]
        assert "".join(chunk.choices[0].text for chunk in with_choices) == whole.choices[0].text
        assert len(with_choices) > 10
        assert [chunk.choices[0].finish_reason for chunk in with_choices[-2:]] == [None, "length"]
        assert len({chunk.id for chunk in chunks}) == 1
        usages = [chunk.usage for chunk in chunks if chunk.usage]
        assert len(usages) == len(chunks) - len(with_choices) == bool(options)
        for usage in usages:
            assert usage.total_tokens == whole.usage.total_tokens


def test_a_chat_is_answered_by_the_template(served: Served) -> None:
    client = served.client()
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, temperature=0)
    ids = tokens_of(served, "<system> Be brief.\n<user> Who was there?\n<assistant>")
    plain = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids), "a template that writes no BOS has none"
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20


def test_the_next_turn_of_a_chat_reuses_the_last_prompt(served: Served) -> None:
    client = served.client()
    messages = [{"role": "user", "content": "Tell me of the king and of his three sons, and of what they did. " * 2}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    content = first.choices[0].message.content
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    shared = first.usage.prompt_tokens // 32 * 32
    assert shared >= 32
    assert second.usage.prompt_tokens_details.cached_tokens >= shared - 32


def prompt_tokens_of(served: Served, words: int) -> int:
    """Tokens of a message of so many words, in the template."""
    return len(tokens_of(served, f"<user> {'word ' * words}\n<assistant>"))


def test_without_a_number_of_tokens_a_chat_goes_on_until_the_context_is_full(served: Served) -> None:
    def answer(words: int) -> ChatCompletion:
        messages = [{"role": "user", "content": "word " * words}]
        return served.client().chat.completions.create(model="tiny", messages=messages, temperature=0)

    few = next(words for words in range(1, 1024) if prompt_tokens_of(served, words) > 1014)
    made = answer(few)
    assert made.usage.total_tokens == served.model.engine.context or made.choices[0].finish_reason == "stop"
    full = next(words for words in range(few, 1024) if prompt_tokens_of(served, words) >= 1024)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        answer(full)


def test_seed_and_temperature_say_what_comes(served: Served) -> None:
    def text(**options: object) -> str:
        return served.client().completions.create(model="tiny", prompt=PROMPT, **options).choices[0].text  # type: ignore[call-overload, no-any-return]

    assert text(seed=3) == text(seed=3) == expected(served, tokens=16, temperature=1.0, seed=3)
    assert text(seed=3) != text(seed=4)
    assert len({text() for _ in range(4)}) > 1, "without a seed each text has another"
    assert text(seed=3, top_p=0.5) == expected(served, tokens=16, temperature=1.0, seed=3, top_p=0.5)
    assert text(seed=3, extra_body={"top_k": 1}) == text(temperature=0)


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(served: Served) -> None:
    whole = expected(served, tokens=40)
    stop = whole[12:15]
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": [stop, "\x00"]}
    answer = served.client().completions.create(**asked)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(served.client().completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_tokens_as_a_prompt_are_taken_as_they_are(served: Served) -> None:
    ids = [0, *tokens_of(served, PROMPT)]
    answer = served.client().completions.create(model="tiny", prompt=ids, max_tokens=9, temperature=0)
    assert answer.choices[0].text == expected(served, tokens=9)
    assert answer.usage.prompt_tokens == len(ids)


def test_the_model_is_listed(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == ["tiny"]
    assert served.client().models.retrieve("tiny").owned_by == "sparsepack"


def test_the_model_is_listed_with_what_packing_lost(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    score = {"windows": 2, "dense": {"perplexity_ratio": {"value": 1.25, "stderr": None}}}
    monkeypatch.setitem(served.model.packed.manifest, "score", score)  # type: ignore[arg-type]
    (listed,) = served.client().models.list()
    assert listed.model_extra is not None
    bits = {"stored": 4.5, "target": 4.5}
    assert listed.model_extra["sparsepack"] == {
        "format": "zigzag-q4_k",
        "bits": bits,
        "score": score,
        "suggested": {},
    }


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"best_of": 2}, openai.BadRequestError, "best_of: not more than n"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix: not supported by this server; leave it out"),
        ({"n": 17}, openai.BadRequestError, "n: Input should be less than or equal to 16"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs: Input should be less than or equal to 20"),
        ({"frequency_penalty": 101}, openai.BadRequestError, "frequency_penalty: Input should be less than"),
        ({"extra_body": {"stop_token_ids": [768]}}, openai.BadRequestError, "stop_token_ids: token 768; the model has"),
        ({"logit_bias": {"768": 1}}, openai.BadRequestError, "logit_bias: token 768; the model has 0 to 767"),
        ({"max_tokens": 5000}, openai.BadRequestError, "maximum context length is 1024 tokens"),
        ({"prompt": "word " * 3000}, openai.BadRequestError, "maximum context length is 1024 tokens"),
        ({"prompt": [5, 768]}, openai.BadRequestError, "prompt: token 768; the model has 0 to 767"),
    ],
)
def test_what_cannot_be_done_raises_the_client_s_error(
    served: Served, asked: dict[str, object], error: type[openai.APIStatusError], says: str
) -> None:
    with pytest.raises(error) as caught:
        served.client().completions.create(**{"model": "tiny", "prompt": PROMPT, **asked})  # type: ignore[call-overload]
    assert says in caught.value.body["message"]  # type: ignore[index]
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]


def test_a_strict_server_refuses_what_openai_does(model: Model) -> None:
    with Served(model, ServeOptions(strict=True)) as strict:
        create = strict.client().completions.create
        with pytest.raises(openai.NotFoundError, match="model 'gpt': this server has 'tiny'"):
            create(model="gpt", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: nonsense"):
            create(model="tiny", prompt=PROMPT, extra_body={"nonsense": 1})


def test_the_context_is_used_to_its_last_token(served: Served) -> None:
    ids = [0, *([5] * 1019)]
    answer = served.client().completions.create(model="tiny", prompt=ids, max_tokens=4, extra_body={"top_k": 1})
    assert answer.usage.total_tokens <= 1024
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.client().completions.create(model="tiny", prompt=ids, max_tokens=5)
    nothing = served.client().completions.create(model="tiny", prompt=[5] * 1024, max_tokens=0)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == ("", 0)


def test_a_failure_in_the_engine_is_an_error_of_the_server_and_the_next_text_goes_well(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    with monkeypatch.context() as patch:
        patch.setattr(served.model.engine, "decode_all", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the server's log says why"):
            served.client().completions.create(**asked)
        with pytest.raises(openai.APIError, match="log says why"):
            list(served.client().completions.create(**asked, stream=True))
    assert "ZeroDivisionError" in caplog.text
    assert served.client().completions.create(**asked).choices[0].text == expected(served, tokens=8)
