"""From the body of a request to prompts in tokens, sampling options and constraints for the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.token_bytes import TokenBytes
from sparsepack.runtime.generation.generate import prompt_tokens
from sparsepack.runtime.generation.suggestion import as_suggested
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.answers import Likelihoods, chat_likelihoods, completion_likelihoods
from sparsepack.serve.grammar import GrammarConstraint, Grammars
from sparsepack.serve.guards import MOST_BYTES, MOST_VALUES, check_values
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import ChatRequest, CompletionRequest, TextParameters, read_request
from sparsepack.serve.tools import AnswerReader, CallReader, TextReader, takes_tools, tool_format
from sparsepack.serve.worker import TextRequest

BYTES_IN_JSON = 6
"""A byte of text takes at most so many in JSON, where `\\u0041` stands for one letter."""

BYTES_BESIDE = 2**18
"""So many bytes of a body are for what stands beside the text: names of parameters, roles of messages, tools."""


class Prompts:
    """Makes prompts for one model; in any thread, several at once.

    context    -- tokens of prompt and answer together
    most_bytes -- of a text that can fit into the context, in UTF-8; None: the tokenizer does not tell
    most_body  -- bytes of a request's body with such a text

    Raises `ArtifactError` for a tokenizer that cannot be read.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._tokenizer = model.tokenizer
        self._architecture = model.engine.architecture
        self.context = model.engine.context
        self.bytes_of = TokenBytes(self._tokenizer)
        longest = self.bytes_of.most
        self.most_bytes = None if longest is None else self.context * longest
        needed = MOST_BYTES if self.most_bytes is None else BYTES_IN_JSON * self.most_bytes + BYTES_BESIDE
        self.most_body = min(MOST_BYTES, needed)

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

    def checked_tokens(self, prompt: int, asked: int | None) -> int:
        """How many tokens to make at most after a prompt of so many; None asks for as many as there is room for.
        Raises `Refusal` where they do not fit into the context."""
        room = self.context - prompt
        wanted = 1 if asked is None else asked
        if wanted > room:
            remedy = "shorten the prompt" if room < 1 else f"give max_tokens of at most {room}"
            raise self._too_long(f"{prompt} tokens of prompt and {wanted} to make", "max_tokens", remedy)
        return room if asked is None else asked

    def _too_long(self, what: str, param: str, remedy: str = "shorten the prompt") -> Refusal:
        message = f"{what}; this model's maximum context length is {self.context} tokens here: {remedy}"
        return Refusal(400, message, param, "context_length_exceeded")

    def _tokens(self, prompt: str, param: str, from_template: bool = False) -> list[int]:
        size = len(prompt.encode(errors="surrogatepass"))
        if self.most_bytes is not None and size > self.most_bytes:
            # Nothing is made of what cannot fit: four million bytes take a core for seconds.
            raise self._too_long(f"{size:,} bytes of prompt, of which {self.most_bytes:,} can fit", param)
        try:
            numbers = self._architecture
            ids = prompt_tokens(self._tokenizer, prompt, numbers.bos, numbers.vocabulary, from_template)
        except UserError as error:
            raise Refusal(400, str(error), param) from error
        if len(ids) > self.context:
            raise self._too_long(f"{len(ids):,} tokens of prompt", param)
        return ids


CHOOSING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
"""These parameters of requests are fields of `GenerateOptions`."""

Constraint = Callable[[], GrammarConstraint]


@dataclass(frozen=True)
class Prepared:
    """A request that can be served.

    texts       -- what the engine makes, all after the same prompt
    likelihoods -- makes what says how likely tokens were, for each text; None: nothing does
    reader      -- makes what tells text from calls
    """

    asked: TextParameters
    texts: tuple[TextRequest, ...]
    likelihoods: Callable[[], Likelihoods] | None
    reader: Callable[[], AnswerReader] = TextReader


class Preparation:
    """Prepares requests for one model; in any thread, several at once.

    name -- of the model, which a request must give
    most -- texts that a request may ask for: no more are ever made and waiting together
    """

    def __init__(self, model: Model, prompts: Prompts, name: str, most: int) -> None:
        self._prompts, self._grammars, self._name, self._most = prompts, Grammars(model), name, most
        self._vocabulary, self._suggested = model.engine.architecture.vocabulary, model.packed.generation
        self._tool_format = tool_format(model.template(with_tools=True) or "")

    def completion(self, body: bytes) -> Prepared:
        """From the body of POST /v1/completions. Raises `Refusal`."""
        check_values(body, MOST_VALUES + self._prompts.context)
        asked = read_request(CompletionRequest, body)
        self._check(asked)
        ids = self._prompts.plain(asked.text_or_ids)
        return Prepared(asked, self._texts(asked, ids, self._constraint(asked)), self._likelihoods(asked))

    def chat(self, body: bytes) -> Prepared:
        """From the body of POST /v1/chat/completions. Raises `Refusal`."""
        check_values(body, MOST_VALUES)
        asked = read_request(ChatRequest, body)
        self._check(asked)
        messages = [message.for_template() for message in asked.messages]
        ids = self._prompts.chat(messages, [tool.for_template() for tool in asked.callable_tools])
        texts = self._texts(asked, ids, self._call(asked) if asked.must_call else self._constraint(asked))
        return Prepared(asked, texts, self._likelihoods(asked), self._reader(asked))

    def check_model(self, name: str) -> None:
        """Raise `Refusal` 404 for a model that is not the one."""
        if name != self._name:
            raise Refusal(404, f"model {name!r}: this server has {self._name!r}", "model", "model_not_found")

    def _check(self, asked: TextParameters) -> None:
        self.check_model(asked.model)
        if (asked.n or 1) > self._most:
            message = f"n: {asked.n} texts; this server has room for {self._most}: give n of at most {self._most}"
            raise Refusal(400, message, "n", "invalid_value")

    def _texts(self, asked: TextParameters, ids: list[int], constraint: Constraint | None) -> tuple[TextRequest, ...]:
        tokens = self._prompts.checked_tokens(len(ids), asked.most_tokens)
        options = replace(options_of(asked, tokens, self._suggested), constraint=constraint)
        if outside := [id for id, _ in options.logit_bias if id >= self._vocabulary]:
            message = f"logit_bias: token {outside[0]}; the model has 0 to {self._vocabulary - 1}"
            raise Refusal(400, message, "logit_bias", "invalid_value")
        return tuple(
            TextRequest(tuple(ids), replace(options, seed=options.seed + number)) for number in range(asked.n or 1)
        )

    def _constraint(self, asked: TextParameters) -> Constraint | None:
        if asked.grammar is not None:
            return self._grammars.of_grammar(asked.grammar, "grammar")
        if not asked.keeps_to_json:
            return None
        assert asked.response_format is not None
        wanted = asked.response_format.json_schema
        return self._grammars.of_json({"type": "object"} if wanted is None else wanted.schema_, "response_format")

    def _call(self, asked: ChatRequest) -> Constraint:
        if self._tool_format is None:
            message = 'tool_choice: how this model writes calls is not known; give "auto" and read its text'
            raise Refusal(400, message, "tool_choice", "unsupported_value")
        functions = [(tool.function.name, tool.function.parameters) for tool in asked.callable_tools]
        return self._grammars.of_call(self._tool_format, functions, "tools")

    def _reader(self, asked: ChatRequest) -> Callable[[], AnswerReader]:
        format, names = self._tool_format, frozenset(tool.function.name for tool in asked.callable_tools)
        if format is None or not names:
            return TextReader
        most = 1 if asked.parallel_tool_calls is False else None
        return lambda: CallReader(format, names, most)

    def _likelihoods(self, asked: TextParameters) -> Callable[[], Likelihoods] | None:
        if asked.likeliest is None:
            return None
        form = chat_likelihoods if isinstance(asked, ChatRequest) else completion_likelihoods
        return partial(form, self._prompts.bytes_of.of)


def options_of(asked: TextParameters, tokens: int, suggested: Mapping[str, float]) -> GenerateOptions:
    """How tokens are chosen: as the request says, else as the model's makers suggest, else as at OpenAI; and by a new
    seed for each text unless one is given.

    suggested -- `PackedModel.generation`
    """
    given = {name: value for name in CHOOSING if (value := getattr(asked, name)) is not None}
    options, _ = as_suggested(
        GenerateOptions(
            **{"seed": secrets.randbits(63), **given},
            tokens=tokens,
            stop=asked.stops,
            logit_bias=tuple((int(id), bias) for id, bias in (asked.logit_bias or {}).items()),
            logprobs=asked.likeliest,
        ),
        suggested,
    )
    return replace(options, temperature=1.0) if options.temperature is None else options
