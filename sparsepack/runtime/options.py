"""How a text is continued. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.option import LARGEST_SEED, option


@dataclass(frozen=True)
class GenerateOptions:
    """How many tokens at most, and how they are chosen: see `runtime.sampling.Sampling`."""

    tokens: int = option("Tokens to generate at most.", default=64, least=0)
    temperature: float = option("How freely tokens are drawn; 0 takes the likeliest each time.", default=0.0, least=0)
    top_k: int | None = option("Draw among so many likeliest tokens (default: all).", default=None, least=1)
    top_p: float | None = option(
        "Draw among the likeliest that make up this share (default: all).", default=None, above=0, most=1
    )
    seed: int = option("Of the random draws.", default=0, least=0, most=LARGEST_SEED)
