"""Prompts, from what a request says to tokens that fit the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.models.tokenizer.token_bytes import TokenBytes
from sparsepack.runtime.generation.generate import prompt_tokens
from sparsepack.serve.guards import MOST_BYTES
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.tools import takes_tools

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
