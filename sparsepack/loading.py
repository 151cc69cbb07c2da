"""`load`: an artifact in memory, ready to continue texts, to converse, and to be asked for its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.locate import located_artifact
from sparsepack.models.tokenizer.chat import Message, render_chat
from sparsepack.option import check_type, check_types, with_values
from sparsepack.progress import say
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import requested_backend
from sparsepack.runtime.generation.generate import (
    Generated,
    Generation,
    apply_suggestions,
    check_generate_options,
    generate,
    generate_together,
    open_tokenizer,
    prompt_tokens,
)
from sparsepack.runtime.options import CHAT_TOKENS, EngineOptions, GenerateOptions, generate_options


@dataclass(frozen=True)
class Model:
    """An artifact and the engine that runs it, one text at a time or several together.

    chat_template -- the artifact's; `dataclasses.replace` gives a model that converses by another
    """

    packed: PackedModel
    engine: Engine
    chat_template: str | None = None

    def __repr__(self) -> str:
        return f"Model({self.packed.summary}, {self.engine.description})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises `ArtifactError` where it is damaged."""
        return open_tokenizer(self.packed.tokenizer_json)

    def generate(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Generation:
        """Continue a prompt: an iterator over pieces of text as they are made, whose `result()` says how it ended.

        options, changes -- `GenerateOptions`, and fields of it that are different: `generate("The", tokens=8)`, by the
                            names of OpenAI or transformers, too: `max_tokens`, `max_new_tokens`
                            (`runtime.options.generate_options`). What is left None of how tokens are chosen is as the
                            model's makers suggest

        The engine forgets its text, so that the same prompt gives the same text. Raises `UserError` as
        `runtime.generation.generate.generate` does, before anything runs.
        """
        check_type("prompt", prompt, str, UserError)
        return generate(self.engine, self.tokenizer, self._tokens(prompt), self._with(options, changes))

    def generate_together(
        self, prompts: Sequence[str], options: GenerateOptions | None = None, **changes: Any
    ) -> list[Generated]:
        """Continue a prompt in each of the engine's sequences, with options as for `generate`; see
        `runtime.generation.generate.generate_together`."""
        check_type("prompts", prompts, tuple[str, ...], UserError)
        ids = [self._tokens(prompt) for prompt in prompts]
        return generate_together(self.engine, self.tokenizer, ids, self._with(options, changes))

    def chat(self, messages: Sequence[Message], options: GenerateOptions | None = None, **changes: Any) -> Generation:
        """Answer the last message of a conversation: as `generate`, with the text that the chat template makes of it.

        messages -- `{"role": "user", "content": "Hello"}` and so on, from the first one
        options  -- `CHAT_TOKENS` at most unless given

        What the engine has of the conversation stays in its cache: give the messages of the last call, its answer as
        `{"role": "assistant", "content": TEXT}` and a new one, and only what is new is prefilled. Raises `UserError`
        also where the model has no chat template, or it refuses the messages.
        """
        check_type("messages", messages, tuple[dict, ...], UserError)
        options = self._with(options or GenerateOptions(CHAT_TOKENS), changes)
        prompt = self._tokens(self.chat_prompt(messages), from_template=True)
        return generate(self.engine, self.tokenizer, prompt, options, keep=True)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> str:
        """The text that the chat template makes of a conversation, up to where the answer begins. Raises as `chat`.

        tools     -- that the model may call, as OpenAI's protocol has them; the template tells the model of them
        variables -- further ones of the template, such as `enable_thinking`
        how       -- add_generation_prompt, continue_final_message of `render_chat`
        """
        special_tokens = self.packed.named_tokens(self.tokenizer)
        template = self.template(bool(tools))
        return render_chat(template, messages, tools=tools, variables=variables, **how, **special_tokens)

    def template(self, with_tools: bool) -> str | None:
        """The chat template of a conversation with or without tools: as in transformers, some models bring another one
        for tools, which goes with their own."""
        own = self.chat_template == self.packed.chat_template
        return (self.packed.tool_template if with_tools and own else None) or self.chat_template

    def logits(self, text: str | Sequence[int], sparse_from: int | None = None) -> Tensor:
        """The logits after every token of a text: float32 [tokens, vocabulary], on the engine's device.

        text        -- BOS goes before it where the tokenizer puts it there; or ids, to which nothing is added
        sparse_from -- positions from this one on run sparse, as decoding does; None: none, as in a prompt

        The engine forgets its text. Raises `UserError` for a text that is empty or longer than the context, and for
        an id or a position that there is not.
        """
        check_type("text", text, str | tuple[int, ...], UserError)
        ids = self._tokens(text) if isinstance(text, str) else list(text)
        with self.engine.lock:
            self.engine.claim()
            return self.engine.teacher_forced(ids, len(ids) if sparse_from is None else sparse_from)

    def _tokens(self, text: str, from_template: bool = False) -> list[int]:
        numbers = self.packed.architecture
        return prompt_tokens(self.tokenizer, text, numbers.bos, numbers.vocabulary, from_template)

    def _with(self, options: GenerateOptions | None, changes: dict[str, Any]) -> GenerateOptions:
        check_type("options", options, GenerateOptions | None, UserError)
        options = generate_options(options or GenerateOptions(), changes, self.packed.generation)
        check_types(options, UserError)
        return check_generate_options(apply_suggestions(options, self.packed.generation)[0])


def load(
    path: Path | str,
    device: str | None = None,
    context: int | None = None,
    *,
    options: EngineOptions | None = None,
    verify: bool = True,
    **changes: Any,
) -> Model:
    """Open an artifact to run it; see `runtime.engine.Engine`.

    path                     -- of the file, or a name on the hub: `OWNER/NAME`, `OWNER/NAME:FILE.gguf`
    options                  -- how it runs
    device, context, changes -- fields of the options that are different: `load(path, "cuda", threads=2)`
    verify                   -- check the hash of every tensor first

    Standard error says where what runs is not the best for the device, and why.
    Raises `ArtifactError` for a file that is damaged or cannot be run, `UserError` for what the engine refuses.
    """
    check_type("path", path, Path, ArtifactError)
    check_type("options", options, EngineOptions | None, UserError)
    given = {"device": device, "context": context}
    changes |= {name: value for name, value in given.items() if value is not None}
    options = with_values(options or EngineOptions(), changes, UserError)
    requested_backend(options)  # before a large file is read
    packed = read_packed(located_artifact(str(path)), verify=verify)
    engine = Engine(packed, options)
    say(*engine.notes)
    return Model(packed, engine, packed.chat_template)


def describe_runtime(engine: Engine) -> str:
    """What runs a model: a line for people."""
    return f"runtime: {engine.description}{', dense' if engine.dense else ''}"
