"""A template of a stranger ends in time and makes no huge value; one of a known model is rendered as before."""

import threading

import pytest

from sparsepack.errors import UserError
from sparsepack.models.tokenizer import template_limits
from sparsepack.models.tokenizer.chat import render_chat

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = {
    "ranges": NESTED,
    "a list": "{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3,
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [3] * 60 recursive %}{{ loop([3] * 60) }}{% endfor %}",
}
HUGE = {
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product the other way round": "{{ 10 ** 10 * [1] }}",
    "joined text": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a sum": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a method": "{{ 'a'.ljust(10 ** 10) }}",
    "filler": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.2)


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_loops_on_and_on_is_ended(template: str) -> None:
    with pytest.raises(UserError, match=r"was ended|recursion") as refused:
        render_chat(template, MESSAGES)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_a_template_makes_no_huge_value(template: str) -> None:
    with pytest.raises(UserError, match=r"too large|a value of more than|with the number|lipsum"):
        render_chat(template, MESSAGES)


def test_the_limit_counts_a_text_and_not_all_of_a_process() -> None:
    slow = "{% for a in range(60000) %}{% endfor %}x"
    assert [render_chat(slow, MESSAGES) for _ in range(30)] == ["x"] * 30


def test_a_template_is_ended_in_a_thread_too() -> None:
    caught: list[Exception] = []

    def work() -> None:
        try:
            render_chat(NESTED, MESSAGES)
        except UserError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "was ended" in str(caught[0])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }}{% endfor %}", "1/22/2."),
        ("{% for m in messages %}{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}{% endfor %}", "assistant"),
        ("{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}", "none"),
        ("{% for m in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for c in 'abc' %}{% if c == 'c' %}{% break %}{% endif %}{{ c }}{% endfor %}", "ab"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% generation %}{{ messages[0] | tojson }}{% endgeneration %}", '{"role": "user", "content": "hi"}'),
        ("{{ '%s %d' % ('a', 3) }} {{ 2 * 3 + 4 ** 2 }} {{ 'ab' * 2 }} {{ ('a' ~ 1) + 'b' }}", "a 3 22 abab a1b"),
        ("{{ messages | map(attribute='content') | join('-') | trim | upper }}", "HI-HO"),
    ],
)
def test_what_templates_do_is_done_as_ever(template: str, expected: str) -> None:
    assert render_chat(template, MESSAGES) == expected
