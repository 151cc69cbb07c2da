"""The bytes of tokens: together they are the text, and none has more of it than is told."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import sparsepack
from sparsepack.models.tokenizer.tokens import TokenBytes

BYTE_LEVEL = Path(sparsepack.__file__).parent / "data" / "tiny" / "tokenizer.json"


def fallback(**changes: object) -> Tokenizer:
    """A tokenizer in SentencePiece's way, with a token for every byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    merges = [["a", "b"], ["\u2581", "ab"]]
    model = {"type": "BPE", "vocab": {w: n for n, w in enumerate(words)}, "merges": merges, "byte_fallback": True}
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "normalizer": replaced, "model": model, **changes}))


@pytest.mark.parametrize(
    "tokenizer", [Tokenizer.from_file(str(BYTE_LEVEL)), fallback()], ids=["byte-level", "fallback"]
)
@given(text=st.text(max_size=60) | st.text("ab \n", max_size=200))
def test_tokens_have_the_bytes_of_their_text_and_at_most_as_many_each_as_is_told(
    tokenizer: Tokenizer, text: str
) -> None:
    tokens, ids = TokenBytes(tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokens.of, ids)) == text.encode()
    most = tokens.most
    assert most is not None
    assert len(text.encode()) <= len(ids) * most


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}],
            }
        },
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
    ],
    ids=str,
)
def test_nothing_is_told_where_a_part_of_a_text_may_come_to_nothing(changes: dict[str, object]) -> None:
    assert TokenBytes(fallback(**changes)).most is None


def test_what_is_no_token_has_no_bytes() -> None:
    assert TokenBytes(fallback()).of(10**6) == b""
