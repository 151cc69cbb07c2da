"""Texts out of an engine: what is kept between them, and that it changes nothing."""

from collections.abc import Sequence

import pytest

from sparsepack.loading import Model
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve.texts import make_text
from sparsepack.serve.worker import Ended, Piece, TextRequest


def made(
    model: Model, ids: Sequence[int], tokens: int = 12, wanted: int | None = None, **options: object
) -> tuple[str, Ended | None]:
    """The text after a prompt and its end; it is no longer wanted after so many looks."""
    looks = iter(range(10**9))
    asked = TextRequest(tuple(ids), GenerateOptions(tokens, **options))  # type: ignore[arg-type]
    events = list(make_text(model, asked, lambda: wanted is not None and next(looks) >= wanted))
    text = "".join(event.text for event in events if isinstance(event, Piece))
    ends = [event for event in events if isinstance(event, Ended)]
    assert len(ends) <= 1
    return text, ends[0] if ends else None


def ids_of(model: Model, length: int) -> list[int]:
    text = "There was a king who had three sons. The eldest said: I will go and see the world. " * 40
    return [0, *model.tokenizer.encode(text).ids[: length - 1]]


@pytest.mark.parametrize("before", [1, 40, 64, 95, 513, 600])
@pytest.mark.parametrize("length", [64, 65, 97, 530])
def test_a_text_is_the_same_whatever_was_asked_before(model: Model, before: int, length: int) -> None:
    ids = ids_of(model, length)
    model.engine.reset()
    expected, end = made(model, ids, temperature=1.0, seed=4)
    assert end == Ended("length", 12, 0)
    model.engine.reset()
    made(model, ids_of(model, before))
    text, end = made(model, ids, temperature=1.0, seed=4)
    assert text == expected
    kept = min(before, length - 1) // 32 * 32
    assert end == Ended("length", 12, kept)


def test_a_turn_of_a_chat_goes_on_from_the_last_prompt_and_not_from_its_answer(model: Model) -> None:
    ids = ids_of(model, 100)
    model.engine.reset()
    made(model, ids)
    assert model.engine.position == 100
    _, end = made(model, [*ids, *ids_of(model, 30)])
    assert end == Ended("length", 12, 96)


def test_a_text_that_nobody_wants_ends_during_the_prefill_and_after_any_token(model: Model) -> None:
    ids = ids_of(model, 900)
    model.engine.reset()
    assert made(model, ids, wanted=1) == ("", None)
    assert model.engine.position == 512
    whole, _ = made(model, ids)
    model.engine.reset()
    part, end = made(model, ids, wanted=5)
    assert end is None
    assert whole.startswith(part)
    assert made(model, ids)[0] == whole


def test_a_text_ends_before_a_stop_string_and_counts_its_tokens(model: Model) -> None:
    ids = ids_of(model, 20)
    whole, _ = made(model, ids, 40)
    stop = whole[10:14]
    text, end = made(model, ids, 40, stop=(stop,))
    assert text == whole[: whole.index(stop)]
    assert end is not None
    assert end.reason == "stop"
    assert 0 < end.tokens < 40


def test_a_text_of_no_tokens_runs_nothing(model: Model) -> None:
    assert made(model, ids_of(model, 20), 0)[0] == ""


def test_after_a_failure_the_engine_begins_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(model, 50)
    expected = made(model, ids)[0]
    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "decode_all", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(model, ids)
    assert model.engine.position == 0
    assert made(model, ids)[0] == expected
