"""`load`: an artifact in memory, ready to continue texts, to converse, and to be asked for its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from sparsepack.artifacts.open import read_packed
from sparsepack.models.chat import Message, render_chat
from sparsepack.models.packed import PackedModel
from sparsepack.runtime.backends import backend_for, backend_named, batch_backend
from sparsepack.runtime.batch import BatchEngine
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generate import (
    Generated,
    Generation,
    checked,
    generate,
    generate_together,
    open_tokenizer,
    prompt_tokens,
)
from sparsepack.runtime.options import CHAT_TOKENS, GenerateOptions
from sparsepack.verb_module import callable_as


@dataclass(frozen=True)
class Model:
    """An artifact and the engine that runs it, one text at a time.

    chat_template -- the artifact's; `dataclasses.replace` gives a model that converses by another
    """

    packed: PackedModel
    engine: Engine
    chat_template: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises `ArtifactError` where it is damaged."""
        return open_tokenizer(self.packed.tokenizer_json)

    def generate(self, prompt: str, options: GenerateOptions | None = None, **changes: Any) -> Generation:
        """Continue a prompt: an iterator over pieces of text as they are made, whose `result()` says how it ended.

        options, changes -- `GenerateOptions`, and fields of it that are different: `generate("The", tokens=8)`

        The engine forgets its text, so that the same prompt gives the same text. Raises `UserError` as
        `runtime.generate.generate` does, before anything runs.
        """
        return generate(self.engine, self.tokenizer, prompt, _with(options, changes))

    def chat(self, messages: Sequence[Message], options: GenerateOptions | None = None, **changes: Any) -> Generation:
        """Answer the last message of a conversation: as `generate`, with the text that the chat template makes of it.

        messages -- `{"role": "user", "content": "Hello"}` and so on, from the first one
        options  -- `CHAT_TOKENS` at most unless given

        What the engine has of the conversation stays in its cache: give the messages of the last call, its answer as
        `{"role": "assistant", "content": TEXT}` and a new one, and only what is new is prefilled. Raises `UserError`
        also where the model has no chat template, or it refuses the messages.
        """
        options = _with(options or GenerateOptions(CHAT_TOKENS), changes)
        return generate(self.engine, self.tokenizer, self.chat_prompt(messages), options, keep=True)

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """The text that the chat template makes of a conversation, up to where the answer begins. Raises as `chat`."""
        numbers = self.packed.architecture
        bos, eos = (
            None if id is None else self.tokenizer.id_to_token(id)
            for id in (numbers.bos, numbers.eos[0] if numbers.eos else None)
        )
        return render_chat(self.chat_template, messages, bos_token=bos, eos_token=eos)

    def logits(self, text: str | Sequence[int], sparse_from: int | None = None) -> Tensor:
        """The logits after every token of a text: float32 [tokens, vocabulary], on the engine's device.

        text        -- BOS goes before it where the model has one; or ids, to which nothing is added
        sparse_from -- positions from this one on run sparse, as decoding does; None: none, as in a prompt

        The engine forgets its text. Raises `UserError` for a text that is empty or longer than the context, and for
        an id or a position that there is not.
        """
        ids = prompt_tokens(self.tokenizer, text, self.packed.architecture.bos) if isinstance(text, str) else list(text)
        return self.engine.teacher_forced(ids, len(ids) if sparse_from is None else sparse_from)


@dataclass(frozen=True)
class ModelOfSeveral:
    """An artifact and the engine that runs it, several texts together."""

    packed: PackedModel
    engine: BatchEngine

    def generate(self, prompts: Sequence[str], options: GenerateOptions | None = None) -> list[Generated]:
        """Continue a prompt in each sequence; see `runtime.generate.generate_together`."""
        return generate_together(self.engine, open_tokenizer(self.packed.tokenizer_json), prompts, options)


def load(
    path: Path | str,
    device: str = "cpu",
    context: int | None = None,
    *,
    dense: bool = False,
    backend: str | None = None,
    threads: int | None = None,
    offload: bool = False,
    verify: bool = True,
) -> Model:
    """Open an artifact to run it; see `runtime.engine.Engine` for the options.

    verify -- check the hash of every tensor first

    Raises `ArtifactError` for a file that is damaged or cannot be run, `UserError` for what the engine refuses.
    """
    if offload:  # before a large file is read
        (backend_for(device) if backend is None else backend_named(backend)).check_offloads()
    packed = read_packed(Path(path), verify=verify)
    engine = Engine(packed, device, context, dense=dense, backend=backend, threads=threads, offload=offload)
    return Model(packed, engine, packed.chat_template)


def load_several(
    path: Path,
    sequences: int,
    device: str = "cuda",
    context: int | None = None,
    *,
    dense: bool = False,
    backend: str | None = None,
    offload: bool = False,
) -> ModelOfSeveral:
    """Open an artifact to continue so many texts together; see `runtime.batch.BatchEngine`. Raises as `load`."""
    batch_backend(sequences, device, backend)  # before a large file is read
    packed = read_packed(path)
    engine = BatchEngine(packed, device, context, sequences=sequences, dense=dense, backend=backend, offload=offload)
    return ModelOfSeveral(packed, engine)


def what_runs(engine: Engine | BatchEngine) -> tuple[str, ...]:
    """What runs a model, and why where that is not the best for the device: lines for people."""
    return f"runtime: {engine.description}{', dense' if engine.dense else ''}", *engine.notes


def _with(options: GenerateOptions | None, changes: dict[str, Any]) -> GenerateOptions:
    return checked(replace(options or GenerateOptions(), **changes))


callable_as(__name__, "sparsepack.load:load")
