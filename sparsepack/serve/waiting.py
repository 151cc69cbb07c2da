"""The queue of requests that wait: clients take turns, so that a client that asks for much keeps no other waiting."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """What waits, each of some client. Clients take turns, so that one that asks for much keeps nobody else waiting
    longer than another client would; what waits of one client comes in the order in which it was put in.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of the turns; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, client: str, item: T, most: int) -> T | None:
        """Let something wait. Where `most` wait already, the newest of the client with the most of them makes room, if
        that client then has no less than this one: it is returned. Raises `IndexError` where nothing makes room."""
        pushed_out = self._make_room(client) if self._count >= most else None
        self._of.setdefault(client, deque()).append(item)
        self._count += 1
        return pushed_out

    def take(self) -> T:
        """The next, which waits no longer. Raises `IndexError` where nothing waits."""
        if not self._of:
            raise IndexError("nothing waits")
        client, items = self._of.popitem(last=False)
        self._count -= 1
        item = items.popleft()
        if items:
            self._of[client] = items  # its next turn comes after everybody else's
        return item

    def remove(self, item: T) -> None:
        """Take something out, if it is there."""
        for client, items in self._of.items():
            if item in items:
                items.remove(item)
                self._count -= 1
                if not items:
                    del self._of[client]
                return

    def clear(self) -> list[T]:
        """Take everything out."""
        everything = [item for items in self._of.values() for item in items]
        self._of.clear()
        self._count = 0
        return everything

    def _make_room(self, client: str) -> T:
        greediest = max(self._of, key=lambda other: len(self._of[other]), default=client)
        if len(self._of.get(greediest, ())) < len(self._of.get(client, ())) + 2:
            raise IndexError("nothing makes room")
        self._count -= 1
        return self._of[greediest].pop()
