"""The options of serving a model. Nothing heavy is imported here: the command line reads the defaults."""

from dataclasses import dataclass

from sparsepack.option import option
from sparsepack.runtime.backends import most_sequences


@dataclass(frozen=True)
class ServeOptions:
    """Options of `sparsepack serve`."""

    host: str = option("Address to listen on; 0.0.0.0 for all of this machine.", default="127.0.0.1")
    port: int = option("Where it listens there; 0 takes any that is free.", default=8000, least=0, most=65535)
    model_name: str | None = option(
        "Name that clients ask for (default: that of the file, without its ending).", default=None
    )
    api_keys: tuple[str, ...] = ()
    strict: bool = option(
        "Refuse what OpenAI refuses: fields that are not known, another model's name, values out of its range. Without "
        "it, fields that are not known are ignored and named once in the log.",
        default=False,
    )
    sequences: int | None = option(
        "Texts that are made together; others wait (default: as many as the backend decodes together, where memory has "
        "room for them).",
        default=None,
        least=1,
        most=most_sequences(),
    )
    queue: int = option("Texts that may wait while others are made; more are refused.", default=128, least=0)
    prefix_cache: str = option(
        "Who shares the computed prefix of a prompt: all clients with the same key, or all where there are no keys "
        "(shared); requests from one address with one key (address); nobody (off). Who shares it can find out, by "
        "`cached_tokens` and by time, whether another sent a prompt that begins like theirs.",
        default="shared",
        choices=("shared", "address", "off"),
    )
    connections: int | None = option(
        "Connections at a time; one that waits for a request gives way to a new one (default: 1024, or as many as "
        "`ulimit -n` leaves).",
        default=None,
        least=8,
        most=1_000_000,
    )
    reasoning: str = option(
        "What a reasoning model writes before its answer: a part of its own, `reasoning_content`, where the chat "
        "template has a known form of it (auto), or by the marks <think> also where it has none (split); part of the "
        "text (text); nothing, as far as the template can switch it off (off).",
        default="auto",
        choices=("auto", "split", "text", "off"),
    )
    cors_origins: tuple[str, ...] = ()
    grace: float = option(
        "Seconds that texts in the making have left when the server is told to end.", default=10.0, least=0, most=3600
    )
    send_timeout: float = option(
        "Seconds after which a client that takes nothing is dropped.", default=60.0, least=1, most=3600
    )
    receive_timeout: float = option(
        "Seconds in which the head of a request must have arrived, and then its body.", default=30.0, least=1, most=3600
    )
