"""What a protocol of clients is to the server: its endpoints, its other routes, its form of errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsepack.serve.answer import Answer, AnswerWriter
from sparsepack.serve.refusals import Refusal
from sparsepack.serve.schema import TextParameters

if TYPE_CHECKING:
    from sparsepack.serve.app import Service


@dataclass(frozen=True)
class Endpoint:
    """A route whose answer is generated.

    path      -- of POST requests
    read      -- makes a request of a body, in a thread; raises `Refusal`. A protocol other than OpenAI's writes the
                 body anew in the form of `ChatRequest` or `CompletionRequest`, whose limits then hold
    writer    -- writes an answer
    token_ids -- whether a body may have a list of token ids, as many as the context has
    """

    path: str
    read: "Callable[[bytes, Service], TextParameters]"
    writer: Callable[[Answer], AnswerWriter]
    token_ids: bool = False


@dataclass(frozen=True)
class Query:
    """A route whose answer is known without generating: POST with a JSON body, or another method without one.

    answer -- makes the answer of a body, empty where there is none, and of the path's parameters by their names, in a
              thread; raises `Refusal`
    """

    method: str
    path: str
    answer: Callable[..., Any]


def check_one_answer(body: Mapping[str, Any]) -> None:
    """Raise `Refusal` 400 for a chat or completion of several answers, in a protocol that has one."""
    if body.get("n") not in (None, 1):
        raise Refusal(400, "n: this protocol has one answer; leave it out", "n", "unsupported_value")


@dataclass(frozen=True)
class ClientProtocol:
    """A protocol of clients.

    error -- the body of an answer that refuses a request
    """

    endpoints: Sequence[Endpoint]
    queries: Sequence[Query] = ()
    error: Callable[[Refusal], dict[str, Any]] = Refusal.body

    @property
    def paths(self) -> list[str]:
        """Return the paths of all routes."""
        return [*(endpoint.path for endpoint in self.endpoints), *(query.path for query in self.queries)]
