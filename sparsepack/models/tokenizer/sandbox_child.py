"""The process in which `sandbox` runs what a model's files make us compute. It imports no torch.

It reads requests from a socket to its parent, and answers each there. What takes more processor time than the request
gives it is ended by the system, and so is the process; memory beyond its limit raises MemoryError, or ends it.
"""

import json
import os
import re
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

MEMORY = 2 << 30
"""A process has at most this much address space: bytes."""

LONGEST_TEXT = 1 << 24
"""A text that a template makes has at most this many characters."""

SECRET_BYTES = 32
"""By so many random bytes a parent knows its child's connection."""

HEADER = struct.Struct("<QQ")
"""Before each message: the bytes of its JSON, and the bytes of the blob after that."""

Answer = tuple[Any, bytes]
"""A value as JSON has it, and a blob."""


def main() -> None:
    """Answer requests until the other end closes."""
    connection = parent_connection()
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides what ends
    _limit("RLIMIT_AS", MEMORY)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", 0)
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would take seconds to import it
    while (received := receive(connection)) is not None:
        (function, arguments, seconds), _ = received
        _limit("RLIMIT_CPU", int(time.process_time() + seconds) + 1)
        try:
            value, blob = FUNCTIONS[function](*arguments)
            message = {"value": value}
            send(connection, message, blob)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            reason = " ".join(str(error).split())[:1000] or type(error).__name__
            send(connection, {"error": reason, "kind": type(error).__name__})


def parent_connection() -> socket.socket:
    """Return this end of the socket to the parent: standard input, or a connection to the port that is the argument,
    which begins with the secret that standard input holds."""
    if len(sys.argv) == 1:
        return socket.socket(fileno=os.dup(0))
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall(sys.stdin.buffer.read(SECRET_BYTES))
    return connection


def _limit(name: str, amount: int) -> None:
    with suppress(ImportError, AttributeError, ValueError, OSError):  # not every system has each
        import resource

        limit = getattr(resource, name)
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def send(connection: socket.socket, message: Any, blob: bytes = b"") -> None:
    """Send a message."""
    text = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(text), len(blob)) + text + blob)


def receive(connection: socket.socket, until: float | None = None) -> Answer | None:
    """The next message; None where the other end has closed.

    until -- when to give up and raise TimeoutError, by `time.monotonic`
    """
    if (header := _exactly(connection, HEADER.size, until)) is None:
        return None
    text_size, blob_size = HEADER.unpack(header)
    if (rest := _exactly(connection, text_size + blob_size, until)) is None:
        return None
    return json.loads(rest[:text_size]), bytes(rest[text_size:])


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytearray | None:
    found = bytearray()
    while len(found) < size:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            return None
        found += part
    return found


_tokenizers: dict[str, Any] = {}


def load_tokenizer(key: str, tokenizer_json: str) -> Answer:
    """Read a tokenizer.json, which takes texts whole from then on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _tokenizers[key] = tokenizer
    return None, b""


def tokenizer_json(key: str) -> Answer:
    """A tokenizer as the library writes it."""
    return _tokenizers[key].to_str(), b""


def encode(key: str, texts: Sequence[str], add_special_tokens: bool, with_offsets: bool, with_tokens: bool) -> Answer:
    """How many tokens each text has, and what they are where that is asked for; and int32 of each text in turn: its
    ids and, where that is asked for, where each token begins and ends."""
    tokenizer = _tokenizers[key]
    encode_batch = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    encodings = encode_batch(list(texts), add_special_tokens=add_special_tokens)
    numbers = array("i")
    for encoding in encodings:
        numbers.extend(encoding.ids)
        if with_offsets:
            offsets = encoding.offsets
            numbers.extend([begin for begin, _ in offsets])
            numbers.extend([end for _, end in offsets])
    tokens = [encoding.tokens for encoding in encodings] if with_tokens else None
    return [[len(encoding) for encoding in encodings], tokens], numbers.tobytes()


def load_chat_templates() -> Answer:
    """Import what renders chat templates."""
    from transformers.utils import chat_template_utils

    return chat_template_utils.__name__, b""


def render_chat_template(template: str, conversation: list[dict[str, Any]], variables: Mapping[str, Any]) -> Answer:
    """The text that a chat template makes of a conversation, by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[conversation], chat_template=template, **variables)
    return _checked_text(rendered[0]), b""


def render_task_template(template: str, document: Mapping[str, Any]) -> Answer:
    """The text that a template of an lm-eval task makes of a document, in jinja2's sandbox."""
    return _checked_text(_task_template(template).render(**document)), b""


@lru_cache(maxsize=64)
def _task_template(template: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(pattern, repl, text, count=count)
    return environment.from_string(template)


def _checked_text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"it makes a text of more than {LONGEST_TEXT:,} characters")
    return text


def full_matches(pattern: str, texts: Sequence[str]) -> Answer:
    """Those of the texts that a regular expression matches as a whole."""
    return [text for text in texts if re.fullmatch(pattern, text)], b""


def compile_grammar(grammar: str) -> Answer:
    """Compile a grammar of llguidance, for a vocabulary of bytes."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    return None, b""


FUNCTIONS: Mapping[str, Callable[..., Answer]] = {
    function.__name__: function
    for function in (
        load_tokenizer,
        tokenizer_json,
        encode,
        load_chat_templates,
        render_chat_template,
        render_task_template,
        full_matches,
        compile_grammar,
    )
}

if __name__ == "__main__":
    main()
