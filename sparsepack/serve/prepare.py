"""From the body of a request to prompts in tokens, sampling options and constraints for the engine."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.tokens import TokenBytes
from sparsepack.runtime.generation.generate import apply_suggestions, prompt_tokens
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.grammar import GrammarConstraint, Grammars
from sparsepack.serve.guards import MAX_BODY_BYTES
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters
from sparsepack.serve.ticket import GenerationRequest
from sparsepack.serve.tools import AnswerParser, PlainTextParser, ToolCallParser, takes_tools, tool_format

BYTES_IN_JSON = 6
"""A byte of text takes at most so many in JSON, where `\\u0041` stands for one letter."""

OTHER_BYTES = 2**18
"""So many bytes of a body are for what stands beside the text: names of parameters, roles of messages, tools."""


class Prompts:
    """Makes prompts for one model; in any thread, several at once.

    context    -- tokens of prompt and answer together
    max_prompt_bytes -- of a text that can fit into the context, in UTF-8; None: the tokenizer does not tell
    max_body_bytes  -- bytes of a request's body with such a text

    Raises `ArtifactError` for a tokenizer that cannot be read.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._tokenizer = model.tokenizer
        self._architecture = model.engine.architecture
        self.context = model.engine.context
        self.bytes_of = TokenBytes(self._tokenizer)
        longest = self.bytes_of.most
        self.max_prompt_bytes = None if longest is None else self.context * longest
        needed = (
            MAX_BODY_BYTES if self.max_prompt_bytes is None else BYTES_IN_JSON * self.max_prompt_bytes + OTHER_BYTES
        )
        self.max_body_bytes = min(MAX_BODY_BYTES, needed)

    def plain(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt; those that are given as such stay as they are. Raises `Refusal`."""
        if not isinstance(prompt, str):
            if len(prompt) > self.context:
                raise self._too_long(f"{len(prompt):,} tokens of prompt", "prompt")
            if max(prompt) >= (vocabulary := self._architecture.vocabulary):
                raise Refusal(400, f"prompt: token {max(prompt)}; the model has 0 to {vocabulary - 1}", "prompt")
            return list(prompt)
        return self._tokens(prompt, "prompt")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **how: Any
    ) -> list[int]:
        """The tokens of a conversation, up to where the model's answer begins. Raises `Refusal`, also where there are
        tools and the model's template does not tell the model of them.

        how -- as `Model.chat_prompt` has it
        """
        return self._tokens(self.chat_text(messages, tools, **how), "messages", from_template=True)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **how: Any
    ) -> str:
        """What the template makes of a conversation; see `chat`. Some templates take a system message only at the
        beginning, or none: theirs are put together there, or before the first message of the user."""
        if tools and not takes_tools(self.model.template(with_tools=True) or ""):
            message = "tools: this model's chat template takes none; leave them out, or serve with --chat-template"
            raise Refusal(400, message, "tools", "unsupported_value")
        try:
            return self.model.chat_prompt(messages, tools, **how)
        except UserError as error:
            for others in _without_system_messages_between(messages):
                with suppress(UserError):
                    return self.model.chat_prompt(others, tools, **how)
            raise Refusal(400, str(error), "messages") from error

    def checked_tokens(self, prompt: int, request: int | None) -> int:
        """How many tokens to make at most after a prompt of so many; None asks for as many as there is room for.
        Raises `Refusal` where they do not fit into the context."""
        remaining = self.context - prompt
        requested = 1 if request is None else request
        if requested > remaining:
            remedy = "shorten the prompt" if remaining < 1 else f"give max_tokens of at most {remaining}"
            raise self._too_long(f"{prompt} tokens of prompt and {requested} to make", "max_tokens", remedy)
        return remaining if request is None else request

    def _too_long(self, what: str, param: str, remedy: str = "shorten the prompt") -> Refusal:
        message = f"{what}; this model's maximum context length is {self.context} tokens here: {remedy}"
        return Refusal(400, message, param, "context_length_exceeded")

    def _tokens(self, prompt: str, param: str, from_template: bool = False) -> list[int]:
        size = len(prompt.encode(errors="surrogatepass"))
        if self.max_prompt_bytes is not None and size > self.max_prompt_bytes:
            # Nothing is made of what cannot fit: four million bytes take a core for seconds.
            raise self._too_long(f"{size:,} bytes of prompt, of which {self.max_prompt_bytes:,} can fit", param)
        try:
            numbers = self._architecture
            ids = prompt_tokens(self._tokenizer, prompt, numbers.bos, numbers.vocabulary, from_template)
        except UserError as error:
            raise Refusal(400, str(error), param) from error
        if len(ids) > self.context:
            raise self._too_long(f"{len(ids):,} tokens of prompt", param)
        return ids


def _without_system_messages_between(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Conversations whose system messages stand together at the beginning, and in the first message of the user."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    if not system or not others:
        return
    yield [{"role": "system", "content": system}, *others]
    first = next((n for n, message in enumerate(others) if message["role"] == "user"), None)
    if first is not None:
        others[first] = {**others[first], "content": f"{system}\n\n{others[first]['content']}"}
        yield others


SAMPLING_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n"),
    *("frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos"),
)
"""These parameters of requests are fields of `GenerateOptions`."""

Constraint = Callable[[], GrammarConstraint]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that can be served.

    sequences   -- what the engine makes: `n` after each prompt, those of the first one first
    parser      -- makes what tells text from calls
    """

    request: TextParameters
    sequences: tuple[GenerationRequest, ...]
    parser: Callable[[], AnswerParser] = PlainTextParser


class RequestPreparer:
    """Prepares requests for one model; in any thread, several at once.

    name   -- of the model
    most   -- texts that a request may ask for: no more are ever made and waiting together
    strict -- whether a request must give the name
    """

    def __init__(self, model: Model, prompts: Prompts, name: str, most: int, strict: bool = False) -> None:
        self._prompts, self._grammars, self._name, self._most = prompts, Grammars(model), name, most
        self._strict = strict
        self._vocabulary, self._suggested = model.engine.architecture.vocabulary, model.packed.generation
        self._tool_format = tool_format(model.template(with_tools=True) or "")

    def prepare(self, request: TextParameters) -> PreparedRequest:
        """Return a request's prompt in tokens, options and parser. Raises `Refusal`."""
        self._check(request)
        if isinstance(request, CompletionRequest):
            constraint, sequences = self._constraint(request), list[GenerationRequest]()
            for prompt in request.prompts:
                ids = self._prompts.plain(prompt)
                sequences += self._sequences(request, ids, constraint, self._echo(request, prompt))
            return PreparedRequest(request, tuple(sequences))
        assert isinstance(request, ChatRequest)
        constraint = self._call(request) if request.requires_tool_call else self._constraint(request)
        return PreparedRequest(
            request, self._sequences(request, self.chat_tokens(request), constraint), self._parser(request)
        )

    def chat_tokens(self, request: ChatRequest) -> list[int]:
        """Return a chat's prompt in tokens. Raises `Refusal`."""
        return self._prompts.chat(*self._conversation(request), **self._template_variables(request))

    def chat_text(self, request: ChatRequest) -> str:
        """Return a chat's prompt as text. Raises `Refusal`."""
        return self._prompts.chat_text(*self._conversation(request), **self._template_variables(request))

    def _conversation(self, request: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        messages = [message.for_template() for message in request.messages]
        return messages, [tool.for_template() for tool in request.callable_tools]

    def _template_variables(self, request: ChatRequest) -> dict[str, Any]:
        continues, given = request.continues_message, request.chat_template_kwargs or {}
        variables = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort else {}
        return {
            "variables": {**variables, **given},
            "continue_final_message": continues,
            "add_generation_prompt": not continues and request.add_generation_prompt is not False,
        }

    def _echo(self, request: CompletionRequest, prompt: str | list[int]) -> str | None:
        if not request.echo:
            return None
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._prompts.bytes_of.of, prompt)).decode(errors="replace")

    def check_model(self, name: str) -> None:
        """Raise `Refusal` 404 for a model that is not the one."""
        if name != self._name:
            raise Refusal(404, f"model {name!r}: this server has {self._name!r}", "model", "model_not_found")

    def _check(self, request: TextParameters) -> None:
        if self._strict:
            self.check_model(request.model)
        prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        if prompts * (request.n or 1) > self._most:
            most = self._most // prompts
            remedy = f"give n of at most {most}" if most else "send fewer prompts at a time"
            message = (
                f"n: {request.n or 1} texts after {prompts} prompts; this server has room for {self._most}: {remedy}"
            )
            raise Refusal(400, message, "n" if most else "prompt", "invalid_value")

    def _sequences(
        self, request: TextParameters, ids: list[int], constraint: Constraint | None, echo: str | None = None
    ) -> tuple[GenerationRequest, ...]:
        limit = request.max_new_tokens
        if request.clips_max_tokens and limit is not None:
            limit = min(limit, max(self._prompts.context - len(ids), 1))
        tokens = self._prompts.checked_tokens(len(ids), limit)
        options = replace(generate_options(request, tokens, self._suggested), constraint=constraint)
        named = {"logit_bias": [id for id, _ in options.logit_bias], "stop_token_ids": options.stop_token_ids}
        for name, given in named.items():
            if max(given, default=0) >= self._vocabulary:
                message = f"{name}: token {max(given)}; the model has 0 to {self._vocabulary - 1}"
                raise Refusal(400, message, name, "invalid_value")
        return tuple(
            GenerationRequest(tuple(ids), replace(options, seed=options.seed + number), echo)
            for number in range(request.n or 1)
        )

    def _constraint(self, request: TextParameters) -> Constraint | None:
        if request.grammar is not None:
            return self._grammars.of_grammar(request.grammar, "grammar")
        if request.regex is not None:
            return self._grammars.of_regex(request.regex, "regex")
        if not request.requires_json:
            return None
        assert request.response_format is not None
        schema = request.response_format.json_schema
        return self._grammars.of_json({"type": "object"} if schema is None else schema.schema_, "response_format")

    def _call(self, request: ChatRequest) -> Constraint:
        if self._tool_format is None:
            message = 'tool_choice: how this model writes calls is not known; give "auto" and read its text'
            raise Refusal(400, message, "tool_choice", "unsupported_value")
        functions = [(tool.function.name, tool.function.parameters) for tool in request.callable_tools]
        return self._grammars.of_call(self._tool_format, functions, "tools")

    def _parser(self, request: ChatRequest) -> Callable[[], AnswerParser]:
        format, names = self._tool_format, frozenset(tool.function.name for tool in request.callable_tools)
        if format is None or not names:
            return PlainTextParser
        most = 1 if request.parallel_tool_calls is False else None
        return lambda: ToolCallParser(format, names, most)


def generate_options(request: TextParameters, tokens: int, suggested: Mapping[str, float]) -> GenerateOptions:
    """How tokens are chosen: as the request says, else as the model's makers suggest, else as at OpenAI; and by a new
    seed for each text unless one is given.

    suggested -- `PackedModel.generation`
    """
    given = {name: value for name in SAMPLING_PARAMETERS if (value := getattr(request, name)) is not None}
    options, _ = apply_suggestions(
        GenerateOptions(
            **{"seed": secrets.randbits(63), **given},
            tokens=tokens,
            stop=request.stop_strings,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logit_bias=tuple((int(id), bias) for id, bias in (request.logit_bias or {}).items()),
            logprobs=request.logprobs_count,
        ),
        suggested,
    )
    return replace(options, temperature=1.0) if options.temperature is None else options
