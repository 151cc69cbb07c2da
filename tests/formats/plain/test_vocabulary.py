"""Stock llama.cpp, loaded from the keys that `vocabulary` makes, against the Hugging Face tokenizer, id for id."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from pairwise import each_value
from tokenizers import Tokenizer, processors
from vocabularies import (
    BYTE_LEVEL,
    EOS,
    LARGE,
    LINES,
    LLAMA3,
    MARKED,
    NASTY,
    PRE_TOKENIZERS,
    RANDOM,
    as_json,
    byte_level_tokenizer,
    differing,
    encoder,
    load,
    orphan,
    prepending,
    sentencepiece,
    shared_lines,
    split,
    trained,
)

from sparsepack.errors import PackingError
from sparsepack.formats.llama_cpp.vocabulary import INEXACT, KEY_TYPES, vocabulary

pytest.importorskip("llama_cpp", reason="llama-cpp-python is the peer of these tests")


NAMES = [pytest.param(name, marks=[pytest.mark.long] if name in LARGE else []) for name in PRE_TOKENIZERS]


@pytest.fixture(scope="module", params=NAMES)
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, Any]:
    tokenizer = byte_level_tokenizer(request.param)
    keys = vocabulary(as_json(tokenizer), EOS, {"vocab_size": tokenizer.get_vocab_size() + 3})
    assert keys["tokenizer.ggml.pre"] == request.param
    return request.param, tokenizer, load(keys, tmp_path_factory.mktemp("vocabulary") / "v.gguf")


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return as_json(trained(BYTE_LEVEL, size=400))


def test_byte_level_tokenisation_equals_hugging_face(byte_level: tuple[str, Tokenizer, Any]) -> None:
    _, tokenizer, llama = byte_level
    assert differing(llama, encoder(tokenizer), LINES[::10] + NASTY) == []


def test_byte_level_tokenisation_equals_hugging_face_on_marks_and_random_unicode(
    byte_level: tuple[str, Tokenizer, Any], request: pytest.FixtureRequest
) -> None:
    name, tokenizer, llama = byte_level
    if name in INEXACT:
        request.applymarker(pytest.mark.xfail(reason=INEXACT[name]))
    assert differing(llama, encoder(tokenizer), MARKED + RANDOM) == []


def test_byte_level_detokenisation_gives_the_text_back(byte_level: tuple[str, Tokenizer, Any]) -> None:
    _, _, llama = byte_level
    for text in LINES[::20] + NASTY + MARKED:
        assert (
            llama.detokenize(llama.tokenize(text.encode(), add_bos=False, special=True), special=True) == text.encode()
        )


@each_value({"merges": ["trained", "splits"], "spaces": ["prepend", "always", "never", "split"]})
def test_sentencepiece_tokenisation_equals_hugging_face(merges: str, spaces: str, tmp_path: Path) -> None:
    parsed = sentencepiece(merges, spaces)
    keys = vocabulary(parsed, {"bos_token": "<s>", "eos_token": "</s>"}, {"vocab_size": len(parsed["model"]["vocab"])})
    llama = load(keys, tmp_path / "v.gguf")
    texts = LINES[::5] + NASTY + MARKED + RANDOM + ["a<s>b c</s> d", "<unk>", "</s", "▁▁▁ ▁a"]
    if spaces in ("always", "split"):  # Metaspace puts no second space before one; llama.cpp and SentencePiece do
        texts = [text for text in texts if not text.startswith((" ", "▁")) and "> " not in text]
    assert differing(llama, encoder(Tokenizer.from_str(json.dumps(parsed))), texts) == []
    assert keys["tokenizer.ggml.add_space_prefix"] is (spaces != "never")


def read_json(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return parsed


def shared_model(place: Path, name: str, tmp_path: Path) -> tuple[Any, Any, dict[str, Any], list[str]]:
    transformers = pytest.importorskip("transformers")
    folder = place / "models" / name
    files = [read_json(folder / file) for file in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    llama = load(vocabulary(*files), tmp_path / "v.gguf")
    return llama, transformers.AutoTokenizer.from_pretrained(folder), files[0], shared_lines(place)


@pytest.mark.long
def test_trained_byte_level_model_equals_hugging_face(shared: Path, tmp_path: Path) -> None:
    llama, auto, _, lines = shared_model(shared, "books-26m-silu", tmp_path)
    texts = lines + NASTY + MARKED
    assert differing(llama, lambda text, special: auto.encode(text, add_special_tokens=special), texts) == []
    for text in texts:
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert llama.detokenize(ids, special=True).decode() == auto.decode(ids) == text


@pytest.mark.long
def test_trained_sentencepiece_model_equals_hugging_face(shared: Path, tmp_path: Path) -> None:
    llama, auto, parsed, lines = shared_model(shared, "stories-260k", tmp_path)
    texts = lines + NASTY + MARKED
    inner = [text for text in texts if not text.startswith((" ", "▁"))]
    assert differing(llama, lambda text, special: auto.encode(text, add_special_tokens=special), inner) == []
    # Known divergence: text that begins with a space, or follows a special token, gets the prefix all the same.
    twin = encoder(Tokenizer.from_str(json.dumps(prepending(parsed))))
    assert differing(llama, twin, [*texts, "a<s>b c</s> d"]) == []
    for text in texts:
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        # A special token's text would stand unprefixed; a ▁ of the text comes back as a space.
        assert llama.detokenize(ids, special=True).decode() == (" " + text if text else "").replace("▁", " ")


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize(("before", "after"), [(False, False), (True, False), (True, True)])
def test_bos_and_eos_are_added_as_transformers_does(
    small: dict[str, Any], tmp_path: Path, before: bool, after: bool, claimed: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_str(json.dumps(small))
    if before or after:
        template = f"{'<|im_start|> ' if before else ''}$A{' <|endoftext|>' if after else ''}"
        named = [("<|im_start|>", 1), ("<|endoftext|>", 0)]
        steps = [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=template, special_tokens=named),
        ]
        tokenizer.post_processor = processors.Sequence(steps)
    tokenizer_config: dict[str, Any] = EOS | {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    tokenizer_config |= {"add_bos_token": claimed, "add_eos_token": claimed}
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))

    keys = vocabulary(as_json(tokenizer), tokenizer_config, {"vocab_size": tokenizer.get_vocab_size()})
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (before, after)
    llama = load(keys, tmp_path / "v.gguf")
    assert (
        differing(llama, lambda text, special: auto.encode(text, add_special_tokens=special), ["", "a b", NASTY[-1]])
        == []
    )


def test_spare_rows_of_the_embedding_become_unused_tokens_with_names_of_their_own(small: dict[str, Any]) -> None:
    used = len(small["model"]["vocab"]) + 1  # <think> is an added token
    small = copy.deepcopy(small)
    small["added_tokens"][2] |= {"content": f"[PAD{used + 1}]"}
    keys = vocabulary(small, EOS, {"vocab_size": used + 3})
    assert keys["tokenizer.ggml.tokens"][used - 1 :] == [
        *[f"[PAD{used + 1}]", f"[PAD{used}]", f"[[PAD{used + 1}]]", f"[PAD{used + 2}]"]
    ]
    kinds = gguf.TokenType
    assert keys["tokenizer.ggml.token_type"][used - 1 :] == [kinds.USER_DEFINED, *[kinds.UNUSED] * 3]
    assert keys["tokenizer.ggml.token_type"][:3] == [kinds.CONTROL, kinds.CONTROL, kinds.NORMAL]


def test_every_key_has_a_type_and_special_ids_come_from_either_config(small: dict[str, Any]) -> None:
    tokenizer_config = {
        "bos_token": {"content": "<|im_start|>"},
        "chat_template": [{"name": "default", "template": "{{ x }}"}, {"name": "rag", "template": "r"}],
    }
    config = {"vocab_size": 500, "eos_token_id": [0, 1], "pad_token_id": 1, "bos_token_id": 7}
    keys = vocabulary(small, tokenizer_config, config)
    assert keys.keys() <= KEY_TYPES.keys()
    ids = {kind: keys[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding")}
    assert ids == {"bos": 1, "eos": 0, "padding": 1}
    assert "tokenizer.ggml.unknown_token_id" not in keys
    assert keys["tokenizer.chat_template"] == "{{ x }}"


def test_sentencepiece_scores_order_the_merges_and_kinds_are_told_apart() -> None:
    parsed = sentencepiece("trained", "always")
    keys = vocabulary(parsed, {"eos_token": "</s>"}, {"vocab_size": len(parsed["model"]["vocab"])})
    score = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    made = [score["".join(pair)] for pair in parsed["model"]["merges"]]
    assert made == sorted(made, reverse=True)
    kinds = gguf.TokenType
    assert keys["tokenizer.ggml.token_type"][:4] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.BYTE]
    assert keys["tokenizer.ggml.unknown_token_id"] == 0


def test_ignore_merges_is_accepted_where_it_changes_nothing(small: dict[str, Any]) -> None:
    keys = vocabulary(small | {"model": small["model"] | {"ignore_merges": True}}, EOS, {"vocab_size": 500})
    assert keys["tokenizer.ggml.pre"] == "gpt-2"


@pytest.mark.parametrize(("name", "ignores"), [("llama-bpe", True), ("dbrx", False)])
def test_a_word_that_no_merge_makes_is_whole_where_merges_are_ignored(name: str, ignores: bool, tmp_path: Path) -> None:
    parsed = orphan(as_json(trained(split(LLAMA3), ignores, size=400)), "Ġzqzqz")
    keys = vocabulary(parsed, EOS, {"vocab_size": 402})
    assert keys["tokenizer.ggml.pre"] == name
    llama = load(keys, tmp_path / "v.gguf")
    assert differing(llama, encoder(Tokenizer.from_str(json.dumps(parsed))), ["a zqzqz b zqzqzq"]) == []
    whole = parsed["model"]["vocab"]["Ġzqzqz"]
    assert (whole in llama.tokenize(b"a zqzqz", add_bos=False)) is ignores


def without(tokenizer: dict[str, Any], token: str) -> dict[str, Any]:
    vocab = {name: i for name, i in tokenizer["model"]["vocab"].items() if name != token}
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocab}}


def in_turn(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*steps]}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "unknown regex": (lambda t: t | {"pre_tokenizer": json.loads(split(r"\w+\n").__getstate__())}, r"\\w+\\n"),
    "prefix space": (
        lambda t: t | {"pre_tokenizer": t["pre_tokenizer"] | {"add_prefix_space": True}},
        "add_prefix_space",
    ),
    "digits together": (
        lambda t: t | {"pre_tokenizer": in_turn({"type": "Digits", "individual_digits": False}, t["pre_tokenizer"])},
        "individual_digits",
    ),
    "no pre-tokenizer": (lambda t: t | {"pre_tokenizer": None}, "pre_tokenizer None"),
    "WordPiece": (lambda t: t | {"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
    "Unigram": (lambda t: t | {"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    "affixes": (lambda t: t | {"model": t["model"] | {"end_of_word_suffix": "</w>"}}, "affixes"),
    "lower case": (lambda t: t | {"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    "post-processor": (lambda t: t | {"post_processor": {"type": "RobertaProcessing"}}, "RobertaProcessing"),
    "whole words": (lambda t: orphan(t | {"model": t["model"] | {"ignore_merges": True}}, "zqzqz"), "'zqzqz'"),
    "bytes": (lambda t: without(t | {"model": t["model"] | {"unk_token": "[UNK]"}}, "Ā"), "256 bytes"),
    "byte tokens": (lambda t: t | {"model": t["model"] | {"byte_fallback": True}}, "<0x00>"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_tokenise_otherwise_is_refused_in_one_line(small: dict[str, Any], case: str) -> None:
    change, said = REFUSED[case]
    with pytest.raises(PackingError) as caught:
        vocabulary(change(small), EOS, {"vocab_size": 500})
    message = str(caught.value)
    assert said in message
    assert "zigzag-q4_k" in message
    assert "\n" not in message


def test_sentencepiece_token_that_only_llama_cpp_would_make_is_refused() -> None:
    parsed = orphan(sentencepiece("trained", "always"), "zq")
    with pytest.raises(PackingError, match="nothing makes the token 'zq'"):
        vocabulary(parsed, {"eos_token": "</s>"}, {"vocab_size": 3000})


def test_nfc_is_accepted(small: dict[str, Any]) -> None:
    assert vocabulary(small | {"normalizer": {"type": "NFC"}}, EOS, {"vocab_size": 500})


def test_tokenizer_larger_than_the_model_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(PackingError, match=r"token 400 \('<think>'\), but vocab_size in config.json is 300; .*resize"):
        vocabulary(small, EOS, {"vocab_size": 300})


def test_missing_end_of_text_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(PackingError, match=r"no end-of-text token is named; name it in config\.json as eos_token_id"):
        vocabulary(small, {}, {"vocab_size": 500})
