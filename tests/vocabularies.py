"""Tokenizers made for tests: byte-level BPE cut in every way that llama.cpp has a name for, SentencePiece's BPE; texts
that tell them apart, and llama.cpp with nothing but a vocabulary."""

import json
import lzma
import pydoc_data.topics
import random
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sparsepack.formats.llama_cpp.vocabulary import KEY_TYPES

LINES = "\n".join(pydoc_data.topics.topics.values()).splitlines(keepends=True)
EOS = {"eos_token": "<|endoftext|>"}
WORD, SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
GPT4O = (
    rf"{CASED[0]}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|{CASED[1]}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
NASTY = [
    *["", " ", "  ", "\n", "\n\n", " \n ", "\t", "a", " a", "a ", "  a  b   c    ", "   leading", "trailing   "],
    *[
        "x\n\n\ny",
        "x \n \n y",
        "\r\n\r\n a\r\nb",
        "tab\tand\t\ttabs",
        "   \n   \n",
        "\x00\x01\x7f",
        "'",
        "''",
        "'s",
        " 's",
    ],
    "don't DON'T I'm we'll they'RE you'Ve 'S 't's don’t ſ 'ſ",
    "1 12 123 1234 12345 3.14159 1,000,000 ٣٤٥ १२३ ½ ² Ⅷ 一二三",
    "¿Qué? «oui» “quotes” ‘single’ — – … ª º ʰ ﬁ",
    "Привет МИР, Ελληνικά ΑΒγδ, 日本語のテキスト 中文 한국어",
    "😀 🇩🇪 a\u00adb\u200dc \u00a0nbsp\u2003em\u3000wide \u200bzwsp \ufeffbom \u2028line\u2029sep\x0b\x0c\x85",
    "a_b __init__ foo(bar) => {x: 1} // c /* */ #!$%^&* ---===***...???!!!",
    "https://example.org/a?b=c&d=%20#e camelCase HTTPServer iPhone",
    "▁ lower ▁one [PAD3] <0x0A> [UNK]",
    "before<|endoftext|>after <|endoftext|> <|endoftext|><|im_start|>\n<think> x",
]
MARKED = [  # combining marks, and capitals beyond A-Z after small letters: what `INEXACT` names cut elsewhere
    "e\u0301 n\u0303 combining a\u0300\u0301\u0302b",
    "ไทย \u0e33\u0e49 ก็ हिन्दी العربية עברית ❤️ 👨‍👩‍👧‍👦 🏳️‍🌈",
    "привЕт каПИТан étÉ",
]


def load(keys: dict[str, Any], path: Path) -> Any:
    """llama.cpp with the vocabulary `keys` and no weights."""
    import llama_cpp

    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(keys["tokenizer.ggml.tokens"]))
    for key, value in keys.items():
        writer.add_key_value(key, value, *KEY_TYPES[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def differing(llama: Any, encode: Callable[[str, bool], list[int]], texts: Iterable[str]) -> list[str]:
    """The texts that llama.cpp and `encode(text, add_special_tokens)` tokenise differently."""
    return [
        text
        for text in texts
        for special in (False, True)
        if llama.tokenize(text.encode(), add_bos=special, special=True) != encode(text, special)
    ]


def encoder(tokenizer: Tokenizer) -> Callable[[str, bool], list[int]]:
    return lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids


def random_texts(count: int, length: int) -> list[str]:
    """Strings over all Unicode categories, with the characters that pre-tokenizers look at more often."""
    rng = random.Random(7)
    by_category: dict[str, list[str]] = {}
    for code in (*range(0x40000), *range(0xE0000, 0xF0000)):  # all that are neither unassigned nor private
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    kinds = sorted(by_category.keys() - {"Cs", "Cn", "Co"})

    def character() -> str:
        if rng.random() < 0.4:
            return rng.choice(" \n\r\t'sStTredLl /aB1.9")
        return rng.choice(by_category[rng.choice(kinds)])

    return ["".join(character() for _ in range(length)) for _ in range(count)]


RANDOM = random_texts(1000, 6)


@cache
def _merges(size: int) -> str:
    """The tokenizer.json of a byte-level BPE that was trained on text that nothing cuts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    windows = [text[i : i + 6] for text in NASTY + MARKED for i in range(len(text))]
    pieces = [line[i : i + 30] for line in LINES[::4] for i in range(0, len(line), 30)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces + RANDOM * 3 + windows * 5, trainer)
    tokenizer.add_tokens(["<think>"])
    return str(tokenizer.to_str())


def trained(pre_tokenizer: Any, ignore_merges: bool = False, size: int = 12000) -> Tokenizer:
    """Byte-level BPE whose merges cross every cut of the pre-tokenizer, so that each cut shows in the tokens."""
    parsed = json.loads(_merges(size))
    parsed["model"]["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def split(regex: str) -> Any:
    cut = pre_tokenizers.Split(Regex(regex), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS = {
    "gpt-2": (BYTE_LEVEL, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]), False),
    "llama-bpe": (split(LLAMA3), True),
    "dbrx": (split(LLAMA3), False),
    "qwen2": (split(QWEN2), False),
    "qwen35": (split(QWEN35), False),
    "tekken": (split(TEKKEN), True),
    "gpt-4o": (split(GPT4O), False),
}
LARGE = ("tekken", "gpt-4o")
"""Those whose alphabets take longest to train: their tests are long."""


@cache
def byte_level_tokenizer(name: str) -> Tokenizer:
    """A trained tokenizer that cuts text as llama.cpp does under this name."""
    return trained(*PRE_TOKENIZERS[name])


def as_json(tokenizer: Tokenizer) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


@cache
def _pieces(whole_words: bool) -> str:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace(split=whole_words)
    base.train_from_iterator(LINES[::3], trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    return str(base.to_str())


def sentencepiece(merges: str, spaces: str) -> dict[str, Any]:
    """A SentencePiece-style tokenizer.json: `merges` as trained, or every split of each token, as converters do."""
    parsed = json.loads(_pieces(spaces == "split"))
    pieces = [piece for piece, _ in sorted(parsed["model"]["vocab"].items(), key=lambda item: item[1])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    parsed["model"] |= {
        "vocab": {token: i for i, token in enumerate(tokens)},
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    if merges == "splits":
        cuts = [(token[:i], token[i:]) for token in pieces for i in range(1, len(token))]
        parsed["model"]["merges"] = [list(cut) for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parsed["added_tokens"] = [{"id": i, "content": token} | plain for i, token in enumerate(tokens[:3])]
    if spaces == "never":
        parsed["pre_tokenizer"]["prepend_scheme"] = "never"
    return prepending(parsed) if spaces == "prepend" else parsed


def prepending(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The same with the normalizers of the first Llama: what llama.cpp's space prefix means."""
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, marks]
    return tokenizer | {"normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": None}


def orphan(tokenizer: dict[str, Any], token: str) -> dict[str, Any]:
    """The tokenizer with one more token, which no merge makes."""
    vocab = tokenizer["model"]["vocab"]
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocab | {token: max(vocab.values()) + 2}}}


def read_xz(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def shared_lines(place: Path) -> list[str]:
    wiki = read_xz(place / "text/wikitext2.test.txt.xz").splitlines(keepends=True)
    tales = read_xz(place / "text/tinystories.sample.txt.xz").splitlines()
    book = json.loads(read_xz(place / "text/books.validation.jsonl.xz").splitlines()[0])["text"]
    pages = [book[i : i + 1000] for i in range(0, min(len(book), 100_000), 1000)]
    return wiki[:400] + tales[:300] + pages
