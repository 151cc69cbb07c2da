"""How a text is continued. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

CHAT_TOKENS = 1024
"""Of an answer in a conversation, unless told otherwise: most end by themselves."""


@dataclass(frozen=True)
class GenerateOptions:
    """How many tokens at most, how they are chosen (see `runtime.sampling.Sampling`), and what ends the text.

    stop -- texts that end it; they are not part of it
    """

    tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    stop: tuple[str, ...] = ()
