"""`sparsepack serve` as a process (a fork): how it begins, how it ends, and what it says where it cannot."""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner
from forks_for_tests import Fork
from serving import TEMPLATE, wait_until

from sparsepack.cli import main
from sparsepack.loading import Model, load
from sparsepack.serve.options import ServeOptions


class Process:
    """A server in a process of its own."""

    def __init__(self, artifact: Path, *options: str, env: dict[str, str] | None = None) -> None:
        reading, writing = os.pipe()
        with open(writing, "w") as errors:
            arguments = ["serve", str(artifact), "--port", "0", *options]
            self.process = Fork(arguments, {**os.environ, **(env or {})}, None, errors)
        self.said: list[str] = []
        self._stderr = open(reading)  # noqa: SIM115 (a thread reads on)
        for line in self._stderr:
            self.said.append(line)
            if found := re.search(r" at (http://\S+)/v1; Ctrl-C ends it", line):
                self.url = found[1]
                break
        self._rest = threading.Thread(target=lambda: self.said.extend(self._stderr))
        self._rest.start()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def listens(self) -> bool:
        """Whether it takes connections."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(self.url.rpartition(":")[2]))) == 0

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        self._rest.join(10)
        return status


@contextlib.contextmanager
def process(artifact: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    made = Process(artifact, *options, env=env)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(30)
        made._rest.join(10)
        made._stderr.close()


def fails(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr.splitlines()[-1]


def test_each_option_of_serving_is_on_the_command_line() -> None:
    names = {parameter.name for parameter in main.commands["serve"].params}
    assert {field.name for field in fields(ServeOptions)} <= names


@pytest.mark.parametrize(("asked", "together"), [((), None), (("--sequences", "3"), 3)])
def test_as_many_texts_are_made_together_as_were_asked_for_and_else_as_the_backend_can(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], together: int | None
) -> None:
    models: list[Model] = []
    monkeypatch.setattr("sparsepack.serve.server.serve", lambda model, *rest: models.append(model))
    assert CliRunner().invoke(main, ["serve", str(artifact), "--port", "0", *asked]).exit_code == 0
    assert len(models[0].engine.positions) == (together or len(load(artifact, sequences=None).engine.positions)) > 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_lets_a_text_come_to_its_end_and_refuses_others(artifact: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    options = ("--grace", "60", "--model-name", "my/model", "--chat-template", str(tmp_path / "template"))
    with process(artifact, *options) as server:
        messages = [{"role": "user", "content": "Hello"}]
        stream = iter(
            server.client().chat.completions.create(
                model="my/model", messages=messages, max_tokens=400, temperature=0, stream=True
            )
        )
        pieces = [next(stream) for _ in range(5)]
        server.process.send_signal(number)
        wait_until(lambda: not server.listens())
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason in ("length", "stop")
        assert server.process.wait(30) == 0
        server._rest.join(10)
        assert "Traceback" not in "".join(server.said)


def test_after_its_time_a_text_is_broken_off_and_its_client_told(artifact: Path) -> None:
    # Plain torch takes seconds for so many tokens; the kernels, on some machines, less than the signal. Greedily, since
    # a text that is sampled may end after a few tokens.
    with process(artifact, "--grace", "0.05", "--backend", "reference") as server:
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 1000, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "the server is ending" in rest[-2]
        assert "[DONE]" not in rest
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("times", [2, 3])
def test_ctrl_c_again_breaks_a_text_off_without_a_traceback(artifact: Path, times: int) -> None:
    with process(artifact, "--backend", "reference", "--grace", "60") as server:
        asked = threading.Thread(target=_ask, args=(server,))
        asked.start()
        wait_until(lambda: httpx.get(f"{server.url}/health").json()["making"] == 1)
        # One after the other: two signals that come before the first is seen are one.
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not server.listens())
        if times == 3:
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: any("broken off" in line for line in server.said))
        assert server.end(signal.SIGINT) in (0, 130, -signal.SIGINT)
        asked.join(30)
        assert "Traceback" not in "".join(server.said)
        assert any("broken off" in line for line in server.said), server.said


def _ask(server: Process) -> None:
    with contextlib.suppress(httpx.HTTPError):
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1000, "stream": True, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_the_key_may_come_from_the_environment_and_stays_secret(artifact: Path) -> None:
    with process(artifact, env={"SPARSEPACK_API_KEY": "secret"}) as server:
        assert server.client("secret").models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.url.startswith("http://127.0.0.1:"), "for this machine alone unless told otherwise"
        assert server.end() == 0
        assert "secret" not in "".join(server.said)
        assert "note: whoever reaches" not in "".join(server.said)


def test_a_server_for_other_machines_says_who_can_reach_it(artifact: Path) -> None:
    with process(artifact, "--host", "0.0.0.0") as server:
        assert server.url.startswith("http://0.0.0.0:")
        assert server.end() == 0
        assert any("note: whoever reaches this machine can use the model" in line for line in server.said)


def test_what_cannot_be_is_one_line(artifact: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1, port {port}: cannot listen there" in fails(artifact, "--port", port)
    assert "--host no.such.host.invalid" in fails(artifact, "--host", "no.such.host.invalid")
    assert "expected at least one character, ASCII without spaces" in fails(artifact, "--api-key", "a b")
    assert "--chat-template" in fails(artifact, "--chat-template", tmp_path)
    assert "nothing.gguf" in fails(tmp_path / "nothing.gguf", "--port", 0)


@pytest.mark.parametrize("library", ["llguidance", "prometheus_client", "uvicorn"])
def test_without_its_libraries_one_line_says_how_to_install_them(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("sparsepack.serve.", "uvicorn", "starlette"))]:
        if name != "sparsepack.serve.options":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert fails(artifact) == (
        f"sparsepack: serve needs {library}, which is not installed: pip install 'sparsepack[serve]'"
    )
