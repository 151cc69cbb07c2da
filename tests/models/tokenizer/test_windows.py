"""Windows over a text: with and without a BOS token, and never too short."""

from dataclasses import replace

import pytest
import torch
from models_for_tests import tokenizer

from sparsepack.errors import TextError
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.tokenizer import windows
from sparsepack.models.tokenizer.windows import drawn_windows, rolling_windows, sample, tokenise, window_length

TEXT = Text("a.txt", ("The quick brown fox jumps over the lazy dog. " * 9, "And again, and again."), "0", count=2)


def test_windows_are_no_longer_than_the_model_was_made_for_unless_asked() -> None:
    assert [window_length(None, 512), window_length(None, 1 << 17), window_length(4096, 512)] == [512, 2048, 4096]


def test_with_a_bos_every_token_of_a_window_is_a_target():
    shipped = open_checkpoint("shipped:tiny").tokenizer
    ids = tokenise(shipped, TEXT).tolist()
    inputs, targets = rolling_windows(shipped, TEXT, 16)
    assert targets.flatten().tolist() == ids[: len(ids) // 16 * 16]
    assert (inputs[:, 0] == shipped.bos_token_id).all()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_without_a_bos_every_token_but_the_first_is_a_target():
    plain = tokenizer()
    assert plain.bos_token_id is None
    ids = tokenise(plain, TEXT).long()
    inputs, targets = rolling_windows(plain, TEXT, 16)
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    assert torch.equal(inputs, windows[:, :-1])
    assert torch.equal(targets, windows[:, 1:])


def test_a_text_is_tokenised_whole_without_special_tokens():
    plain = tokenizer()
    assert tokenise(plain, TEXT).tolist() == plain.encode(TEXT.joined, add_special_tokens=False)


def test_a_text_shorter_than_a_window_is_refused_and_one_of_just_that_length_taken():
    plain = tokenizer()
    length = len(tokenise(plain, TEXT))
    assert rolling_windows(plain, TEXT, length)[0].shape == (1, length - 1)
    with pytest.raises(TextError, match=f"a.txt: {length} tokens are fewer than one window of {length + 1}"):
        rolling_windows(plain, TEXT, length + 1)


def test_a_text_longer_than_the_models_context_warns_of_nothing(caplog):
    with caplog.at_level("WARNING"):
        rolling_windows(open_checkpoint("shipped:tiny").tokenizer, read_text("shipped:heldout"), 64)
    assert not caplog.records


def test_a_sample_is_stretches_of_the_text_in_its_order(monkeypatch):
    monkeypatch.setattr(windows, "_STRETCH", 10)
    text = replace(TEXT, documents=("".join(chr(256 + n) for n in range(57)), "b" * 18), characters=77)
    assert sample(text, 77, seed=0) is text
    some = sample(text, 35, seed=0)
    stretches = list(some.documents)
    assert [len(stretch) for stretch in stretches] == [10] * 4
    places = [text.joined.index(stretch) for stretch in stretches]
    assert places == sorted(set(places))
    assert all(place % 10 == 0 for place in places[:-1])
    assert some.characters == len(some.joined)
    assert some.sha256 == text.sha256
    assert list(sample(text, 35, seed=0).documents) == stretches
    assert any(list(sample(text, 35, seed=seed).documents) != stretches for seed in range(1, 5))


def test_of_a_long_text_windows_are_drawn_from_a_sample_unless_they_need_more(monkeypatch):
    """From the sample as from any text."""
    plain = tokenizer()
    text = replace(TEXT, documents=tuple(f"Line {n} of the text. " * 40 for n in range(100)))
    text = replace(text, characters=len(text.joined))
    of_all, _ = drawn_windows(plain, text, 16, 5, seed=1)
    monkeypatch.setattr(windows, "_STRETCH", 500)
    some = sample(text, 2_000, seed=1)
    expected, _ = drawn_windows(plain, some, 16, 5, seed=1)
    monkeypatch.setattr(windows, "SAMPLE", 2_000)
    assert torch.equal(drawn_windows(plain, text, 16, 5, seed=1)[0], expected)
    assert not torch.equal(expected, of_all)
    many, _ = drawn_windows(plain, text, 16, 400, seed=1)  # 400 x 16 x 16 characters are more than there are
    assert len(many) == 400
    assert len(drawn_windows(plain, text, 16, 0, seed=1)[0]) == len(rolling_windows(plain, text, 16)[0])


@pytest.mark.parametrize(
    ("samples", "held_out", "drawn", "others"),
    [(5, 3, 5, 3), (5, 20, 5, 11), (14, 8, 14, 2), (15, 8, 14, 2), (16, 8, 14, 2), (0, 8, 14, 2), (0, 0, 16, 0)],
)
def test_windows_held_out_are_none_of_those_that_are_drawn(monkeypatch, samples, held_out, drawn, others):
    monkeypatch.setattr(windows, "_windows", lambda *_: torch.arange(1000, 1256).reshape(16, 16))
    ran, rest = drawn_windows(tokenizer(), TEXT, 16, samples, 1, held_out)
    assert (len(ran), len(rest), rest.shape[1]) == (drawn, others, 16)
    assert not set(ran.flatten().tolist()) & set(rest.flatten().tolist())
    assert rest[:, 0].tolist() == sorted(rest[:, 0].tolist())
    alone, _ = drawn_windows(tokenizer(), TEXT, 16, drawn, 1, 0)
    assert torch.equal(ran, alone)


def test_of_fewer_than_eight_windows_none_is_held_out(monkeypatch):
    monkeypatch.setattr(windows, "_windows", lambda *_: torch.arange(112).reshape(7, 16))
    ran, rest = drawn_windows(tokenizer(), TEXT, 16, 0, 1, 8)
    assert len(ran) == 7
    assert rest.shape == (0, 16)
