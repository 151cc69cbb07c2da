"""What a model's files make us compute ends in time and memory, in one line; what known models do is done as ever."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sparsepack.errors import ArtifactError, SiteError, UserError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sites import chosen_sites
from sparsepack.models.tokenizer import sandbox
from sparsepack.models.tokenizer.chat import _rendered, render_chat
from sparsepack.models.tokenizer.sandbox import SANDBOX, Sandbox, SandboxError, SandboxTokenizer
from sparsepack.runtime.generation.generate import open_tokenizer, prompt_tokens

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    # Of a constant jinja would work out the power when it compiles, and fail to write its digits.
    "arithmetic without a loop": "{% set b = 7 %}" + "{% set a = b ** 5000000 %}" * 400,
    "one call of a filter": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(20) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | pprint | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
}
HUGE = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "joined text": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a filter": "{{ 'a' | center(10 ** 10) }}",
    "what is put out": "{% set x = 'a' * 10 ** 7 %}{% for i in range(30) %}{{ x }}{% endfor %}",
    "deep lists": "{% set n = namespace(x=1) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
}


def some(cases: dict[str, str], *fast: str) -> list[Any]:
    """Cases, of which all others are long: each waits for its end, and for another child."""
    return [pytest.param(each, id=name, marks=[pytest.mark.long][: name not in fast]) for name, each in cases.items()]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)


def tokenizer(**parts: Any) -> Tokenizer:
    made = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "aa": 3}, [("a", "a")], unk_token="<s>"))
    made.add_special_tokens([AddedToken("<s>", special=True)])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# templates


@pytest.mark.parametrize("template", some(ENDLESS, "loops", "one call of a filter"))
def test_a_template_that_goes_on_and_on_is_ended(template: str) -> None:
    with pytest.raises(UserError, match=r"chat template cannot take this conversation .*was ended") as refused:
        _rendered(template, MESSAGES)  # `render_chat` tries a template out, five times in all
    one_line(refused)


@pytest.mark.parametrize("template", some(HUGE, "a product", "what is put out", "deep lists"))
def test_a_template_makes_no_huge_value(template: str) -> None:
    with pytest.raises(UserError, match="chat template cannot take this conversation") as refused:
        _rendered(template, MESSAGES)
    one_line(refused)
    assert render_chat("x", MESSAGES) == "x", "the next one is rendered"


def test_a_template_that_takes_long_keeps_no_other_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 30.0)
    caught: list[str] = []

    def work() -> None:
        try:
            _rendered(ENDLESS["loops"], MESSAGES)
        except UserError as error:
            caught.append(str(error))

    render_chat("x", MESSAGES)
    thread = threading.Thread(target=work)
    thread.start()
    assert [render_chat("y", MESSAGES) for _ in range(3)] == ["y"] * 3
    assert thread.is_alive()
    (busy,) = SANDBOX._busy
    busy.kill()
    thread.join()
    assert "was ended" in caught[0]


def test_messages_that_json_cannot_say_are_refused() -> None:
    with pytest.raises(UserError, match="cannot take this conversation"):
        render_chat("x", [{"role": "user", "content": object()}])


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


# tokenizers

HOSTILE: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
    "a pattern that backtracks for long": (
        "was ended",
        lambda: tokenizer(pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+b"), "isolated")),
    ),
    "a text that grows": (
        "memory|more than",
        lambda: tokenizer(normalizer=normalizers.Sequence([normalizers.Replace("c", "c" * 100)] * 8)),
    ),
    "a pattern at which the library panics": (
        "Onig",
        lambda: tokenizer(pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+ {30}b"), "isolated")),
    ),
}


@pytest.mark.parametrize(("says", "make"), HOSTILE.values(), ids=HOSTILE)
def test_a_tokenizer_that_goes_on_and_on_costs_one_request(says: str, make: Callable[[], Tokenizer]) -> None:
    hostile = open_tokenizer(make().to_str())
    text = "a" * 60 if says == "Onig" else ("a" * 20 + " c") * 2000
    with pytest.raises(UserError, match=f"tokenizer cannot take this text .*({says})") as refused:
        prompt_tokens(hostile, text, None)
    one_line(refused)
    assert prompt_tokens(open_tokenizer(tokenizer().to_str()), "ab", None) == [1, 2]


def test_texts_and_ids_are_those_of_the_library() -> None:
    made = tokenizer(decoder=decoders.Fuse(), normalizer=normalizers.Replace("c", "b"))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(1)
    made.enable_padding(length=9)
    opened = open_tokenizer(made.to_str())
    made.no_truncation()
    made.no_padding()
    for text in ("aac", "", "a<s>b", "\U0001f642 a"):
        for special in (True, False):
            expected, found = made.encode(text, add_special_tokens=special), opened.encode(text, special)
            assert (found.ids, found.offsets, found.tokens) == (expected.ids, expected.offsets, expected.tokens)
    assert [each.ids for each in opened.encode_batch(["a", "", "bb"], False)] == [[1], [], [2, 2]]
    assert opened.decode([3, 2, 0]) == made.decode([3, 2, 0])
    assert opened.decode([0], skip_special_tokens=False) == "<s>"
    assert json.loads(opened.to_str())["model"] == json.loads(made.to_str())["model"]
    assert (opened.id_to_token(3), opened.token_to_id("aa"), opened.get_vocab_size()) == ("aa", 3, 4)


def with_decoder(**decoder: Any) -> str:
    return json.dumps({**json.loads(tokenizer().to_str()), "decoder": decoder})


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40},
        {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [{"type": "Fuse"}] * 40}]},
        {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 8},
    ],
)
def test_a_decoder_without_a_bound_is_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="decoder"):
        open_tokenizer(with_decoder(**decoder))


def test_a_token_of_a_whole_book_is_refused() -> None:
    read = json.loads(tokenizer().to_str())
    read["model"]["vocab"]["a" * 9000] = 4
    with pytest.raises(ArtifactError, match="token of more than"):
        open_tokenizer(json.dumps(read))


class PanicException(BaseException):
    """As what the library raises for a mistake of its own, which is no Exception."""


def test_a_panic_of_the_library_while_decoding_is_an_error_of_one_line() -> None:
    class Panics:
        def decode(self, *_: Any, **__: Any) -> str:
            raise PanicException("index out of bounds")

    opened: Any = open_tokenizer(tokenizer().to_str())
    assert isinstance(opened, SandboxTokenizer)
    opened._here = Panics()
    with pytest.raises(ArtifactError, match="index out of bounds"):
        opened.decode([1])


# patterns


def test_a_pattern_of_a_recipe_that_backtracks_is_ended() -> None:
    with pytest.raises(SiteError, match="was ended") as refused:
        chosen_sites(open_checkpoint("shipped:tiny").sites, ["re:(.|.)*(.|.)*(.|.)*(.|.)*(.|.)*x"], [])
    one_line(refused)


# the child


def test_a_child_takes_no_module_from_the_working_folder(tmp_path: Path) -> None:
    for name in ("json", "tokenizers", "sparsepack", "jinja2"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    code = "from sparsepack.models.tokenizer.sandbox import SANDBOX as s; print(s.call('full_matches', 'a', ['a']))"
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "(['a'], b'')\n"
    assert not (tmp_path / "ran").exists()


def test_a_child_without_an_answer_is_an_error_and_the_next_request_has_another() -> None:
    children = Sandbox()
    children.call("full_matches", "a", [])
    (child,) = children._idle
    os.kill(child._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="crashed"):
        children.call("full_matches", "a", [])
    assert children.call("full_matches", "a", ["a"])[0] == ["a"]
    children.close()
    with pytest.raises(SandboxError, match="is ending"):
        children.call("full_matches", "a", [])


def test_a_child_may_connect_to_a_port_as_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BY_PORT", True)
    children = Sandbox()
    assert children.call("full_matches", "a", ["a", "b"])[0] == ["a"]
    children.close()


def test_closing_ends_a_request_at_once() -> None:
    children = Sandbox()
    ended: list[float] = []

    def work() -> None:
        with pytest.raises(SandboxError):
            children.call("full_matches", "(.|.)*x", ["a" * 60], seconds=600.0)
        ended.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    while not children._busy:
        time.sleep(0.01)
    children.close()
    thread.join(20)
    assert ended
