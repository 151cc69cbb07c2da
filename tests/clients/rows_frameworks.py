"""Libraries on top of the vendors' clients."""

import os
from functools import partial
from typing import Literal

from pydantic import BaseModel
from rows import MODEL, row

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices in the internet
QUESTION = "Who was there?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


def _langchain(url, key, **options):
    from langchain_openai import ChatOpenAI

    options = {"max_tokens": 500, "max_retries": 0, **options}
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=key, **options)


@row("langchain-openai", "ChatOpenAI.invoke and stream")
def langchain(url, key):
    chat = _langchain(url, key, max_tokens=16, temperature=0)
    content = chat.invoke(QUESTION).content
    assert content
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == content
    return "an answer, and the same in pieces"


@row("langchain-openai", "ChatOpenAI.bind_tools, tool_choice any")
def langchain_tools(url, key):
    (call,) = _langchain(url, key).bind_tools([Weather], tool_choice="any").invoke(QUESTION).tool_calls
    assert call["args"]["city"] in ("Oslo", "Rome")
    return "a tool call"


@row("langchain-openai", "ChatOpenAI.with_structured_output")
def langchain_structured(url, key):
    assert _langchain(url, key).with_structured_output(Weather).invoke(QUESTION).city in ("Oslo", "Rome")
    return "an instance of the model"


@row("langchain-openai", "ChatOpenAI, use_responses_api, invoke and stream")
def langchain_responses(url, key):
    chat = _langchain(url, key, max_tokens=16, temperature=0, use_responses_api=True)
    text = chat.invoke(QUESTION).text
    assert text
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == text
    return "an answer, and the same in pieces"


def _langchain_anthropic(url, key, **options):
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=MODEL, base_url=url, api_key=key, max_retries=0, **{"max_tokens": 500, **options})


@row("langchain-anthropic", "ChatAnthropic.invoke and stream")
def langchain_anthropic(url, key):
    chat = _langchain_anthropic(url, key, max_tokens=16)
    assert chat.invoke(QUESTION).content
    assert "".join(chunk.text for chunk in chat.stream(QUESTION))
    return "an answer, and one in pieces"


@row("langchain-anthropic", "ChatAnthropic.bind_tools, tool_choice any")
def langchain_anthropic_tools(url, key):
    (call,) = _langchain_anthropic(url, key).bind_tools([Weather], tool_choice="any").invoke(QUESTION).tool_calls
    assert call["args"]["city"] in ("Oslo", "Rome")
    return "a tool call"


MESSAGES = [{"role": "user", "content": QUESTION}]


@row("litellm", "completion of openai/MODEL, stream")
def litellm_openai(url, key):
    from litellm import completion

    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": key, "max_tokens": 16, "num_retries": 0}
    assert completion(messages=MESSAGES, **options).choices[0].message.content
    chunks = completion(messages=MESSAGES, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return "an answer, and one in pieces"


@row("litellm", "completion of anthropic/MODEL")
def litellm_anthropic(url, key):
    from litellm import completion

    options = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": key, "max_tokens": 16, "num_retries": 0}
    assert completion(messages=MESSAGES, **options).choices[0].message.content
    return "an answer"


@row("llama-index-llms-openai-like", "OpenAILike.chat and stream_chat")
def llama_index(url, key):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key=key, is_chat_model=True, max_tokens=16, temperature=0, max_retries=0
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    content = model.chat(messages).message.content
    assert content
    assert "".join(piece.delta for piece in model.stream_chat(messages)) == content
    return "an answer, and the same in pieces"


def _instructor(url, key, mode):
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    client = instructor.from_openai(client, mode=instructor.Mode[mode])
    options = {"response_model": Weather, "max_tokens": 500, "max_retries": 0}
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, **options).city in ("Oslo", "Rome")
    return "an instance of the model"


def _pydantic_ai(url, key, kind):
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, kind)(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    agent = Agent(model, output_type=Weather, model_settings={"max_tokens": 500})
    assert agent.run_sync(QUESTION).output.city in ("Oslo", "Rome")
    return "an instance of the type"


for mode, name in (("TOOLS", "tools"), ("JSON_SCHEMA", "JSON_SCHEMA")):
    row("instructor", f"from_openai, a pydantic model by {name}")(partial(_instructor, mode=mode))
for kind in ("OpenAIChatModel", "OpenAIResponsesModel"):
    row("pydantic-ai-slim", f"Agent with {kind} and an output type")(partial(_pydantic_ai, kind=kind))
