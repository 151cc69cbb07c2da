"""From the body of a request to prompts in tokens, sampling options and constraints for the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
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

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The tokens of a conversation, up to where the model's answer begins. Raises `Refusal`, also where there are
        tools and the model's template does not tell the model of them."""
        if tools and not takes_tools(self.model.template(with_tools=True) or ""):
            message = "tools: this model's chat template takes none; leave them out, or serve with --chat-template"
            raise Refusal(400, message, "tools", "unsupported_value")
        try:
            prompt = self.model.chat_prompt(messages, tools)
        except UserError as error:
            raise Refusal(400, str(error), "messages") from error
        return self._tokens(prompt, "messages", from_template=True)

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


SAMPLING_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
"""These parameters of requests are fields of `GenerateOptions`."""

Constraint = Callable[[], GrammarConstraint]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that can be served.

    sequences   -- what the engine makes, all after the same prompt
    parser      -- makes what tells text from calls
    """

    request: TextParameters
    sequences: tuple[GenerationRequest, ...]
    parser: Callable[[], AnswerParser] = PlainTextParser


class RequestPreparer:
    """Prepares requests for one model; in any thread, several at once.

    name -- of the model, which a request must give
    most -- texts that a request may ask for: no more are ever made and waiting together
    """

    def __init__(self, model: Model, prompts: Prompts, name: str, most: int) -> None:
        self._prompts, self._grammars, self._name, self._most = prompts, Grammars(model), name, most
        self._vocabulary, self._suggested = model.engine.architecture.vocabulary, model.packed.generation
        self._tool_format = tool_format(model.template(with_tools=True) or "")

    def prepare(self, request: TextParameters) -> PreparedRequest:
        """Return a request's prompt in tokens, options and parser. Raises `Refusal`."""
        self._check(request)
        if isinstance(request, CompletionRequest):
            ids = self._prompts.plain(request.prompt_value)
            return PreparedRequest(request, self._sequences(request, ids, self._constraint(request)))
        assert isinstance(request, ChatRequest)
        messages = [message.for_template() for message in request.messages]
        ids = self._prompts.chat(messages, [tool.for_template() for tool in request.callable_tools])
        constraint = self._call(request) if request.requires_tool_call else self._constraint(request)
        return PreparedRequest(request, self._sequences(request, ids, constraint), self._parser(request))

    def check_model(self, name: str) -> None:
        """Raise `Refusal` 404 for a model that is not the one."""
        if name != self._name:
            raise Refusal(404, f"model {name!r}: this server has {self._name!r}", "model", "model_not_found")

    def _check(self, request: TextParameters) -> None:
        self.check_model(request.model)
        if (request.n or 1) > self._most:
            message = f"n: {request.n} texts; this server has room for {self._most}: give n of at most {self._most}"
            raise Refusal(400, message, "n", "invalid_value")

    def _sequences(
        self, request: TextParameters, ids: list[int], constraint: Constraint | None
    ) -> tuple[GenerationRequest, ...]:
        limit = request.max_new_tokens
        if request.clips_max_tokens and limit is not None:
            limit = min(limit, max(self._prompts.context - len(ids), 1))
        tokens = self._prompts.checked_tokens(len(ids), limit)
        options = replace(generate_options(request, tokens, self._suggested), constraint=constraint)
        if outside := [id for id, _ in options.logit_bias if id >= self._vocabulary]:
            message = f"logit_bias: token {outside[0]}; the model has 0 to {self._vocabulary - 1}"
            raise Refusal(400, message, "logit_bias", "invalid_value")
        return tuple(
            GenerationRequest(tuple(ids), replace(options, seed=options.seed + number))
            for number in range(request.n or 1)
        )

    def _constraint(self, request: TextParameters) -> Constraint | None:
        if request.grammar is not None:
            return self._grammars.of_grammar(request.grammar, "grammar")
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
            logit_bias=tuple((int(id), bias) for id, bias in (request.logit_bias or {}).items()),
            logprobs=request.logprobs_count,
        ),
        suggested,
    )
    return replace(options, temperature=1.0) if options.temperature is None else options
