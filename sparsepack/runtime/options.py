"""How a text is continued. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.option import LARGEST_SEED, option

CHAT_TOKENS = 1024
"""Of an answer in a conversation, unless told otherwise: most end by themselves."""


@dataclass(frozen=True)
class GenerateOptions:
    """How many tokens at most, how they are chosen (see `runtime.sampling.Sampling`), and what ends the text.

    stop -- texts that end it; they are not part of it
    """

    tokens: int = option(
        f"Tokens to generate at most; in a conversation {CHAT_TOKENS} unless given.", default=64, least=0
    )
    temperature: float = option("How freely tokens are drawn; 0 takes the likeliest each time.", default=0.0, least=0)
    top_k: int | None = option("Draw among so many likeliest tokens (default: all).", default=None, least=1)
    top_p: float | None = option(
        "Draw among the likeliest that make up this share (default: all).", default=None, above=0, most=1
    )
    seed: int = option("Of the random draws.", default=0, least=0, most=LARGEST_SEED)
    repeat_penalty: float = option(
        "Makes tokens less likely that were there before, as in llama.cpp; 1 does nothing.", default=1.0, above=0
    )
    repeat_last_n: int = option("How many of the last tokens count as there before; -1 for all.", default=64, least=-1)
    stop: tuple[str, ...] = option("Text that ends what is generated, and is not part of it.", default=())
