"""Responses that clients can read again and continue, in memory."""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from sparsepack.serve.answer import json_bytes
from sparsepack.serve.guards import CURRENT_KEY
from sparsepack.serve.liberal import Json
from sparsepack.serve.refusals import Refusal

MAX_RESPONSES = 1000
MAX_STORED_BYTES = 2**26
"""So many responses are kept, of so many bytes together."""


@dataclass(frozen=True)
class _Stored:
    key: str
    client: str
    response: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)


class StoredResponses:
    """The last responses, by their random ids; each for requests with the key that it was generated for. Where there is
    no room for one more, the client that takes most of it loses its oldest. For several threads."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()

    def put(self, client: str, response: Json, conversation: list[Json]) -> None:
        """Keep a response, and the messages of the conversation up to its own."""
        with self._lock:
            self._stored[response["id"]] = _Stored(
                CURRENT_KEY.get(), client, json_bytes(response), json_bytes(conversation)
            )
            while len(self._stored) > self._most or self._bytes() > self._most_bytes:
                self._drop_one()

    def response(self, id: str) -> Json:
        """Return a response. Raises `Refusal`."""
        response: Json = json.loads(self._find(id, "response_id").response)
        return response

    def conversation(self, id: str) -> list[Json]:
        """Return the messages up to a response's own. Raises `Refusal`."""
        messages: list[Json] = json.loads(self._find(id, "previous_response_id").conversation)
        return messages

    def delete(self, id: str) -> None:
        """Forget a response. Raises `Refusal`."""
        self._find(id, "response_id")
        with self._lock:
            self._stored.pop(id, None)

    def _find(self, id: str, param: str) -> _Stored:
        with self._lock:
            if (stored := self._stored.get(id)) is None or stored.key != CURRENT_KEY.get():
                why = "it was deleted, not stored, or gave way to newer ones; send the conversation as input"
                raise Refusal(404, f"response {id[:100]!r}: not found: {why}", param, "response_not_found")
            return stored

    def _bytes(self) -> int:
        return sum(stored.size for stored in self._stored.values())

    def _drop_one(self) -> None:
        sizes: dict[str, int] = {}
        for stored in self._stored.values():
            sizes[stored.client] = sizes.get(stored.client, 0) + stored.size
        largest = max(sizes, key=lambda client: sizes[client])
        del self._stored[next(id for id, stored in self._stored.items() if stored.client == largest)]
