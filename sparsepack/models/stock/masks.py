"""Attention's masks of stock models for texts that are whole: each row is one text from its first position on, without
padding. Stock code finds that out by looking at positions, for which a GPU is waited for in every run. While a run is
recorded it makes a mask that attention would do without, and then takes another kernel, which is slower and rounds
otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_ANSWERS: dict[str, Any] = {"find_packed_sequence_indices": None, "is_tracing": False}
"""What functions of transformers' masks give for such texts, whatever they are asked: no row holds several texts, and
what is not looked at need not be traced."""
_lock = Lock()
_inside = 0
_before: dict[str, Callable[..., Any]] = {}


@contextmanager
def masks_of_whole_texts() -> Iterator[None]:
    """Within the context, stock models make masks for whole texts. Threads may be in it at one time; what others run
    meanwhile must be such texts, too."""
    global _inside
    from transformers import masking_utils

    with _lock:
        if _inside == 0:
            for name, answer in _ANSWERS.items():
                _before[name] = getattr(masking_utils, name)
                setattr(masking_utils, name, _always(answer))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name, function in _before.items():
                    setattr(masking_utils, name, function)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer
