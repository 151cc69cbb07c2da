"""How tokens are chosen where the user does not say: as the model's makers suggest, and else the likeliest each time.

Commands, recipes and functions take options through here, so that the same prompt gives the same text in all of them.
In `serve` a request has OpenAI's temperature of 1 where neither it nor the makers say one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sparsepack.errors import UserError
from sparsepack.option import default_of, idle, options_of
from sparsepack.runtime.generation.continuation import sampling_of
from sparsepack.runtime.generation.stopping import StopText
from sparsepack.runtime.options import GREEDY, GenerateOptions

_DECLARED = options_of(GenerateOptions)
_OF_DRAWING = {name for name, each in _DECLARED.items() if any(one.field == "temperature" for one in each.counts)}


def as_suggested(options: GenerateOptions, suggested: Mapping[str, Any]) -> tuple[GenerateOptions, dict[str, Any]]:
    """The options with the model's suggestions for what nobody gave, and which these are.

    suggested -- `formats.packed.PackedModel.generation`

    Where the likeliest token is taken, nothing is suggested of how tokens are drawn.
    """
    taken = {name: value for name, value in suggested.items() if getattr(options, name) is None}
    temperature = taken.get("temperature") if options.temperature is None else options.temperature
    if not temperature:
        taken = {name: value for name, value in taken.items() if name not in _OF_DRAWING}
    return replace(options, **taken), taken


def told(taken: Mapping[str, Any], spelt: Callable[[str], str] = str) -> str:
    """What the model's makers suggest, in words; `spelt` writes a field as the user knows it."""
    shown = ", ".join(f"{spelt(name)} {value:g}" for name, value in taken.items())
    return f"the model's makers suggest {shown}; {spelt('temperature')} 0 takes the likeliest token each time"


def checked(options: GenerateOptions | None, spelt: Callable[[str], str] = str) -> GenerateOptions:
    """The options, the usual ones for None. Raises `UserError` where one is out of range, or was given and does
    nothing; `spelt` writes a field as the user knows it."""
    options = options or GenerateOptions()
    if options.tokens < 0:
        raise UserError(f"{options.tokens} tokens to generate: expected 0 or more")
    sampling_of(options)
    StopText(options.stop)
    values = {name: getattr(options, name) for name in _DECLARED}
    given = [name for name, value in values.items() if value != default_of(GenerateOptions, name)]
    values |= {name: value for name, value in GREEDY.items() if values[name] is None}
    for line in idle(given, values.get, lambda name: _DECLARED[name].counts, spelt):
        raise UserError(line)
    return options
