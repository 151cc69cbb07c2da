"""ContinuousBatch out of an engine: what is kept between them, and that it changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from sparsepack.loading import Model
from sparsepack.runtime.options import GenerateOptions
from sparsepack.serve import batch as batch_module
from sparsepack.serve.batch import ContinuousBatch
from sparsepack.serve.ticket import Event, Failure, Finish, GenerationRequest, TextDelta


@dataclass
class Reader:
    """Somebody who waits for a text, for some turns."""

    request: GenerationRequest
    turns: int = 10**9
    events: list[Event] = field(default_factory=list)

    domain: str = ""

    @property
    def cancelled(self) -> bool:
        return self.turns <= 0

    def put(self, event: Event) -> None:
        self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def end(self) -> Event | None:
        return self.events[-1] if self.events and not isinstance(self.events[-1], TextDelta) else None


def asked(ids: Sequence[int], tokens: int = 12, wanted: int = 10**9, **options: object) -> Reader:
    return Reader(GenerationRequest(tuple(ids), GenerateOptions(tokens, **options)), wanted)  # type: ignore[arg-type]


def run(texts: ContinuousBatch, *readers: Reader) -> None:
    """Make turns until nobody waits."""
    for reader in readers:
        texts.join(reader)
    while texts.tickets:
        texts.advance()
        for reader in readers:
            reader.turns -= 1


def made(
    model: Model, ids: Sequence[int], tokens: int = 12, wanted: int = 10**9, **options: object
) -> tuple[str, Event | None]:
    """The text after a prompt and its end; it is no longer wanted after so many turns."""
    reader = asked(ids, tokens, wanted, **options)
    run(ContinuousBatch(model), reader)
    return reader.text, reader.end


def ids_of(model: Model, length: int) -> list[int]:
    text = "There was a king who had three sons. The eldest said: I will go and see the world. " * 40
    return [0, *model.tokenizer.encode(text, add_special_tokens=False).ids[: length - 1]]


@pytest.mark.parametrize("before", [1, 40, 64, 95, 513, 600])
@pytest.mark.parametrize("length", [64, 65, 97, 530])
def test_a_text_is_the_same_whatever_was_asked_before(model: Model, before: int, length: int) -> None:
    ids = ids_of(model, length)
    model.engine.reset()
    expected, end = made(model, ids, temperature=1.0, seed=4)
    assert end == Finish("length", 12, 0)
    model.engine.reset()
    made(model, ids_of(model, before))
    text, end = made(model, ids, temperature=1.0, seed=4)
    assert text == expected
    kept = min(before, length - 1) // 32 * 32
    assert end == Finish("length", 12, kept)


def test_a_turn_of_a_chat_goes_on_from_the_last_prompt_and_not_from_its_answer(model: Model) -> None:
    ids = ids_of(model, 100)
    model.engine.reset()
    made(model, ids)
    assert model.engine.position == 100
    _, end = made(model, [*ids, *ids_of(model, 30)])
    assert end == Finish("length", 12, 96)


def test_a_text_that_nobody_wants_ends_during_the_prefill_and_after_any_token(model: Model) -> None:
    ids = ids_of(model, 900)
    model.engine.reset()
    assert made(model, ids, wanted=1) == ("", None)
    assert model.engine.positions[0] == 512
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
    assert isinstance(end, Finish)
    assert end.reason == "stop"
    assert 0 < end.tokens < 40


def test_a_text_of_no_tokens_runs_nothing(model: Model) -> None:
    assert made(model, ids_of(model, 20), 0)[0] == ""


def test_after_a_failure_the_engine_begins_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(model, 50)
    expected = made(model, ids)[0]
    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "decode_all", lambda *_: 1 / 0)
        end = made(model, ids)[1]
        assert isinstance(end, Failure)
        assert isinstance(end.error, ZeroDivisionError)
    assert set(model.engine.positions) == {0}
    assert made(model, ids)[0] == expected


# several at a time


@pytest.fixture
def texts(dense: Model) -> ContinuousBatch:
    dense.engine.reset()
    return ContinuousBatch(dense)


def test_texts_that_join_and_leave_between_tokens_are_those_of_an_engine_alone(
    dense: Model, texts: ContinuousBatch
) -> None:
    """With seeds at which none is drawn where two tokens meet: logits differ by 0.002 from those of one alone."""
    readers = [asked(ids_of(dense, 20 + 9 * n), 5 + 3 * n, seed=40 + n, temperature=0.3 * (n % 2)) for n in range(20)]
    waiting = [*readers]
    while waiting or texts.tickets:
        if waiting and texts.has_room:
            texts.join(waiting.pop(0))
        texts.advance()
    for reader in readers:
        dense.engine.reset()
        alone = asked(reader.request.ids, reader.request.options.tokens)
        alone.request = reader.request
        run(ContinuousBatch(dense), alone)
        assert (reader.text, reader.end.tokens) == (alone.text, alone.end.tokens)


def test_a_long_prompt_does_not_stop_running_streams(dense: Model, texts: ContinuousBatch) -> None:
    stream, long = asked(ids_of(dense, 10), 200), asked(ids_of(dense, 900), 2)
    texts.join(stream)
    texts.advance()
    texts.join(long)
    turns = 0
    while not long.events:
        before = len(stream.events)
        texts.advance()
        turns += 1
        assert len(stream.events) > before, "each turn gives the stream a token"
    assert turns >= 900 // batch_module.PREFILLED_BETWEEN_TOKENS
    run(texts)
    assert stream.end == Finish("length", 200, 0)


def test_a_long_prompt_does_not_keep_a_short_one_waiting(dense: Model, texts: ContinuousBatch) -> None:
    stream, long, short = asked(ids_of(dense, 10), 200), asked(ids_of(dense, 900), 2), asked(ids_of(dense, 20), 2)
    for reader in (stream, long, short):
        texts.join(reader)
        texts.advance()
    texts.advance()
    assert short.events
    assert not long.events


def test_each_chat_goes_on_from_its_own_last_prompt(dense: Model, texts: ContinuousBatch) -> None:
    prompts = [[n, *ids_of(dense, 99)] for n in (5, 6, 7)]
    run(texts, *(asked(ids) for ids in prompts))
    later = [asked([*ids, *ids_of(dense, 30)]) for ids in reversed(prompts)]
    run(texts, *later)
    assert [reader.end for reader in later] == [Finish("length", 12, 96)] * 3


def test_a_new_text_takes_the_sequence_that_was_left_longest_ago(dense: Model, texts: ContinuousBatch) -> None:
    sequences = len(dense.engine.positions)
    prompts = [[n, *ids_of(dense, 99)] for n in range(sequences + 1)]
    for ids in prompts:
        run(texts, asked(ids, 1))
    again = [asked(ids, 1) for ids in (prompts[-1], prompts[1])]
    for reader in again:
        run(texts, reader)
    assert [reader.end.cached for reader in again] == [96, 96]
    first = asked(prompts[0], 1)
    run(texts, first)
    assert first.end == Finish("length", 1, 0)


def test_texts_are_left_between_tokens_and_between_pieces_of_a_prompt(dense: Model, texts: ContinuousBatch) -> None:
    stays = asked(ids_of(dense, 10), 60)
    goes = [asked(ids_of(dense, 900), 5, wanted=3), asked(ids_of(dense, 12), 60, wanted=7)]
    run(texts, stays, *goes)
    assert [reader.end for reader in goes] == [None, None]
    assert len(goes[1].events) == 7
    assert stays.end == Finish("length", 60, 0)
    assert len(texts._free) == texts.capacity


def test_a_text_whose_choice_fails_leaves_those_whose_prompts_are_read_alone(
    dense: Model, texts: ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = asked(ids_of(dense, 40)), asked(ids_of(dense, 50))
    texts.join(bad)
    texts.join(good)
    monkeypatch.setattr(texts._running[0].continuation.sampler, "choose", lambda logits: 1 / 0)
    run(texts)
    assert isinstance(bad.end, Failure)
    assert good.end == Finish("length", 12, 0)


# several after one prompt


@pytest.fixture
def prefilled(dense: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each prefill has read."""
    lengths, prefill = list[int](), dense.engine.prefill

    def counted(ids: Sequence[int], sequence: int = 0, every: bool = False) -> Tensor:
        lengths.append(len(ids))
        return prefill(ids, sequence)

    monkeypatch.setattr(dense.engine, "prefill", counted)
    return lengths


@pytest.mark.parametrize("length", [20, 64, 700])
def test_a_prompt_is_read_once_for_all_texts_after_it(
    dense: Model, texts: ContinuousBatch, prefilled: list[int], length: int
) -> None:
    ids = ids_of(dense, length)
    readers = [asked(ids, 10, temperature=1.0, seed=n) for n in range(4)]
    run(texts, *readers)
    assert sum(prefilled) == length
    assert [reader.end.cached for reader in readers] == [0, length, length, length]
    for reader in readers:
        dense.engine.reset()
        alone = asked(ids)
        alone.request = reader.request
        run(ContinuousBatch(dense), alone)
        assert reader.text == alone.text


def test_a_text_that_joins_later_goes_on_from_the_prompt_of_one_in_the_making(
    dense: Model, texts: ContinuousBatch, prefilled: list[int]
) -> None:
    """And not from what was decoded after it."""
    first = asked(ids_of(dense, 100), 30)
    texts.join(first)
    for _ in range(20):
        texts.advance()
    answer = dense.tokenizer.encode(first.text, add_special_tokens=False).ids
    later = asked([*ids_of(dense, 100), *answer, *ids_of(dense, 30)], 5)
    run(texts, later)
    assert later.end.cached == 96
    assert sum(prefilled) == 100 + len(later.request.ids) - 96
    assert first.end == Finish("length", 30, 0)


def test_others_go_on_reading_the_prompt_of_a_text_that_nobody_wants_any_more(
    dense: Model, texts: ContinuousBatch, prefilled: list[int]
) -> None:
    ids = ids_of(dense, 900)
    leaves, also_leaves, stays, too = asked(ids, wanted=1), asked(ids, wanted=1), asked(ids, 5), asked(ids, 5)
    run(texts, leaves, also_leaves, stays, too)
    assert leaves.events == also_leaves.events == []
    assert sum(prefilled) == 900
    assert [stays.end, too.end] == [Finish("length", 5, 512), Finish("length", 5, 900)]
    assert stays.text == too.text
    assert len(texts._free) == texts.capacity


def test_a_prompt_that_fails_for_one_text_is_read_anew_for_the_next(
    dense: Model, texts: ContinuousBatch, prefilled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, prefill = ids_of(dense, 50), dense.engine.prefill
    readers = [asked(ids, 5) for _ in range(3)]

    def fails_once(ids: Sequence[int], sequence: int = 0, every: bool = False) -> Tensor:
        if prefilled:
            return prefill(ids, sequence)
        prefilled.append(0)
        raise ZeroDivisionError

    monkeypatch.setattr(dense.engine, "prefill", fails_once)
    run(texts, *readers)
    assert isinstance(readers[0].end, Failure)
    assert [reader.end for reader in readers[1:]] == [Finish("length", 5, 0), Finish("length", 5, 50)]
    assert prefilled == [0, 50]


def test_a_choice_that_fails_for_one_text_leaves_those_after_the_same_prompt(
    dense: Model, texts: ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [asked(ids_of(dense, 50), 5) for _ in range(3)]
    for reader in readers:
        texts.join(reader)
    monkeypatch.setattr(texts._running[0].continuation.sampler, "choose", lambda logits: 1 / 0)
    run(texts)
    assert isinstance(readers[0].end, Failure)
    assert readers[1].text == readers[2].text != ""
