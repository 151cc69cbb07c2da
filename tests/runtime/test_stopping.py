"""Stop strings: what is told does not depend on how a text comes in pieces, and holds no stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.errors import UserError
from sparsepack.runtime.generation.continuation import StopText

LETTERS = st.text("ab\n", max_size=12)


def told(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    text = StopText(stops)
    parts = [text.push(piece) for piece in pieces]
    return "".join([*parts, text.finish()]), text.found


@given(LETTERS, st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_the_pieces_make_no_difference(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, found = told(list(text), stops)
    assert told(pieces, stops) == (whole, found)
    assert not any(stop in whole for stop in stops)
    if found is None:
        assert whole == text
    else:
        assert text.startswith(whole + found)


def test_what_cannot_begin_a_stop_string_is_told_at_once() -> None:
    text = StopText(["<end>", "###"])
    assert [text.push(piece) for piece in ("a <", "b <e", "n", "d ", "#", "# ", "##", "# more")] == [
        *("a ", "<b ", "", "<end ", "", "## ", "", "")
    ]
    assert text.found == "###"
    assert text.push("anything") == text.finish() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert told(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert told(["xabcd"], ["bcd", "abcd"]) == ("x", "abcd")


def test_without_stop_strings_all_passes_and_an_empty_one_is_refused() -> None:
    assert told(["a", "", "b"], []) == ("ab", None)
    with pytest.raises(UserError, match="expected at least one character"):
        StopText(["a", ""])
