"""One text after the other out of an engine, on top of what its cache holds already."""

from collections.abc import Callable, Iterator, Sequence

from sparsepack.load import Model
from sparsepack.runtime.generate import Generation
from sparsepack.serve.worker import Ended, Event, Piece, TextRequest

PREFILLED_AT_ONCE = 512
"""Positions between two looks at whether the text is still wanted; decoders take so many together anyway."""

_REASONS = {"eos": "stop", "stop": "stop", "tokens": "length", "context": "length"}


class Texts:
    """Makes the texts of a worker with a model, in one thread; see `worker.MakeText`.

    The next text goes on from what its prompt has in common with the last one's, so that of a chat only what is new is
    prefilled. The last answer is not kept: its tokens were decoded, with columns skipped, and a prompt runs dense.
    So the same request gives the same answer, whatever was asked before.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def make(self, request: TextRequest, unwanted: Callable[[], bool]) -> Iterator[Event]:
        """The pieces of a text and its end; raises what the engine raises, and begins anew after that."""
        try:
            yield from self._made(request, unwanted)
        except BaseException:
            self._model.engine.reset()  # what is in the cache is not known
            raise

    def _made(self, request: TextRequest, unwanted: Callable[[], bool]) -> Iterator[Event]:
        engine = self._model.engine
        cached = engine.keep(request.ids) if request.options.tokens else 0
        if not self._prefilled(request.ids[cached:-1], unwanted):
            return
        pieces = Generation(engine, self._model.tokenizer, request.ids, request.options, keep=True, unwanted=unwanted)
        yield from map(Piece, pieces)
        made = pieces.result()
        engine.truncate(min(engine.position, len(request.ids)))
        if made.reason in _REASONS:
            yield Ended(_REASONS[made.reason], len(made.tokens), cached)

    def _prefilled(self, ids: Sequence[int], unwanted: Callable[[], bool]) -> bool:
        for first in range(0, len(ids), PREFILLED_AT_ONCE):
            if unwanted():
                return False
            self._model.engine.prefill(ids[first : first + PREFILLED_AT_ONCE])
        return True
