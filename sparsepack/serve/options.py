"""How a model is served. Nothing heavy is imported here: the command line reads the defaults."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """What `sparsepack serve` may be told.

    host, port   -- where it listens; port 0: any that is free
    model_name   -- under which clients ask for the model; None: the artifact's name without its ending
    api_key      -- that clients must send; None: they need none
    queue        -- texts that may wait while another is made; a request beyond them is refused
    cors_origins -- web pages of these origins may ask from a browser; "*": all
    grace        -- seconds that a text in the making has left when the server is asked to end
    send_timeout -- seconds after which a client that takes nothing is dropped
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_key: str | None = None
    queue: int = 128
    cors_origins: tuple[str, ...] = ()
    grace: float = 10.0
    send_timeout: float = 60.0
