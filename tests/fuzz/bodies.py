"""Bodies of requests to each endpoint of `serve`, which are changed, and the server that reads them."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx

from sparsepack.loading import load
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.serve.app import Service, create_app
from sparsepack.serve.batch import ContinuousBatch
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.prepare import Prompts
from sparsepack.serve.scheduler import Scheduler
from tests.artifacts_for_tests import write_zigzag
from tests.fuzz.harness import Broken, Target
from tests.fuzz.mutate import json_changed

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}<tool_call>"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}{{ m.tool_calls }}\n{% endfor %}<assistant>"
)
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": False}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "sunny"}]}],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    **SAMPLING,
}
RESPONSES = {
    "model": "tiny",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ],
    "max_output_tokens": 4,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "store": True,
    **SAMPLING,
}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "max_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "n": 1,
    **SAMPLING,
}
COMPLETION = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 1, "stop": ["x"], **SAMPLING}
LIBERAL = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ["Who?", {"text": "Where?"}, None]},
        {"role": "assistant", "content": "There", "function_call": {"name": "f", "arguments": {"city": "Oslo"}}},
        {"role": "function", "name": "f", "content": None},
        {"role": "assistant", "content": "In", "reasoning": "Hm."},
    ],
    "n_predict": 4,
    "functions": [{"name": "f", "parameters": SCHEMA}],
    "function_call": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
    "logit_bias": [[5, 1], [6, False]],
    "stop": ["x", "", None],
    "stop_token_ids": [5],
    "min_tokens": 2,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_object", "schema": SCHEMA},
    "best_of": 1,
    "seed": -1,
    **SAMPLING,
}
GUIDED = {"prompt": "Who", "structured_outputs": {"regex": "[a-c]+", "choice": None}, "max_tokens": 4, **SAMPLING}
ECHO = {"prompt": [[1, 2, 3], [4, 5]], "echo": True, "logprobs": 2, "max_tokens": 1, "ignore_eos": True, **SAMPLING}
OLLAMA = {
    "model": "tiny:latest",
    "messages": [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "options": {"num_predict": 4, "temperature": 0.5, "stop": ["x"], "num_ctx": 512},
    "think": False,
    "keep_alive": "5m",
    "logprobs": True,
    "stream": False,
}
GENERATE = {"prompt": "Who?", "system": "Be brief.", "format": SCHEMA, "options": {"num_predict": 4}, "stream": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": None, "response_format": FORMAT}),
    ("/v1/responses", RESPONSES),
    (
        "/v1/responses",
        {**RESPONSES, "tools": None, "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}},
    ),
    ("/v1/messages", ANTHROPIC),
    (
        "/v1/messages",
        {**ANTHROPIC, "tools": None, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    ("/v1/messages/count_tokens", ANTHROPIC),
    ("/v1/chat/completions", LIBERAL),
    ("/v1/completions", GUIDED),
    ("/v1/completions", ECHO),
    ("/api/chat", OLLAMA),
    ("/api/generate", GENERATE),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/tokenize", {"content": "Who", "add_special": True, "with_pieces": True}),
    ("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/apply-template", {"messages": CHAT["messages"]}),
)


def requests_target(model: Path, folder: Path) -> Target:
    """A server of a model, which is sent changed bodies, half of them for a stream."""
    send = _server(model, folder)
    for path, body in BODIES:
        if (response := send(path, json.dumps(body).encode())).status_code != 200:
            raise Broken(f"{path}: a good body is refused: {response.text}")

    def write(random: Random, into: Path) -> None:
        path, body = random.choice(BODIES)
        text = json.dumps({**body, "stream": random.random() < 0.5} if "stream" in body else body)
        (into / "path").write_text(path)
        (into / "body.json").write_bytes(json_changed(random, text).encode("utf-8", "surrogatepass"))

    def read(inside: Path) -> None:
        response = send((inside / "path").read_text(), (inside / "body.json").read_bytes())
        if response.status_code >= 500 or b"server_error" in response.content or b"api_error" in response.content:
            raise Broken(f"status {response.status_code}: {response.text[:1000]}")
        if response.headers["content-type"].startswith("application/json"):
            response.json()
            return
        for line in response.content.decode().splitlines():
            if line.startswith("data: {"):
                json.loads(line.removeprefix("data: "))

    return Target("requests", write, read)


def _server(model: Path, folder: Path) -> Callable[[str, bytes], httpx.Response]:
    """Return what sends a body to a path of the application, without a socket."""
    write_zigzag(open_checkpoint(model), {}, folder / "tiny.gguf")
    loaded = replace(load(folder / "tiny.gguf", threads=1, sequences=2), chat_template=TEMPLATE)
    service = Service(Scheduler(ContinuousBatch(loaded), 8), Prompts(loaded), ServeOptions(), "tiny", "fp_fuzz")
    transport = httpx.ASGITransport(create_app(service))
    runner = asyncio.Runner()

    async def send(path: str, body: bytes) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    return lambda path, body: runner.run(send(path, body))
