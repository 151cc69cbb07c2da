"""How a model runs and how a text is continued. Nothing heavy is imported here: the command line and recipes read the
defaults."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparsepack.errors import UserError
from sparsepack.option import LARGEST_COUNT, LARGEST_SEED, check_options, not_with, only_with, option, with_values
from sparsepack.placement.budget import parse_bytes
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.placement.options import MOST_LISTED, ONLINE
from sparsepack.runtime.backends import BACKENDS

MOST_THREADS = 1024
DEFAULT_CONTEXT = 4096
DEFAULT_POLICY = "slow"

CHAT_TOKENS = 1024
"""An answer in a conversation has at most this many tokens, unless told otherwise: most answers end by themselves."""

GREEDY = {"temperature": 0.0, "repeat_penalty": 1.0}
"""How tokens are chosen where neither the user nor the model's makers say: the likeliest each time."""

_DRAWN = (not_with("temperature", 0),)
_SUGGESTED = "default: as the model's makers suggest, else"


def usual_context(made_for: int) -> int:
    """The number of tokens that an engine makes room for unless told otherwise, of a model made for so many."""
    return min(made_for, DEFAULT_CONTEXT)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs a model.

    device     -- where everything but the embedding lies, by torch's name
    cache_type -- of keys and values, one that the backend has: "bf16", "f16", or "f32" for comparisons; None: its first
    sequences  -- texts that are decoded together, a token of each at a time; None: as many as the backend decodes
                  together, where memory has room for them
    begin      -- a `placement.policies.Policy` of one's own, in place of one with a name
    bandwidth      -- the speeds by which neurons with slots and without are divided; None: as measured on this machine,
                      or
                  else assumed, which the engine's description says
    activity   -- for benchmarks: who is active in each step since a reset in place of what the gates say, so that the
                  text means nothing: uint8 tensor [steps, blocks, neurons / 8, rounded up], a bit for each neuron as it
                  is stored, the lowest bit first; after the last step the first one again. For device cuda, with slots

    Raises `UserError` for a value out of range, and for a policy where nothing has slots.
    """

    device: str = "cpu"
    context: int | None = option(
        "Room for so many tokens (default: what the model was made for, at most 4096).", default=None
    )
    dense: bool = option("Skip nothing.", default=False)
    backend: str | None = option(
        "What runs it: kernels made for a device, or plain torch (reference); default: the device's, where they can "
        "run.",
        default=None,
        choices=tuple(BACKENDS),
    )
    threads: int | None = option(
        "CPU threads (default: one for each performance core that this process may use, within a container's quota).",
        default=None,
        least=1,
        most=MOST_THREADS,
    )
    cache_type: str | None = None
    sequences: int | None = 1
    offload: bool = option(
        "Keep keys and values of the text in the host's memory, for texts longer than the GPU has room for; on the GPU "
        "are their labels and the tokens read last. For files packed with --attention double.",
        default=False,
    )
    cached: float | None = option(
        "Give this share of the neurons slots in the GPU's memory; the processor computes the others, and the GPU a "
        "part of them over the bus. On device cuda, for files of the format neuron-q4_k (default: all lies on the "
        "GPU).",
        default=None,
        least=0,
        most=1,
        counts=(not_with("runtime", "transformers"),),
    )
    vram: str | None = option(
        "What the model, keys and values and buffers may take of the GPU's memory, 8GB for one, in place of --cached: "
        "what has no room lies in the host's memory, where the GPU reads a part of it and the processor the rest. Of "
        "files of the format neuron-q4_k neurons have slots where room is left. Without a context, keys and values "
        "take at most a quarter. The driver's own 0.6GB come on top. On device cuda, for models without experts "
        "(default: all lies on the GPU).",
        default=None,
        counts=(not_with("cached"), not_with("runtime", "transformers")),
    )
    policy: str | None = option(
        f"What moves neurons between slots, with --cached or --vram: as simulate takes it (default: {DEFAULT_POLICY}).",
        default=None,
        choices=ONLINE,
        counts=(only_with("cached", others=(only_with("vram"),)),),
    )
    gate_copy: float | None = option(
        "Where gates do not all fit within --vram, keep copies of them in 2 bits on the GPU, which list this many "
        "times as many neurons as are active; of these alone the exact gates are read. It changes the text a little: "
        "1.5 loses little, 2 less. For files packed with --gates rows (default: gates are read whole, where they lie).",
        default=None,
        least=1,
        most=MOST_LISTED,
        counts=(only_with("vram"),),
    )
    hold: bool = option(
        "Scale thresholds from token to token so that each text skips the share that the file was packed for, of a "
        "file with planes reads as many bits, on whatever text.",
        default=False,
        counts=(not_with("dense", True), not_with("runtime", "transformers")),
        everywhere=True,
    )
    begin: Callable[..., Any] | None = None
    bandwidth: BandwidthProfile | None = None
    activity: object = None

    @property
    def vram_bytes(self) -> int | None:
        """What `vram` says. Raises `PlacementError`."""
        return None if self.vram is None else parse_bytes(self.vram)

    @property
    def divided_by(self) -> str | None:
        """The option by which some neurons have slots, and others may have none: `cached` or `vram`."""
        return "cached" if self.cached is not None else "vram" if self.vram is not None else None

    def __post_init__(self) -> None:
        check_options(self, UserError, but=("backend",))  # which the table of backends is asked for
        _ = self.vram_bytes


@dataclass(frozen=True)
class GenerateOptions:
    """How many tokens at most, how they are chosen (`runtime.generation.sampling.Sampling`), and what ends the text.

    prompt_lookup -- None: `runtime.generation.speculation.MOST_DRAFTED` where nothing is skipped, else none
    temperature, top_k, top_p, min_p, repeat_penalty -- None: as `runtime.generation.generate.apply_suggestions` finds
    stop -- texts that end it; they are not part of it
    stop_token_ids -- tokens that end it, besides the model's own; they are not part of it
    ignore_eos -- the model's own do not end it
    logit_bias, min_tokens, logprobs, constraint -- as `Sampling` has them
    preserved_tokens -- special tokens whose text is part of the answer, as in llama.cpp
    """

    tokens: int = option(
        f"Tokens to generate at most; in a conversation {CHAT_TOKENS} unless given.", default=64, least=0
    )
    temperature: float | None = option(
        f"How freely tokens are drawn; 0 takes the likeliest each time ({_SUGGESTED} 0).", default=None, least=0
    )
    top_k: int | None = option(
        f"Draw among so many likeliest tokens ({_SUGGESTED} all).",
        default=None,
        least=1,
        most=LARGEST_COUNT,
        counts=_DRAWN,
    )
    top_p: float | None = option(
        f"Draw among the likeliest that make up this share ({_SUGGESTED} all).",
        default=None,
        above=0,
        most=1,
        counts=_DRAWN,
    )
    min_p: float | None = option(
        f"Draw among tokens at least this share as likely as the likeliest ({_SUGGESTED} all).",
        default=None,
        least=0,
        most=1,
        counts=_DRAWN,
    )
    seed: int = option("Of the random draws.", default=0, least=0, most=LARGEST_SEED, counts=_DRAWN)
    repeat_penalty: float | None = option(
        f"Makes tokens less likely that were there before, as in llama.cpp; 1 does nothing ({_SUGGESTED} 1).",
        default=None,
        above=0,
    )
    repeat_last_n: int = option(
        "How many of the last tokens count as there before; -1 for all.",
        default=64,
        least=-1,
        most=LARGEST_COUNT,
        counts=(not_with("repeat_penalty", 1),),
    )
    frequency_penalty: float = option(
        "Makes a token less likely each time that it is generated, as at OpenAI; 0 does nothing.",
        default=0.0,
        least=-100,
        most=100,
    )
    presence_penalty: float = option(
        "Makes a token less likely once it has been generated, as at OpenAI; 0 does nothing.",
        default=0.0,
        least=-100,
        most=100,
    )
    prompt_lookup: int | None = option(
        "Draft up to so many tokens that followed where the last ones stood in the text before, and compute them in "
        "one step: faster where the text repeats itself, and the same text up to rounding. For one text on the CPU; "
        "0 drafts none (default: 7 where nothing is skipped, else 0).",
        default=None,
        least=0,
        most=7,
    )
    stop: tuple[str, ...] = option("Text that ends what is generated, and is not part of it.", default=())
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    constraint: Callable[[], Any] | None = None
    preserved_tokens: tuple[int, ...] = ()


GENERATE_NAMES: Mapping[str, str] = {
    "max_tokens": "tokens",  # OpenAI, vLLM, llama-cpp-python
    "max_completion_tokens": "tokens",  # OpenAI
    "max_new_tokens": "tokens",  # transformers
    "n_predict": "tokens",  # llama.cpp
    "num_predict": "tokens",  # Ollama
    "prompt_lookup_num_tokens": "prompt_lookup",  # transformers
    "stop_strings": "stop",  # transformers
    "stop_sequences": "stop",  # Anthropic
    "repetition_penalty": "repeat_penalty",  # transformers, vLLM
}
"""What other programs call a field of `GenerateOptions`."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "use_cache": (True,),
    "web_search_options": (),
}
"""Options of other programs that are accepted with these values, which change nothing, or none at all."""


def unsupported_option(
    given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> tuple[str, str] | None:
    """The name of an option that is neither None nor one of its neutral values, and the remedy; None: there is none."""
    for name, accepted in neutral.items():
        value = given.get(name)
        # Python has True for 1.
        if value is not None and not any(type(value) is type(other) and value == other for other in accepted):
            values = " or ".join(dict.fromkeys(json.dumps(other).removesuffix(".0") for other in accepted))
            return name, f"leave it out{f' or give {values}' if values else ''}"
    return None


def generate_options(
    options: GenerateOptions, given: Mapping[str, Any], suggested: Mapping[str, Any] = {}
) -> GenerateOptions:
    """The options with other values, by our names and those of OpenAI, transformers and llama.cpp.

    given     -- a value of None changes nothing. `do_sample=False` is temperature 0; `do_sample=True` without a
                 temperature is that of `suggested`, or else 1. -1 tokens are as many as the context has room for, top_k
                 0 or -1 is all, `stop` may be one string, `logit_bias` a dictionary
    suggested -- how the model's makers would have tokens chosen

    Raises `UserError` for a name that there is not, with the nearest one, and for values that exclude each other.
    """
    values = {name: value for name, value in given.items() if value is not None}
    neutral = {**NEUTRAL, "n": (1,)}
    if found := unsupported_option(values, neutral):
        name, remedy = found
        several = "; several prompts: load(..., sequences=N) and generate_together" * name.startswith("n")
        raise UserError(f"{name} {values[name]}: not supported; {remedy}{several}")
    values = {name: value for name, value in values.items() if name not in neutral}
    sampled = values.pop("do_sample", None)
    options = with_values(options, values, UserError, GENERATE_NAMES)
    temperature, stop, bias = options.temperature, options.stop, options.logit_bias
    if sampled is not None and temperature is None:
        temperature = (suggested.get("temperature") or 1.0) if sampled else 0.0
    elif sampled is not None and sampled != bool(temperature):
        raise UserError(f"do_sample {sampled}: temperature {temperature} says otherwise; leave one of them out")
    if isinstance(bias, Mapping):
        if not all(str(id).isdecimal() for id in bias):
            raise UserError(f"logit_bias {str(bias)[:80]}: expected a dictionary of token ids")
        bias = tuple((int(id), amount) for id, amount in bias.items())
    return replace(
        options,
        tokens=LARGEST_COUNT if options.tokens == -1 else options.tokens,
        temperature=temperature,
        top_k=None if options.top_k in (0, -1) else options.top_k,
        stop=(stop,) if isinstance(stop, str) else stop,
        logit_bias=bias,
    )
