"""One text after the other out of an engine, on top of what its cache holds already."""

from collections.abc import Callable, Iterator

from sparsepack.loading import Model
from sparsepack.runtime.generate import Generation
from sparsepack.serve.worker import Ended, Event, Piece, TextRequest

PREFILLED_AT_ONCE = 512
"""After this many positions prefill looks whether the text is still wanted; decoders take so many together anyway."""

KEPT_IN_STEPS_OF = 32
"""A prefill goes on from a multiple of this many positions. The CPU's kernels then add in the same order as if the
prefill had begun at the beginning, so that the bits are the same: with the AVX2 kernels, where that was tried."""

_REASONS = {"eos": "stop", "stop": "stop", "tokens": "length", "context": "length"}


def make_text(model: Model, request: TextRequest, unwanted: Callable[[], bool]) -> Iterator[Event]:
    """The pieces of a text and its end; see `worker.MakeText`. For one thread.

    The text goes on from what its prompt has in common with the last one's, so that of a chat only what is new is
    prefilled. The last answer is not kept: its tokens were decoded, with columns skipped, and a prompt runs dense. So
    the same request gives the same answer, whatever was asked before; elsewhere up to the last bits of the logits.

    Raises what the engine raises, and the next text begins anew after that.
    """
    try:
        yield from _made(model, request, unwanted)
    except BaseException:
        model.engine.reset()  # what is in the cache is not known
        raise


def _made(model: Model, request: TextRequest, unwanted: Callable[[], bool]) -> Iterator[Event]:
    engine, ids, options = model.engine, request.ids, request.options
    cached = engine.keep(ids) // KEPT_IN_STEPS_OF * KEPT_IN_STEPS_OF
    engine.truncate(cached)
    if not options.tokens:
        yield Ended("length", 0, cached)
        return
    for end in range((cached // PREFILLED_AT_ONCE + 1) * PREFILLED_AT_ONCE, len(ids), PREFILLED_AT_ONCE):
        if unwanted():
            return
        engine.prefill(ids[engine.position : end])
    pieces = Generation(engine, model.tokenizer, [ids], options, keep=True, unwanted=unwanted)
    told = 0
    for text in pieces:
        yield Piece(text, logprobs := pieces.taken_logprobs())
        told += len(logprobs)
    made = pieces.result()
    engine.truncate(min(engine.position, len(ids)))
    if made.reason in _REASONS:
        rest = pieces.taken_logprobs()[: len(made.tokens) - told]  # without the end of the text
        yield Ended(_REASONS[made.reason], len(made.tokens), cached, rest)
