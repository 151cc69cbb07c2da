"""Prompts, from what a request says to tokens that fit the model."""

from collections.abc import Mapping, Sequence

from sparsepack.errors import UserError
from sparsepack.loading import Model
from sparsepack.runtime.generate import prompt_tokens
from sparsepack.serve.refusals import Refusal


class Prompts:
    """Makes prompts for one model; in any thread, several at once.

    Raises `ArtifactError` for a tokenizer that cannot be read.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._architecture = model.engine.architecture
        self.context = model.engine.context

    def plain(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt; those that are given as such stay as they are. Raises `Refusal`."""
        if not isinstance(prompt, str):
            if max(prompt) >= (vocabulary := self._architecture.vocabulary):
                raise Refusal(400, f"prompt: token {max(prompt)}; the model has 0 to {vocabulary - 1}", "prompt")
            return list(prompt)
        return self._tokens(prompt, "prompt")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the model's answer begins. Raises `Refusal`."""
        try:
            prompt = self._model.chat_prompt(messages)
        except UserError as error:
            raise Refusal(400, str(error), "messages") from error
        return self._tokens(prompt, "messages")

    def checked_tokens(self, prompt: int, asked: int | None) -> int:
        """How many tokens to make at most after a prompt of so many; None asks for as many as there is room for.
        Raises `Refusal` where they do not fit into the context."""
        room = self.context - prompt
        wanted = 1 if asked is None else asked
        if wanted > room:
            message = f"this model's maximum context length is {self.context} tokens here: shorten the prompt"
            message = f"{prompt} tokens of prompt and {wanted} to make; {message}"
            raise Refusal(400, message, "max_tokens", "context_length_exceeded")
        return room if asked is None else asked

    def _tokens(self, prompt: str, param: str) -> list[int]:
        try:
            return prompt_tokens(self._tokenizer, prompt, self._architecture.bos)
        except UserError as error:
            raise Refusal(400, str(error), param) from error
