"""The page in a browser, of a server of the tiny model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import Browser, chromium
from serving import Served

from sparsepack.loading import Model
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.page.routes import FILES
from sparsepack.serve.prepare import PreparedRequest
from sparsepack.serve.schema import TextParameters

ENTER = "\ue007"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Browser]:
    """The page as a new visitor sees it; no test may leave a complaint in the console."""
    browser.call("url", url=served.url)
    browser.script("localStorage.clear(); sessionStorage.clear()")
    browser.requests()
    browser.call("refresh")
    browser.wait("document.getElementById('facts').textContent")
    yield browser
    assert browser.complaints() == []


@pytest.fixture
def requests(served: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page asks for: "last". Under "add" stands what its requests have besides."""
    prepare, found = served.service.preparer.prepare, {"add": {}}

    def changed(request: TextParameters) -> PreparedRequest:
        found["last"] = request.model_dump(exclude_none=True)
        return prepare(request.model_copy(update=found["add"]))

    monkeypatch.setattr(served.service.preparer, "prepare", changed)
    return found


def says(text: str) -> dict[str, Any]:
    """Parameters by which the model answers just this."""
    return {"grammar": f"root ::= {json.dumps(text)}", "temperature": 0}


def ask(page: Browser, message: str = "Who was there?") -> None:
    """Send a message, and wait for the end of its answer."""
    page.type("#message", message + ENTER)
    page.wait("document.querySelector('article.assistant') && !document.getElementById('send').hidden")


def test_an_answer_comes_with_its_speed_and_the_share_of_bits_read(page: Browser, served: Served) -> None:
    assert page.text("h1") == "tiny"
    assert "zigzag-q4_k" in page.text("#facts")
    assert "4.50 bits" in page.text("#facts")
    page.type("#settings-button", ENTER)
    page.type("[name=temperature]", "0")
    page.type("[name=max_tokens]", "60")
    ask(page)
    assert page.text(".user .text") == "Who was there?"
    assert page.text(".assistant .text")
    status = page.text(".status")
    assert "60 tokens" in status
    assert "tokens/s" in status
    assert "% of bits read" in status
    assert page.text("#announcement") == page.script("return document.querySelector('.assistant .text').textContent")
    assert {url for url in page.requests() if not url.startswith(("data:", served.url))} == set()


def test_an_answer_is_seen_before_its_end_and_can_be_stopped(
    page: Browser, served: Served, requests: dict[str, Any]
) -> None:
    requests["add"] = {"temperature": 0}
    with served.held(lambda: any(len(it.continuation.tokens) >= 20 for it in served.texts._running)):
        page.type("#message", "Once" + ENTER)
        page.wait("document.querySelector('.assistant .text').textContent.length > 10")
        assert "tokens/s" in page.text(".status")
        page.click("#stop")
        page.wait("!document.getElementById('send').hidden")
    assert "stopped" in page.text(".status")
    shown = page.text(".assistant .text")
    page.call("refresh")
    page.wait("document.querySelector('.assistant .text').textContent")
    assert page.text(".assistant .text") == shown, "a tab that is loaded again has its conversation"


def test_settings_are_sent_and_kept_and_a_conversation_goes_on(page: Browser, requests: dict[str, Any]) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 8, "seed": 3}
    page.click("#settings-button")
    for name, value in {**settings, "system": "Be brief."}.items():
        page.type(f"[name={name}]", str(value))
    page.call("refresh")
    ask(page, "Hello")
    ask(page, "Again")
    answer = page.text(".assistant .text")
    page.click("article:last-child [data-again]")
    page.wait("!document.getElementById('send').hidden")
    assert page.text(".assistant .text") == answer, "the same seed gives the same answer"
    sent = requests["last"]
    assert {name: sent[name] for name in settings} == settings
    roles = [(message["role"], message["content"]) for message in sent["messages"]]
    assert roles[:2] == [("system", "Be brief."), ("user", "Hello")]
    assert roles[3:] == [("user", "Again")]
    page.click("#clear")
    ask(page, "Hello")
    assert len(requests["last"]["messages"]) == 2


HOSTILE = (
    "<img src=x onerror=alert(1)></script><script>alert(2)</script>\n\n"
    "[a](javascript:alert(3)) ![b](https://example.com/b.png) <b>c</b>\n\n```html\n<i>d</i>\n```"
)


def test_what_a_model_writes_stays_text(page: Browser, served: Served, requests: dict[str, Any]) -> None:
    requests["add"] = says(HOSTILE)
    page.requests()
    ask(page)
    assert page.text(".assistant .text p").startswith("[a](javascript:alert(3))")
    assert "<img src=x onerror=alert(1)></script><script>alert(2)</script>" in page.text(".assistant .text")
    assert page.text("pre code") == "<i>d</i>"
    assert (
        page.script("return document.querySelectorAll('.text :is(img, script, b, i), a[href^=javascript]').length") == 0
    )
    assert {url.rpartition("/")[0] for url in page.requests()} == {f"{served.url}/v1/chat"}
    assert page.script("try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; }") == "TypeError"
    assert "TrustedHTML" in "".join(page.complaints())


MARKDOWN = (
    "<think>I *think*.</think># Title\n\n1. one\n   - **two**\n2. `three`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote"
)


def test_markdown_is_shown_and_thoughts_are_folded(page: Browser, requests: dict[str, Any]) -> None:
    requests["add"] = says(MARKDOWN)
    ask(page)
    of = {"h2": "Title", "ol > li > ul strong": "two", "ol > li > code": "three", "td": "2", "blockquote": "quote"}
    assert {css: page.text(f".text {css}") for css in of} == of
    assert page.text("details em") == "think"
    assert page.script("return document.querySelector('details').open") is False
    assert "<think>" not in page.text(".assistant")


def test_the_page_asks_for_the_key_that_the_api_needs(browser: Browser, model: Model) -> None:
    with Served(model, ServeOptions(api_keys=("secret",))) as locked:
        browser.call("url", url=locked.url)
        browser.wait("!document.getElementById('key-form').hidden")
        browser.type("#key", "wrong" + ENTER)
        browser.wait("document.getElementById('key-note').textContent.includes('does not take')")
        browser.type("#key", "secret" + ENTER)
        browser.wait("document.getElementById('key-form').hidden")
        ask(browser)
        assert browser.text(".assistant .text")
        assert browser.script("return Object.keys(localStorage).filter((name) => name.includes('key'))") == []
    browser.complaints()  # of the two answers 401


def test_an_error_is_seen_and_the_answer_can_be_asked_for_again(page: Browser, requests: dict[str, Any]) -> None:
    requests["add"] = {"max_tokens": 10**6}
    ask(page)
    assert "maximum context length" in page.text(".error")
    requests["add"] = says("Better.")
    page.click("[data-again]")
    page.wait("document.querySelector('.assistant .text').textContent === 'Better.'")
    assert "400" in "".join(page.complaints())


@pytest.mark.parametrize("path", FILES)
def test_files_have_a_strict_policy_and_an_etag_and_need_no_key(model: Model, path: str) -> None:
    with Served(model, ServeOptions(api_keys=("secret",))) as locked, locked.http() as http:
        whole = http.get(path)
        assert whole.status_code == 200
        assert whole.text
        assert whole.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
        again = http.get(path, headers={"If-None-Match": whole.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert http.post(path).status_code == 405


def test_pages_of_other_names_do_not_get_the_page(served: Served) -> None:
    assert httpx.get(served.url, headers={"Host": "evil.example"}).status_code == 403
