"""Text in, text out: what is streamed, when it ends, and what is refused."""

import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import engine_of, every_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_models import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparsepack.errors import ArtifactError, UserError
from sparsepack.models.activity import Skipped
from sparsepack.option import LARGEST_COUNT
from sparsepack.runtime.engine import Counts, Engine
from sparsepack.runtime.generation.continuation import TextStream
from sparsepack.runtime.generation.generate import generate, open_tokenizer, prompt_tokens
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.runtime.options import GenerateOptions, generate_options

SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Every byte a token, and no words: the hardest case of incomplete characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama's: spaces are part of words, the first is dropped, unknown characters fall back to bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b", "bc", "▁bc"]
    merges = [("▁", "a"), ("▁", "b"), ("b", "c"), ("▁b", "c")]
    bpe = models.BPE({token: i for i, token in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece-like": sentencepiece_like()}
TEXT = "a bc  d ü€ 日本 🙂🙂 e\n\n f "
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


class Script:
    """In place of an engine: says the tokens of a script, whatever it is fed."""

    def __init__(self, script: Sequence[int], bos: int | None = 1, eos: tuple[int, ...] = (2,), context: int = 4096):
        self.architecture = SimpleNamespace(bos=bos, eos=eos, context=1024)
        self.script, self.context, self.said = script, context, 0
        self.fed: list[int] = []
        self.prepared = False
        self.lock, self._owner, self._owner_thread = threading.RLock(), None, threading.current_thread()
        self.positions_unsupported = "a script says one token at a time"

    claim, owned_by, release = Engine.claim, Engine.owned_by, Engine.release

    @property
    def position(self) -> int:
        return len(self.fed)

    @property
    def positions(self) -> tuple[int]:
        return (self.position,)

    def reset(self) -> None:
        self.fed = []
        self.said = 0

    def counts(self) -> Counts:
        return Counts()

    def skipped(self, since: Counts) -> Skipped:
        return Skipped(0.5, 0.5)

    def keep(self, ids: Sequence[int], sequence: int) -> int:
        kept = 0
        while kept < min(len(self.fed), len(ids) - 1) and self.fed[kept] == ids[kept]:
            kept += 1
        del self.fed[kept:]
        return kept

    def prefill(self, ids: Sequence[int], sequence: int) -> torch.Tensor:
        self.fed += ids
        return self.say()

    def prepare(self) -> None:
        self.prepared = True

    def decode_all(self, ids: Sequence[int], samplers: Sequence[Sampler]) -> list[int]:
        assert self.prepared, "a step whose time is told has to be prepared"
        self.fed += ids
        return [samplers[0].choose(self.say())]

    def say(self) -> torch.Tensor:
        self.said += 1
        return torch.nn.functional.one_hot(torch.tensor(self.script[self.said - 1]), 600).float()


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(id) for id in ids), stream.finish()]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def run(engine: object, tokenizer: Tokenizer, prompt: str, max_tokens: int = 99) -> tuple[list[str], str]:
    made = generate(engine, tokenizer, prompt, GenerateOptions(max_tokens))  # type: ignore[arg-type]
    return list(made), made.result().reason


# text in pieces


@every_tokenizer
def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer: Tokenizer) -> None:
    pieces = streamed(tokenizer, encoded(tokenizer, TEXT))
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > len(TEXT) / 2, "text came late"


@every_tokenizer
@given(prompt=st.text(max_size=12), text=st.text(min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_pieces_continue_any_prompt_with_any_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = encoded(tokenizer, prompt + text)
    cut = len(encoded(tokenizer, prompt))
    start = tokenizer.decode(ids[:cut])
    if start.endswith("\ufffd"):  # merged across the border: not a prompt that a tokenizer makes
        return
    assert start + "".join(streamed(tokenizer, ids[cut:], ids[:cut])) == tokenizer.decode(ids)


@every_tokenizer
def test_a_leading_space_belongs_after_a_prompt_and_not_at_the_beginning(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "a bc")
    first = encoded(tokenizer, "a")
    assert streamed(tokenizer, ids, [1])[0] == "a"
    assert "".join(streamed(tokenizer, ids[len(first) :], [1, *first])) == " bc"


@every_tokenizer
@given(ids=st.lists(st.integers(0, 258), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_tokens_give_text_without_an_error(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = "".join(streamed(tokenizer, ids))
    if tokenizer is TOKENIZERS["byte-level"]:
        assert text == tokenizer.decode(ids)


@every_tokenizer
def test_a_character_that_never_ends_shows_at_the_end(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "a🙂")[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {"\ufffd"}


@every_tokenizer
def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    a, bc = encoded(tokenizer, "a"), encoded(tokenizer, "a bc")[len(encoded(tokenizer, "a")) :]
    assert "".join(streamed(tokenizer, [*a, 0, 1, *bc, 2])) == "a bc"


@pytest.mark.parametrize("model", ["books-26m-silu", "stories-260k"])
def test_real_tokenizers_stream_real_text(shared: Path, model: str) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "models" / model / "tokenizer.json"))
    text = "Once upon a time, “naïve” 🙂 quotes —\n  and 日本語."
    ids = encoded(tokenizer, text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer, ids[2:], ids[:2])) == text[len(tokenizer.decode(ids[:2])) :]


# generate


@every_tokenizer
def test_generation_streams_the_model_s_tokens_until_eos(tokenizer: Tokenizer) -> None:
    whole, start = encoded(tokenizer, "a bc 🙂 d"), encoded(tokenizer, "a")
    engine = Script([*whole[len(start) :], 2])
    pieces, reason = run(engine, tokenizer, "a")
    assert "".join(pieces) == " bc 🙂 d"
    assert all(pieces)
    assert reason == "eos"
    assert engine.fed == [1, *whole]


@every_tokenizer
def test_special_tokens_that_are_preserved_have_their_text(tokenizer: Tokenizer) -> None:
    preserved = {1: tokenizer.id_to_token(1)}
    stream, ids = TextStream(tokenizer, [], preserved), [*encoded(tokenizer, "a 🙂"), 0, 1, *encoded(tokenizer, "bc")]
    assert "".join([*map(stream.push, ids), stream.finish()]) == f"a 🙂{preserved[1]}bc"


def test_generation_stops_after_max_tokens_without_a_step_too_many() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = Script(encoded(tokenizer, "abcdef"))
    assert run(engine, tokenizer, "x", 3) == (["a", "b", "c"], "tokens")
    assert engine.said == 3
    assert run(engine, tokenizer, "x", 0) == ([], "tokens")


def test_generation_stops_where_the_context_is_full() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = Script(encoded(tokenizer, "abcdef"), context=4)
    pieces, reason = run(engine, tokenizer, "x")
    assert ("".join(pieces), reason) == ("abc", "context")
    assert engine.position == 4


def test_any_eos_of_several_ends_the_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert run(Script([*encoded(tokenizer, "ab"), 0], eos=(2, 0)), tokenizer, "x") == (["a", "b"], "eos")


def test_a_generation_tells_what_it_made() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = Script([*encoded(tokenizer, "abc"), 2])
    made = generate(engine, tokenizer, "xy").result()  # type: ignore[arg-type]
    assert (made.text, made.tokens, made.reason, made.stop) == ("abc", tuple(encoded(tokenizer, "abc")), "eos", None)
    assert (made.prompt_tokens, made.prefilled, made.decoded, made.skipped) == (3, 3, 3, Skipped(0.5, 0.5))
    assert made.tokens_per_second == made.decoded / made.decode_seconds > 0
    nothing = generate(engine, tokenizer, "xy", GenerateOptions(0)).result()  # type: ignore[arg-type]
    assert (nothing.text, nothing.reason, nothing.decoded, nothing.tokens_per_second) == ("", "tokens", 0, None)


def test_a_generation_that_is_closed_tells_what_there_was() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = Script(encoded(tokenizer, "abcdef"))
    made = generate(engine, tokenizer, "x")  # type: ignore[arg-type]
    assert next(made) + next(made) == "ab"
    made.close()
    assert (made.result().text, made.result().reason, engine.said) == ("ab", "cancelled", 2)


@every_tokenizer
def test_a_stop_string_ends_the_text_and_is_not_told(tokenizer: Tokenizer) -> None:
    whole, start = encoded(tokenizer, "a bc d e f"), encoded(tokenizer, "a")
    engine = Script(whole[len(start) :])
    made = generate(engine, tokenizer, "a", GenerateOptions(stop=("zz", "c d")))  # type: ignore[arg-type]
    assert "".join(made) == " b"
    assert (made.result().reason, made.result().stop) == ("stop", "c d")
    assert engine.said < len(whole) - len(start), "stopped late"


def test_what_looked_like_a_stop_string_is_told_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    made = generate(Script([*encoded(tokenizer, "abc"), 2]), tokenizer, "x", GenerateOptions(stop=("cd",)))  # type: ignore[arg-type]
    assert (made.result().text, made.result().reason) == ("abc", "eos")


def test_the_name_of_a_special_token_is_a_stop_string_too() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    made = generate(Script([*encoded(tokenizer, "ab"), 0]), tokenizer, "x", GenerateOptions(stop=("<unk>",)))  # type: ignore[arg-type]
    assert (made.result().text, made.result().reason, made.result().stop) == ("ab", "stop", "<unk>")


def test_only_what_is_new_is_prefilled_where_the_text_is_kept() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = Script(encoded(tokenizer, "abcdef"))
    first = generate(engine, tokenizer, "xy", GenerateOptions(3), keep=True).result()  # type: ignore[arg-type]
    engine.said = 0
    second = generate(engine, tokenizer, "xyabc z", GenerateOptions(2), keep=True).result()  # type: ignore[arg-type]
    assert (first.prefilled, second.prompt_tokens, second.prefilled) == (3, 8, 3)  # c was chosen, not yet fed
    assert engine.fed == [1, *encoded(tokenizer, "xyabc za")]


def test_an_empty_prompt_begins_with_bos() -> None:
    tokenizer = TOKENIZERS["sentencepiece-like"]
    engine = Script([*encoded(tokenizer, "a bc"), 2])
    assert "".join(run(engine, tokenizer, "")[0]) == "a bc"
    assert engine.fed[0] == 1


def test_an_empty_prompt_without_bos_is_an_error() -> None:
    with pytest.raises(UserError, match=r"empty prompt: .*\(BOS\)"):
        generate(Script([], bos=None), TOKENIZERS["byte-level"], "")  # type: ignore[arg-type]


def test_bos_comes_once() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert prompt_tokens(tokenizer, "a", None) == encoded(tokenizer, "a")
    assert prompt_tokens(tokenizer, "a", 1) == prompt_tokens(tokenizer, "<s>a", 1) == [1, *encoded(tokenizer, "a")]


def test_a_prompt_longer_than_the_context_is_an_error_before_anything_runs() -> None:
    with pytest.raises(UserError, match="prompt of 6 tokens: the context holds 4; shorten it or give a larger context"):
        generate(Script([], context=4), TOKENIZERS["byte-level"], "abcde")  # type: ignore[arg-type]


def test_options_are_checked_before_anything_runs() -> None:
    wrong = {
        "-1 tokens": {"tokens": -1},
        "temperature -1": {"temperature": -1.0},
        "repeat penalty 0": {"repeat_penalty": 0.0},
        "repeat-last-n -2": {"repeat_last_n": -2},
        "stop: an empty string": {"stop": ("a", "")},
    }
    for message, options in wrong.items():
        with pytest.raises(UserError, match=message):
            generate(Script([]), TOKENIZERS["byte-level"], "a", GenerateOptions(**options))  # type: ignore[arg-type]


def test_a_prompt_that_is_no_text_is_an_error() -> None:
    with pytest.raises(UserError, match="character 1 is half a character"):
        prompt_tokens(TOKENIZERS["byte-level"], "a\udc80", 1)


def test_a_damaged_tokenizer_is_an_error() -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(json.dumps({}))


@every_backend
def test_a_real_engine_generates_the_same_text_for_the_same_seed(backend: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    engine = engine_of(random_model("llama", vocab_size=tokenizer.get_vocab_size()), backend)
    engine.architecture = dataclasses.replace(engine.architecture, eos=())

    def text(**options: Any) -> str:
        return "".join(generate(engine, tokenizer, "Once", GenerateOptions(30, **options)))

    assert text() == text()
    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 5}, GenerateOptions(5)),
        ({"max_new_tokens": 5, "do_sample": False}, GenerateOptions(5, temperature=0.0)),
        ({"do_sample": True, "top_k": 0, "top_p": 0.9}, GenerateOptions(temperature=0.7, top_p=0.9)),
        ({"do_sample": True, "temperature": 0.2}, GenerateOptions(temperature=0.2)),
        ({"max_tokens": -1, "stop": "\n"}, GenerateOptions(LARGEST_COUNT, stop=("\n",))),
        ({"stop_strings": ["a", "b"], "repetition_penalty": 1.1}, GenerateOptions(stop=["a", "b"], repeat_penalty=1.1)),  # type: ignore[arg-type]
        ({"logit_bias": {"50": -100}, "seed": None, "n": 1}, GenerateOptions(logit_bias=((50, -100),))),
    ],
)
def test_options_have_the_names_of_other_programs_too(given: dict[str, Any], expected: GenerateOptions) -> None:
    assert generate_options(GenerateOptions(), given, {"temperature": 0.7}) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_token": 5}, "max_token: no such option; did you mean max_tokens?"),
        ({"zzz": 5}, "zzz: no such option; expected one of tokens, temperature, "),
        ({"max_tokens": 5, "tokens": 5}, "tokens: max_tokens says the same; leave one of them out"),
        ({"do_sample": True, "temperature": 0}, "do_sample True: temperature 0 says otherwise"),
        ({"num_return_sequences": 3}, "num_return_sequences 3: not supported; leave it out or give 1"),
        ({"num_beams": 4}, "num_beams 4: not supported; leave it out or give 1"),
        ({"logit_bias": {"the": 1}}, "expected a dictionary of token ids"),
    ],
)
def test_a_name_that_there_is_not_is_one_line_with_the_nearest(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        generate_options(GenerateOptions(), given)
    assert said in str(refused.value)
