"""Windows over a text: with and without a BOS token, and never too short."""

import pytest
import torch
from models_for_tests import tokenizer

from sparsepack.errors import TextError
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint import open_checkpoint
from sparsepack.models.windows import rolling_windows, tokenise

TEXT = Text("a.txt", ("The quick brown fox jumps over the lazy dog. " * 9, "And again, and again."), "0", count=2)


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
