"""Prompts that an answer begins with, with likelihoods; and several prompts in a request."""

from typing import Any

import pytest
import torch
from serving import Served, chat

PROMPTS = ["There was a king who had", "Once upon a time, in a land far away, there lived a girl named"]


def completion(served: Served, prompt: Any, **given: Any) -> Any:
    return served.client().completions.create(**{"model": "tiny", "prompt": prompt, "temperature": 0, **given})


def expected_logprobs(served: Served, ids: list[int]) -> list[float]:
    """What the model says of each token but the first, read as a prompt, by the engine of a server that is idle."""
    engine = served.model.engine
    engine.truncate(0, 0)
    logits = engine.prefill(ids, every=True).double().log_softmax(-1)
    engine.truncate(0, 0)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_echoed_prompt_has_the_likelihoods_of_a_prompt_that_is_read_dense(served: Served, tokens: int) -> None:
    ids = [0, *served.model.tokenizer.encode(PROMPTS[1] * 20, add_special_tokens=False).ids]
    assert len(ids) > 256  # read in several pieces
    completion(served, ids, max_tokens=1)  # whose cache is of no use
    choice = completion(served, ids, echo=True, logprobs=2, max_tokens=tokens).choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(ids) + tokens
    assert choice.text == "".join(told.tokens)
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    assert told.token_logprobs[1 : len(ids)] == pytest.approx(expected_logprobs(served, ids), abs=1e-4)
    assert all(len(top) in (2, 3) for top in told.top_logprobs[1:])


def test_an_echoed_text_is_the_prompt_as_it_was_given(served: Served) -> None:
    plain = completion(served, PROMPTS[0], max_tokens=5).choices[0].text
    for given in ({}, {"logprobs": 0}):
        assert completion(served, PROMPTS[0], max_tokens=5, echo=True, **given).choices[0].text == PROMPTS[0] + plain
    assert completion(served, PROMPTS[0], max_tokens=0, echo=True).choices[0].text == PROMPTS[0]
    chunks = list(completion(served, PROMPTS[0], max_tokens=5, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPTS[0] + plain


def test_the_end_of_a_text_counts_among_the_likelihoods_of_an_echoed_prompt(served: Served) -> None:
    (end, *_) = served.model.engine.architecture.eos
    given = {"max_tokens": 1, "echo": True, "logprobs": 1, "logit_bias": {str(end): 100}}
    choice = completion(served, [0, 5, 6], **given).choices[0]
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.token_logprobs) == 4


def test_several_prompts_are_answered_as_if_each_were_alone(served_dense: Served) -> None:
    alone = [completion(served_dense, prompt, max_tokens=8) for prompt in PROMPTS]
    together = completion(served_dense, PROMPTS, max_tokens=8, n=2)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    texts = [answer.choices[0].text for answer in alone]
    assert [choice.text for choice in together.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_more_prompts_than_there_is_room_for_are_refused(served: Served) -> None:
    answer = served.http().post("/v1/completions", json={"prompt": ["a"] * 200})
    assert answer.status_code == 400
    assert "send fewer prompts at a time" in answer.json()["error"]["message"]


def test_the_last_message_of_the_assistant_is_continued(served: Served) -> None:
    messages = [{"role": "user", "content": "Who was there?"}, {"role": "assistant", "content": "There was a king"}]
    answer = chat(served, messages=messages, temperature=0)
    prompt = "<user> Who was there?\n<assistant> There was a king"
    ids = served.model.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert answer.choices[0].message.content == completion(served, ids, max_tokens=16).choices[0].text


def test_tokens_end_a_text_or_do_not(served: Served) -> None:
    (end, *_) = served.model.engine.architecture.eos
    pushed = {"logit_bias": {str(end): 100}, "max_tokens": 6}
    assert completion(served, "a", **pushed).usage.completion_tokens == 0
    assert completion(served, "a", **pushed, extra_body={"ignore_eos": True}).usage.completion_tokens == 6
    answer = completion(served, "a", **pushed, extra_body={"min_tokens": 4})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (4, "stop")
    pushed = {"logit_bias": {"300": 100}, "max_tokens": 6, "extra_body": {"stop_token_ids": [300]}}
    assert completion(served, "a", **pushed).choices[0].finish_reason == "stop"


def test_a_repetition_penalty_is_of_the_whole_text(served: Served) -> None:
    (penalised,) = completion(served, PROMPTS[0] * 20, max_tokens=20, extra_body={"repetition_penalty": 1.5}).choices
    given = {"repeat_penalty": 1.5, "repeat_last_n": -1}
    assert completion(served, PROMPTS[0] * 20, max_tokens=20, extra_body=given).choices[0].text == penalised.text


@pytest.mark.parametrize("given", [{"guided_regex": "[0-9]{3}"}, {"guided_choice": ["123", "456"]}], ids=str)
def test_a_text_keeps_to_a_regular_expression_or_a_choice(served: Served, given: dict[str, Any]) -> None:
    text = chat(served, extra_body=given).choices[0].message.content
    assert len(text) == 3
    assert text.isdigit()


def test_any_model_s_name_is_taken_and_the_answer_names_the_real_one(served: Served) -> None:
    for given in ({}, {"model": "gpt-4o"}, {"model": None}):
        answer = served.http().post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **given}).json()
        assert answer["model"] == "tiny"


def test_each_chunk_tells_the_usage_until_then_where_it_is_asked_for(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(completion(served, PROMPTS[0], max_tokens=8, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 8
    assert all(chunk.usage.prompt_tokens == chunks[-1].usage.prompt_tokens for chunk in chunks)
