"""Plans of a budget: never over it, nothing lost, never less for more of it, refused only below what must be there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepack.errors import PlacementError
from sparsepack.placement.budget import (
    Parts,
    Plan,
    Work,
    format_bytes,
    parse_bytes,
    plan_of_share,
    plan_within,
    spare_of,
    work_of,
)

SIZES = st.integers(0, 5000)


@st.composite
def models(draw: st.DrawFn) -> Parts:
    blocks, record, neurons = draw(st.integers(1, 5)), draw(st.integers(1, 40)), draw(st.integers(1, 200))
    sizes = st.lists(SIZES, min_size=blocks, max_size=blocks).map(tuple)
    work, least = (
        work_of(hidden=4, intermediate=neurons, blocks=blocks, vocabulary=9, sequences=2, record=record, model=model)
        for model in (draw(st.sampled_from([30_000, 10**6, 10**7])), 0)
    )
    made = Parts(draw(SIZES), draw(SIZES), draw(sizes), draw(sizes), record, neurons, draw(SIZES), work)
    return replace(made, least_work=draw(st.sampled_from([None, least])))


BEYOND = st.integers(0, 80_000)


@given(models(), BEYOND)
def test_a_plan_stays_within_its_budget_and_loses_nothing(parts: Parts, beyond: int) -> None:
    found = plan_within(parts, parts.least + beyond)
    assert found.card_bytes <= parts.least + beyond
    for name in ("embedding", "output", "attention", "gates"):
        sizes = getattr(parts, name)
        assert found.card[name] + found.host[name] == (sizes if isinstance(sizes, int) else sum(sizes))
    for name in ("records", "records for the processor"):
        assert found.host[name] == (0 if found.slots == parts.all_neurons else parts.records)
    shared = found.host["attention"] + found.host["gates"]
    assert found.host["matrices for the processor"] == shared
    assert found.host_bytes <= parts.weights + parts.records + shared
    assert 0 <= found.slots <= parts.all_neurons


@given(models(), BEYOND, st.integers(0, 5000))
def test_more_of_it_never_takes_anything_from_the_card(parts: Parts, beyond: int, more: int) -> None:
    less, found = plan_within(parts, parts.least + beyond), plan_within(parts, parts.least + beyond + more)
    for name in ("slots", "attention", "gates", "embedding", "output"):
        assert getattr(less, name) <= getattr(found, name)


@given(models(), BEYOND)
def test_what_leaves_first_is_on_the_card_only_with_all_that_leaves_later(parts: Parts, beyond: int) -> None:
    found = plan_within(parts, parts.least + beyond)
    assert not found.attention or found.output
    assert not found.gates or found.attention == parts.blocks
    assert not found.slots or found.gates == parts.blocks
    assert not found.embedding or found.whole


@given(models(), BEYOND, st.integers(1, 3000))
def test_copies_take_the_place_of_gates_that_do_not_all_fit(parts: Parts, beyond: int, size: int) -> None:
    gate = -(-max(parts.gates, default=0) // parts.neurons)
    copied = replace(parts, copies=tuple(min(size, each) for each in parts.gates), gate=gate)
    without, found = (plan_within(of, parts.least + beyond) for of in (parts, copied))
    assert found.card_bytes <= parts.least + beyond
    assert found.output == without.output
    if without.gates == parts.blocks or not without.output:
        assert replace(found, parts=parts) == without
        return
    assert found.gates == 0
    assert not found.attention or found.copied == parts.blocks
    assert not found.slots or found.attention == parts.blocks
    assert without.attention < parts.blocks or found.copied >= without.gates
    assert not found.whole or not parts.all_neurons * gate
    assert found.host["gates"] == sum(parts.gates)
    assert found.card["copies of gates"] == sum(copied.copies[: found.copied])
    assert found.card["records"] == (found.slots + found.spare) * ((parts.record + gate) if found.copied else 0)
    assert found.always_read()[1] == found.host["output"] + found.host["attention"] + sum(parts.gates[found.copied :])


@given(models(), BEYOND)
def test_no_slot_is_wasted(parts: Parts, beyond: int) -> None:
    found = plan_within(parts, parts.least + beyond)
    if found.gates == parts.blocks and not found.whole:
        one_more = (found.slots + 1 + spare_of(found.slots + 1)) * parts.record
        assert found.card_bytes - found.card["records"] + min(one_more, parts.records) > parts.least + beyond


@given(models())
def test_the_least_works_and_less_is_refused_with_it(parts: Parts) -> None:
    plan_within(parts, parts.least)
    with pytest.raises(PlacementError, match=r"give at least [\d.]+MB, or a smaller --context") as caught:
        plan_within(parts, parts.least - 1)
    assert "\n" not in str(caught.value)
    given = str(caught.value).split("at least ")[1].split(",")[0]
    plan_within(parts, parse_bytes(given))


@given(models())
def test_all_that_a_model_has_makes_it_whole(parts: Parts) -> None:
    budget = parts.cache + parts.work.bytes + parts.weights
    found = plan_within(parts, max(budget, parts.least + 22 * (parts.work.bytes - parts.least + parts.cache)))
    assert found.whole
    assert found.embedding
    assert (found.host_bytes, found.card_bytes) == (0, budget)
    assert found.work == parts.work


@given(models(), BEYOND)
def test_buffers_grow_with_the_budget_from_the_least_ones(parts: Parts, beyond: int) -> None:
    least, found = parts.least_work or parts.work, parts.work_within(parts.least + beyond)
    assert least.bytes <= found.bytes <= min(parts.work.bytes, least.bytes + beyond * 3 / 64)
    assert found.bytes > least.bytes + beyond * 3 / 64 - 1 or found == parts.work
    for name in ("positions", "scratch", "staged", "steps", "prefill"):
        assert getattr(least, name) <= getattr(found, name) <= getattr(parts.work, name)
    assert found.unused >= 0
    assert found.staged % parts.record == 0


def test_of_staging_buffers_between_the_least_and_the_most_whole_records_are_counted() -> None:
    least = Work(positions=8, scratch=512, staged=7, steps=100, prefill=80)
    work = replace(least, staged=7 * 1000)
    parts = Parts(100, 50, (10,), (7,), record=7, neurons=2000, cache=40, work=work, least_work=least)
    staged = {parts.work_within(parts.least + beyond).staged for beyond in range(0, 300_000, 999)}
    assert len(staged) > 10
    assert not any(size % 7 for size in staged)


@given(models(), st.floats(0, 1))
def test_a_share_leaves_all_but_records_on_the_card(parts: Parts, share: float) -> None:
    found = plan_of_share(parts, share)
    assert found.slots == round(share * parts.all_neurons)
    assert found.host_bytes == (0 if found.whole else 2 * parts.records)


@given(st.integers(0, 10**13))
def test_bytes_in_words_are_read_as_no_fewer(count: int) -> None:
    assert count <= parse_bytes(format_bytes(count)) <= 1.011 * count + 10_000


@pytest.mark.parametrize("text", ["8", "GB", "8TB", "-1GB", "8 G", "1e3GB", "", "8GB "])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="expected gigabytes or megabytes, as in 24GB"):
        parse_bytes(text)


def test_a_token_reads_over_the_bus_what_is_in_the_hosts_memory() -> None:
    work = work_of(hidden=4, intermediate=8, blocks=2, vocabulary=9, sequences=1, record=3, model=1000)
    parts = Parts(100, 50, (10, 20), (7, 8), record=3, neurons=8, cache=40, work=work)
    found = Plan(parts, slots=0, attention=2, gates=1, embedding=False)
    assert found.always_read() == (50 + 30 + 7 + 40, 8)
    assert replace(found, output=False, attention=1).always_read() == (10 + 7 + 40, 50 + 20 + 8)
