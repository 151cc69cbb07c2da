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
    "a filter that goes on": "{{ [1] | slice(10 ** 7) | list | length }}",
}
HUGE = {
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a product the other way round": "{{ 10 ** 10 * [1] }}",
    "joined text": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a sum": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a method": "{{ 'a'.ljust(10 ** 10) }}",
    "filler": "{{ lipsum(n=10 ** 9) }}",
    "a filter": "{{ 'a' | center(10 ** 9) }}",
    "a filter that repeats": "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "a method that repeats": "{{ ('a' * 10000).replace('a', 'b' * 100000) }}",
    "indented lines": "{{ ('a\n' * 100000) | indent(100000) }}",
    "indented JSON": "{{ ([1] * 100000) | tojson(indent=100000) }}",
    "what is put out": "{% set x = 'a' * 10 ** 7 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "what is put out by a macro": "{% set x = 'a' * 10 ** 7 %}{% macro f() %}"
    + "{{ x }}" * 9
    + "{% endmacro %}{{ f() }}",
    "a joined list": "{{ (['a' * 10 ** 6] * 10 ** 6) | join }}",
    "a list made one by one": "{{ range(90000) | map('center', 10 ** 6) | list | length }}",
    "a text of items made one by one": "{{ range(90000) | map('center', 10 ** 6) | join }}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width in a format": "{{ '{:>999999999}'.format(1) }}",
    "a width in a filter": "{{ '%999999999d' | format(1) }}",
    "a width among the values": "{{ '%*d' % (10 ** 9, 1) }}",
    "a width in a list": "{{ '{:>{}}'.format(1, 10 ** 7) }}",
    "a text in each of many variables": "".join(f"{{% set x{n} = 'a' * 2 ** 24 %}}" for n in range(99)),
    "lists of lists": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "tuples of tuples": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
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
    with pytest.raises(UserError, match=r"too (large|wide)|of more than|with the number|lipsum|the width"):
        render_chat(template, MESSAGES)


def test_what_a_template_makes_is_counted_for_each_text() -> None:
    large = "{% for i in range(3) %}{% set x = 'a' * 2 ** 23 %}{% endfor %}x"
    assert [render_chat(large, MESSAGES) for _ in range(12)] == ["x"] * 12


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
        ("{{ '{{\"a\": {:>3}}}'.format(1) }}{{ '%02d' | format(3) }}", '{"a":   1}03'),
        ("{{ '{\"a\": {\"20240801\": %s}} 99999999999' | format('x') }}", '{"a": {"20240801": x}} 99999999999'),
        (
            "{% set a, b = 1, 2 %}{% for x, y in [(1, 2)] %}{{ x + y + a + b }}{% endfor %}{{ [1, {'a': 2}] }}",
            "6[1, {'a': 2}]",
        ),
        (
            "{{ messages | tojson(indent=2) | length }}{{ 'a\nb' | indent(2) }}{{ 'aXb' | replace('X', '--') }}",
            "105a\n  ba--b",
        ),
        ("{{ [3, 1, 2] | sort | first }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "11"),
        ("{{ messages | map(attribute='content') | join('-') | trim | upper }}", "HI-HO"),
    ],
)
def test_what_templates_do_is_done_as_ever(template: str, expected: str) -> None:
    assert render_chat(template, MESSAGES) == expected
