"""Tokenising piece by piece: the tokens of the whole text, no more of it than needed, and in little memory."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks_for_tests import in_a_fork
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import resident_bytes
from models_for_tests import tokenizer as byte_level
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from sparsepack.data.topics import heldout_text
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer import tokens as module
from sparsepack.models.tokenizer.tokens import tokens_of
from sparsepack.models.tokenizer.windows import count_windows, drawn_windows, rolling_windows, tokenise

SPECIAL = "<|special|>"


def _trained(model: Any, trainer: Any, pre: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre
    if normalizer:
        made.normalizer = normalizer
    made.train_from_iterator(heldout_text(), trainer)
    made.add_special_tokens([SPECIAL])
    return made


def _unigram() -> Tokenizer:
    """As of T5: the likeliest pieces of each word, the first with a space before it."""
    trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _trained(models.Unigram(), trainer, metaspace, normalizers.NFKC())


def _whole_text() -> Tokenizer:
    """As of Llama 2: nothing splits the text before its pieces are merged."""
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>"])
    made = _trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre_tokenizers.Metaspace())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def _words() -> Tokenizer:
    """As of BERT, which leaves out what lies between words."""
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    normalizer = normalizers.BertNormalizer()
    return _trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), normalizer)


def _digits() -> Tokenizer:
    """As of Llama 3: its expression, digits by threes, and offsets without white space."""
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    from tokenizers import Regex

    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made = _trained(models.BPE(), trainer, pre)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


KINDS = {"byte-level": byte_level, "unigram": _unigram, "whole": _whole_text, "words": _words, "digits": _digits}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Tokenizer:
    made = KINDS[request.param]()
    return getattr(made, "backend_tokenizer", made)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(module, "OVERLAP", 400)


def _text(*documents: str) -> Text:
    text = Text("text", documents, "0", len(documents))
    return Text("text", documents, "0", len(documents), len(text.joined))


def _whole(tokenizer: Any, text: Text) -> list[int]:
    ids: list[int] = (
        getattr(tokenizer, "backend_tokenizer", tokenizer).encode(text.joined, add_special_tokens=False).ids
    )
    return ids


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.characters = inner, 0

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.inner.encode_batch(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.usefixtures("small_pieces")
def test_the_tokens_are_those_of_the_whole_text(kind):
    text = _text(*heldout_text())
    assert tokenise(kind, text).tolist() == _whole(kind, text)


FRAGMENTS = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\n\n", "\t", "    ", "\u00a0", "é", "e\u0301", "日本語", "😀👨‍👩‍👧", "ﬁ", SPECIAL, "-" * 70]
    ),
    st.sampled_from(["for", " statement", "The value", ".", "'s", "()", " class", "x" * 60, "0" * 37, "ab" * 30]),
    st.integers(0, 10**30).map(str),
    st.text(max_size=20).filter(lambda s: s.isprintable()),
)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragments=st.lists(FRAGMENTS, min_size=1, max_size=60), times=st.integers(1, 12))
def test_so_they_are_of_any_mixture(kind, fragments, times):
    text = _text("".join(fragments) * times)
    assert tokenise(kind, text).tolist() == _whole(kind, text)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("character", ["a", "0", " ", "-", "é"])
def test_an_endless_word_has_the_tokens_of_the_whole_and_costs_at_most_a_few_times_as_much(kind, character):
    text = _text("Before it. " + character * 30_001 + " And after it, some words.")
    counting = Counting(kind)
    assert tokenise(counting, text).tolist() == _whole(kind, text)
    assert counting.characters < 6 * text.characters


def test_what_a_tokenizer_file_says_about_lengths_is_for_others():
    plain = byte_level().backend_tokenizer
    text = _text("One, two, three, four. " * 5)
    whole = _whole(plain, text)
    plain.enable_truncation(8)
    plain.enable_padding(length=512)
    assert tokenise(plain, text).tolist() == whole


@pytest.mark.parametrize("model", [pytest.param("books-26m-silu", marks=pytest.mark.long), "stories-260k"])
def test_real_tokenizers_and_real_texts(shared, model):
    real = open_checkpoint(shared / "models" / model).tokenizer
    for name in ("wikitext2.test.txt.xz", "tinystories.sample.txt.xz"):
        text = _text(read_text(str(shared / "text" / name)).joined[:300_000])  # five pieces
        whole = torch.tensor(real(text.joined, add_special_tokens=False, verbose=False)["input_ids"])
        assert torch.equal(tokenise(real, text).long(), whole)


@pytest.mark.usefixtures("small_pieces")
def test_no_more_of_a_text_is_tokenised_than_is_asked_for():
    counting = Counting(byte_level().backend_tokenizer)
    text = _text("The quick brown fox. " * 5_000)
    first = tokenise(counting, text, 100)
    assert len(first) == 100
    assert counting.characters == 3 * 1400  # one piece, then two: a piece is known when it is joined to the next
    assert not tokens_of(counting, text).complete
    again = tokenise(counting, text, 50)
    assert torch.equal(again, first[:50])
    assert counting.characters == 3 * 1400
    whole = tokenise(counting, text)
    assert torch.equal(whole[:100], first)
    assert tokens_of(counting, text).complete
    assert counting.characters < 1.5 * text.characters
    tokenise(counting, text)
    assert counting.characters < 1.5 * text.characters


@pytest.mark.usefixtures("small_pieces")
def test_first_windows_need_the_beginning_only_and_drawn_ones_the_whole_once():
    counting = Counting(Tokenizer.from_str(byte_level().backend_tokenizer.to_str()))
    counting.inner.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", 0)])
    text = _text("The quick brown fox jumps over the lazy dog. " * 2_000)
    inputs, targets = rolling_windows(counting, text, 16, 3)
    assert inputs.shape == targets.shape == (3, 16)
    assert count_windows(counting, text, 16, 3) == 3
    assert counting.characters < 10_000 < text.characters
    every = rolling_windows(counting, text, 16)[0]
    assert torch.equal(every[:3], inputs)
    once = counting.characters
    drawn, _ = drawn_windows(counting, text, 16, 5, seed=3)
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(3))[:5].sort().values
    assert torch.equal(drawn, every[chosen])
    assert torch.equal(drawn_windows(counting, text, 16, 0, seed=3)[0], every)
    assert count_windows(counting, text, 16) == len(every)
    assert counting.characters == once < 1.5 * text.characters


def _bytes_of_drawing(path: Path) -> int:
    tokenizer = open_checkpoint("shipped:tiny").tokenizer
    before = resident_bytes("VmRSS")
    drawn_windows(tokenizer, read_text(str(path)), 128, 1, 0)
    return resident_bytes("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("end", ["txt", "jsonl"])
def test_ten_megabytes_of_text_take_little_memory(tmp_path, end):
    """Tokenised as one piece they take 1.8 GB."""
    import json

    parts, path = heldout_text(), tmp_path / f"long.{end}"
    times = 10_000_000 // sum(map(len, parts))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(times):
            file.writelines(part + "\n\n" if end == "txt" else json.dumps({"text": part}) + "\n" for part in parts)
    assert in_a_fork(_bytes_of_drawing, path) < 300e6


@pytest.mark.usefixtures("small_pieces")
def test_tokenising_that_was_interrupted_begins_again(monkeypatch):
    tokenizer = byte_level().backend_tokenizer
    text = _text("The quick brown fox. " * 2_000)
    encode, calls = module._encode, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(module, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenise(tokenizer, text)
    assert not tokens_of(tokenizer, text).complete
    assert tokenise(tokenizer, text).tolist() == _whole(tokenizer, text)
