"""From the body of a request to prompts in tokens, sampling options and constraints for the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.tokens import TokenBytes
from sparsepack.runtime.generation.generate import apply_suggestions, prompt_tokens
from sparsepack.runtime.generation.sampling import Constraint
from sparsepack.runtime.options import GenerateOptions, generate_options
from sparsepack.serve.dialect import Dialect
from sparsepack.serve.grammar import Grammars
from sparsepack.serve.guards import MAX_BODY_BYTES
from sparsepack.serve.reasoning import Reasoning
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters
from sparsepack.serve.ticket import GenerationRequest
from sparsepack.serve.tools import AnswerParser, PlainTextParser

BYTES_IN_JSON = 6
"""A byte of text takes at most so many in JSON, where `\\u0041` stands for one letter."""

OTHER_BYTES = 2**18
"""So many bytes of a body are for the rest: names of parameters, roles of messages, tools."""


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

    def plain(self, prompt: str | Sequence[int], add_special: bool = True, fits: bool = True) -> list[int]:
        """The tokens of a prompt, with what the tokenizer puts before a text, or without; those that are given as such
        stay as they are. Raises `Refusal`.

        fits -- refuse what does not fit into the context
        """
        if not isinstance(prompt, str):
            if len(prompt) > self.context:
                raise self._too_long(f"{len(prompt):,} tokens of prompt", "prompt")
            if max(prompt) >= (vocabulary := self._architecture.vocabulary):
                raise Refusal(400, f"prompt: token {max(prompt)}; the model has 0 to {vocabulary - 1}", "prompt")
            return list(prompt)
        return self._tokens(prompt, "prompt", not add_special, fits) if prompt or add_special else []

    def chat(self, prompt: str, fits: bool = True) -> list[int]:
        """The tokens of a conversation as the chat template writes it; `fits` as for `plain`. Raises `Refusal`."""
        return self._tokens(prompt, "messages", from_template=True, fits=fits)

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

    def _tokens(self, prompt: str, param: str, from_template: bool, fits: bool) -> list[int]:
        size = len(prompt.encode(errors="surrogatepass"))
        if fits and self.max_prompt_bytes is not None and size > self.max_prompt_bytes:
            # Nothing is made of what cannot fit: four million bytes take a core for seconds.
            raise self._too_long(f"{size:,} bytes of prompt, of which {self.max_prompt_bytes:,} can fit", param)
        try:
            numbers = self._architecture
            ids = prompt_tokens(self._tokenizer, prompt, numbers.bos, numbers.vocabulary, from_template)
        except UserError as error:
            raise Refusal(400, str(error), param) from error
        if fits and len(ids) > self.context:
            raise self._too_long(f"{len(ids):,} tokens of prompt", param)
        return ids


SAMPLING_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n"),
    *("frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "logit_bias"),
)
"""These parameters of requests are fields of `GenerateOptions`."""

ConstraintFactory = Callable[[], Constraint]


@dataclass(frozen=True)
class PreparedRequest:
    """A request that can be served.

    sequences   -- what the engine makes: `n` after each prompt, those of the first one first
    parser      -- makes the parser of each answer
    """

    request: TextParameters
    sequences: tuple[GenerationRequest, ...]
    parser: Callable[[], AnswerParser] = PlainTextParser


class RequestPreparer:
    """Prepares requests for one model; in any thread, several at once.

    name   -- of the model
    most   -- texts that a request may ask for: no more are ever made and waiting together
    strict -- whether a request must give the name
    reasoning -- `ServeOptions.reasoning`
    """

    def __init__(
        self, model: Model, prompts: Prompts, name: str, most: int, strict: bool = False, reasoning: str = "auto"
    ) -> None:
        self._prompts, self._grammars, self._name, self._most = prompts, Grammars(model), name, most
        self._strict = strict
        self._vocabulary, self._suggested = model.engine.architecture.vocabulary, model.packed.generation
        self._dialect = Dialect(model, reasoning)

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
        prompt = self.chat_text(request)
        reasoning = self._dialect.reasoning(prompt, request.template_variables)
        constraint = self._chat_constraint(request, reasoning)
        functions = {tool.function.name: tool.function.parameters for tool in request.callable_tools}
        most = 1 if request.parallel_tool_calls is False else None
        return PreparedRequest(
            request,
            self._sequences(request, self._prompts.chat(prompt), constraint),
            self._dialect.parser(functions, most, reasoning),
        )

    def chat_tokens(self, request: ChatRequest) -> list[int]:
        """Return a chat's prompt in tokens, which may be longer than the context. Raises `Refusal`."""
        return self._prompts.chat(self.chat_text(request), fits=False)

    def chat_text(self, request: ChatRequest) -> str:
        """Return a chat's prompt as text. Raises `Refusal`."""
        messages = [message.for_template() for message in request.messages]
        tools = [tool.for_template() for tool in request.callable_tools]
        continues = request.continues_message
        begins = not continues and request.add_generation_prompt is not False
        try:
            return self._dialect.prompt(
                messages,
                tools,
                request.template_variables,
                continue_final_message=continues,
                add_generation_prompt=begins,
            )
        except UserError as error:
            raise Refusal(400, str(error), "messages") from error

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
        self, request: TextParameters, ids: list[int], constraint: ConstraintFactory | None, echo: str | None = None
    ) -> tuple[GenerationRequest, ...]:
        limit = request.max_new_tokens
        if request.clips_max_tokens and limit is not None:
            limit = min(limit, max(self._prompts.context - len(ids), 1))
        tokens = self._prompts.checked_tokens(len(ids), limit)
        marks = self._dialect.preserved_tokens(bool(request.callable_tools)) if isinstance(request, ChatRequest) else ()
        options = sampling_options(request, tokens, self._suggested)
        options = replace(options, constraint=constraint, preserved_tokens=marks)
        named = {"logit_bias": [id for id, _ in options.logit_bias], "stop_token_ids": options.stop_token_ids}
        for name, given in named.items():
            if max(given, default=0) >= self._vocabulary:
                message = f"{name}: token {max(given)}; the model has 0 to {self._vocabulary - 1}"
                raise Refusal(400, message, name, "invalid_value")
        return tuple(
            GenerationRequest(tuple(ids), replace(options, seed=options.seed + number), echo)
            for number in range(request.n or 1)
        )

    def _constraint(self, request: TextParameters, reasoning: Reasoning | None = None) -> ConstraintFactory | None:
        if request.grammar is not None:
            return self._grammars.of_grammar(request.grammar, "grammar", reasoning)
        if request.regex is not None:
            return self._grammars.of_regex(request.regex, "regex", reasoning)
        if not request.requires_json:
            return None
        assert request.response_format is not None
        schema = request.response_format.json_schema
        written = {"type": "object"} if schema is None else schema.schema_
        return self._grammars.of_json(written, "response_format", reasoning)

    def _chat_constraint(self, request: ChatRequest, reasoning: Reasoning | None) -> ConstraintFactory | None:
        """A call where there must be one; else the format that is given; else calls, once the model begins one."""
        functions = [(tool.function.name, tool.function.parameters) for tool in request.callable_tools]
        calls, form = (functions, "tools", reasoning), self._dialect.tools
        if request.requires_tool_call:
            several = request.tool_choice == "required" and request.parallel_tool_calls is True
            return self._grammars.of_calls(form, *calls, several=several)
        given = self._constraint(request, reasoning)
        if given is not None or not functions:
            return given
        return self._grammars.of_optional_calls(form, *calls, several=request.parallel_tool_calls is not False)


def sampling_options(request: TextParameters, tokens: int, suggested: Mapping[str, float]) -> GenerateOptions:
    """How tokens are chosen: as the request says, else as the model's makers suggest, else as at OpenAI; and by a new
    seed for each text unless one is given.

    suggested -- `PackedModel.generation`
    """
    given = {name: getattr(request, name) for name in SAMPLING_PARAMETERS}
    stops = {"stop": request.stop_strings, "stop_token_ids": tuple(request.stop_token_ids or ())}
    options = GenerateOptions(tokens, seed=secrets.randbits(63), logprobs=request.logprobs_count)
    options, _ = apply_suggestions(generate_options(options, {**given, **stops}), suggested)
    return replace(options, temperature=1.0) if options.temperature is None else options
