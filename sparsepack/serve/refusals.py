"""The answers where a request cannot be served, in the form of OpenAI's errors."""

from dataclasses import dataclass
from typing import Any

INVALID, SERVER = "invalid_request_error", "server_error"


@dataclass(eq=False)  # not frozen: Python sets a traceback on what is raised
class Refusal(Exception):
    """An answer other than what was asked for.

    status      -- of HTTP
    message     -- for people: what, expected, remedy
    param       -- the parameter that it is about
    code        -- for programs
    retry_after -- seconds after which it may be tried again
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`, as clients of OpenAI's protocol read it."""
        kind = INVALID if self.status < 500 else SERVER
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers
