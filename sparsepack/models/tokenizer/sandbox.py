"""Child processes that run what a model's files make us compute: chat templates, tokenizers and patterns come from
strangers, and one step of theirs can take all time and memory.

A child has a limit of memory and, for each request, one of processor time, both kept by the system; where a child ends,
the request fails with one line and the next one starts another child. A request to a child that runs takes a tenth of a
millisecond. Nothing is locked meanwhile but the child, and a second one starts where all are busy for longer.
"""

import atexit
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from sparsepack.errors import ArtifactError, UserError
from sparsepack.files.hashing import sha256_bytes
from sparsepack.models.tokenizer.sandbox_child import MEMORY, SECRET_BYTES, receive, send
from sparsepack.process import python_environment, python_module

SECONDS = 2.0
"""A request has this much processor time, where templates of known models take thousandths of a second; a text to
tokenise has 1 s more for each `CHARACTERS` characters."""
CHARACTERS = 100_000
LOAD_SECONDS = 60.0
"""To import a library or to read a tokenizer, a child has this much processor time."""

_WALL = 10.0
"""A child is killed when it has taken this many times its processor time: it sleeps, or the machine is overloaded."""
_CHILDREN = 3
_PATIENCE = 0.25  # seconds after which a request that waits for a child starts another
_LOADED = 4  # a child that has read so many tokenizers is replaced

BY_PORT = sys.platform == "win32"
"""Whether a child connects to a port of this machine: on Windows a socket can be no process's input."""

Preparation = tuple[str, str, tuple[Any, ...]]
"""What a child must have done once before a request: a name for it, the function and its arguments."""


class SandboxError(UserError):
    """A request that failed.

    kind -- the name of the exception that was raised; None: the child came to its end
    """

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind


class _Child:
    """A process, with the names of what it has loaded."""

    def __init__(self) -> None:
        # Of glibc each thread has an arena of its own, and of OpenBLAS a buffer: they would count as memory.
        threads = str(min(8, os.cpu_count() or 1))
        limits = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": threads}
        # A sanitizer or an allocator that is loaded first may take more addresses than the limit.
        start = partial(
            subprocess.Popen,
            env=python_environment(LD_PRELOAD="", **limits),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        module = "sparsepack.models.tokenizer.sandbox_child"
        if not BY_PORT:
            self._connection, other = socket.socketpair()
            with other:
                self._process = start(python_module(module), stdin=other.fileno())
        else:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = str(server.getsockname()[1])
                self._process = start(python_module(module, port), stdin=subprocess.PIPE)
                self._connection = _accept(server, self._process)
        self.loaded: set[str] = set()

    def call(self, function: str, arguments: Sequence[Any], seconds: float) -> tuple[Any, bytes]:
        until = time.monotonic() + _WALL * seconds
        try:
            self._connection.settimeout(_WALL * seconds)
            send(self._connection, [function, arguments, seconds])
            answer = receive(self._connection, until)
        except TimeoutError as error:
            raise SandboxError(f"it took more than {seconds:g} s and was ended") from error
        except OSError:
            answer = None
        if answer is None:
            raise SandboxError(self._end(seconds))
        message, blob = answer
        if "error" in message:
            raise SandboxError(message["error"], message["kind"])
        return message["value"], blob

    def _end(self, seconds: float) -> str:
        """Why the process has ended, or is about to."""
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it crashed"
        if sys.platform != "win32" and status == -signal.SIGXCPU:
            return f"it took more than {seconds:g} s and was ended"
        return f"it crashed, or took more than {MEMORY >> 30} GiB of memory, and was ended"

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # whoever reads from it learns of the end

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._process.wait()


def _accept(server: socket.socket, process: subprocess.Popen[Any]) -> socket.socket:
    """Return the connection of a child, which names the secret that it reads from its input. Raises `SandboxError`."""
    secret = secrets.token_bytes(SECRET_BYTES)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(secret)
    server.settimeout(LOAD_SECONDS)
    with suppress(TimeoutError):
        while True:
            connection, _ = server.accept()
            connection.settimeout(LOAD_SECONDS)
            if hmac.compare_digest(connection.recv(SECRET_BYTES), secret):
                return connection
            connection.close()
    process.kill()
    raise SandboxError("it did not start")


class Sandbox:
    """Up to three children, started when they are needed; for any threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._closed = False

    def call(
        self, function: str, *arguments: Any, seconds: float | None = None, after: Preparation | None = None
    ) -> tuple[Any, bytes]:
        """What a function of `sandbox_child` returns.

        seconds -- of processor time (default: `SECONDS`)

        Raises `SandboxError`.
        """
        child = self._take()
        usable = False
        try:
            if after is not None and after[0] not in child.loaded:
                if len(child.loaded) >= _LOADED:
                    child = self._replace(child)
                child.call(after[1], after[2], LOAD_SECONDS)
                child.loaded.add(after[0])
            answer = child.call(function, arguments, SECONDS if seconds is None else seconds)
            usable = True
            return answer
        except SandboxError as error:
            usable = error.kind is not None and error.kind != "MemoryError"
            raise
        finally:
            self._give_back(child, usable)

    def close(self) -> None:
        """End all children; requests that run or come fail."""
        with self._change:
            self._closed = True
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()
            self._change.notify_all()
        for child in idle:
            child.close()

    def reopen(self) -> None:
        """Take requests again after `close`."""
        with self._change:
            self._closed = False

    def forget(self) -> None:
        """Leave the children to another process: this one was forked from it."""
        self._change = threading.Condition()
        self._idle, self._busy = [], set()

    def _take(self) -> _Child:
        with self._change:
            self._change.wait_for(lambda: self._idle or not self._busy or self._closed, _PATIENCE)
            self._change.wait_for(lambda: self._idle or len(self._busy) < _CHILDREN or self._closed)
            if self._closed:
                raise SandboxError("the program is ending")
            child = self._idle.pop() if self._idle else _Child()
            self._busy.add(child)
            return child

    def _replace(self, child: _Child) -> _Child:
        fresh = _Child()
        with self._change:
            self._busy.remove(child)
            self._busy.add(fresh)
        child.close()
        return fresh

    def _give_back(self, child: _Child, usable: bool) -> None:
        with self._change:
            self._busy.discard(child)
            usable = usable and not self._closed
            if usable:
                self._idle.append(child)
            self._change.notify()
        if not usable:
            child.close()


SANDBOX = Sandbox()
atexit.register(SANDBOX.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SANDBOX.forget)


class SandboxEncoding(NamedTuple):
    """The tokens of a text.

    offsets -- where each token begins and ends in the text, in characters; empty by `encode_batch_fast`
    tokens  -- their texts in the vocabulary; empty where a batch was encoded
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    tokens: list[str]


def tokenizer_key(tokenizer_json: str) -> str:
    """The name of a tokenizer in a child."""
    return sha256_bytes(tokenizer_json.encode(errors="surrogatepass"))


def load_tokenizer(tokenizer_json: str) -> None:
    """Read a tokenizer.json in a child, and tokenise a word or two. Raises `SandboxError` where that fails."""
    key = tokenizer_key(tokenizer_json)
    SANDBOX.call("encode", key, ["a b"], False, False, False, after=(key, "load_tokenizer", (key, tokenizer_json)))


class SandboxTokenizer:
    """A tokenizer of the library `tokenizers` that turns texts into ids in a child process, and ids into text here.

    What is here is the vocabulary, the decoder and the post-processor, which take time and memory in proportion to the
    ids where `check_decoder` finds nothing. A text is never truncated or padded. Raises `SandboxError` for what is no
    tokenizer.
    """

    def __init__(self, read: dict[str, Any], tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        self._key, self._json = tokenizer_key(tokenizer_json), tokenizer_json
        load_tokenizer(tokenizer_json)
        self._here = Tokenizer.from_str(decoding_json(read))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> SandboxEncoding:
        """The tokens of a text. Raises `SandboxError`."""
        (encoding,) = self._encode([text], add_special_tokens, True, True)
        return encoding

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[SandboxEncoding]:
        """The tokens of each text. Raises `SandboxError`."""
        return self._encode(texts, add_special_tokens, True, False)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[SandboxEncoding]:
        """The tokens of each text without offsets, which take long to make here for a long prompt."""
        return self._encode(texts, add_special_tokens, False, False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Raises `ArtifactError`."""
        try:
            return str(self._here.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                reason = " ".join(str(error).split())
                raise ArtifactError(f"the artifact's tokenizer cannot decode {len(ids)} tokens ({reason})") from error
            raise

    def to_str(self) -> str:
        """The tokenizer as the library writes it."""
        return str(self._call("tokenizer_json", seconds=LOAD_SECONDS)[0])

    def _call(self, function: str, *arguments: Any, seconds: float) -> tuple[Any, bytes]:
        loaded = (self._key, "load_tokenizer", (self._key, self._json))
        return SANDBOX.call(function, self._key, *arguments, seconds=seconds, after=loaded)

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool, with_tokens: bool
    ) -> list[SandboxEncoding]:
        seconds = SECONDS + sum(map(len, texts)) / CHARACTERS
        arguments = ([*texts], add_special_tokens, with_offsets, with_tokens)
        (counts, tokens), blob = self._call("encode", *arguments, seconds=seconds)
        numbers, encodings, end = array("i", blob), [], 0
        for n, count in enumerate(counts):
            columns = 3 if with_offsets else 1
            ids, *offsets = (numbers[end + k * count : end + (k + 1) * count].tolist() for k in range(columns))
            end += columns * count
            pairs = list(zip(*offsets, strict=True)) if with_offsets else []
            encodings.append(SandboxEncoding(ids, pairs, tokens[n] if with_tokens else []))
        return encodings


MOST_GROWTH = 8.0
"""A decoder makes at most so many bytes of each byte of a token."""
MOST_STEPS = 32
LONGEST_TOKEN = 1 << 13
"""A token has at most this many characters; the longest of known models have some hundreds."""

_GROWING = ("BPEDecoder", "CTC", "WordPiece")  # they put a space where something is, which may be nothing


def check_decoder(read: dict[str, Any]) -> None:
    """Raise `ValueError` where decoding may take more time or memory than in proportion to the tokens."""
    steps, growth = list(_decoder_steps(read.get("decoder"))), 1.0
    for step in steps:
        pattern, content = step.get("pattern"), step.get("content")
        if step["type"] in _GROWING:
            growth *= 2
        if step["type"] == "Replace":
            found = pattern.get("String") if isinstance(pattern, dict) else None
            if not isinstance(found, str) or not isinstance(content, str) or not found:
                raise ValueError("its decoder replaces by a regular expression, or replaces nothing")
            growth *= max(1.0, len(content.encode(errors="surrogatepass")) / len(found.encode(errors="surrogatepass")))
    if growth > MOST_GROWTH or len(steps) > MOST_STEPS:
        raise ValueError(f"its decoder makes {growth:.3g} bytes of one, in {len(steps)} steps")
    model = read.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs = vocabulary if isinstance(vocabulary, list) else list(vocabulary or ())
    names = [each[0] if isinstance(each, list) else each for each in pairs]
    names += [each.get("content") for each in read.get("added_tokens") or () if isinstance(each, dict)]
    if max((len(name) for name in names if isinstance(name, str)), default=0) > LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {LONGEST_TOKEN:,} characters")


def _decoder_steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, those within a sequence one by one."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [{"type": None, **part}]
    within = part.get("decoders")
    return [step for each in within for step in _decoder_steps(each)] if isinstance(within, list) else []


def decoding_json(read: dict[str, Any]) -> str:
    """A tokenizer.json that turns ids into text, and bytes into ids without cutting or normalising them, which may take
    all time. llguidance needs the bytes: what a grammar leaves no choice of, it tokenises itself."""
    whole: dict[str, Any] = dict.fromkeys(("normalizer", "pre_tokenizer", "truncation", "padding"))
    if any(step["type"] == "ByteLevel" for step in _decoder_steps(read.get("decoder"))):
        settings = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        whole["pre_tokenizer"] = {"type": "ByteLevel", **settings}
    else:
        whole["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    return json.dumps({**read, **whole}, ensure_ascii=False)
