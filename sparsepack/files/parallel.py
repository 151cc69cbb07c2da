"""Work on several items at a time."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Item], Result], items: Iterable[Item], at_once: int, done: Callable[[], object]
) -> list[Result]:
    """`work(item)` of every item, in the order of the items, on `at_once` of them at a time.

    One at a time is the caller's own thread; more are threads of their own, none of which outlives the call. `done` is
    called after each result, in order. So is the first error raised: items not begun by then are dropped, and those
    begun are waited for.
    """
    results: list[Result] = []
    if at_once == 1:
        for item in items:
            results.append(work(item))
            done()
        return results
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for job in [pool.submit(work, item) for item in items]:
                results.append(job.result())
                done()
        finally:
            pool.shutdown(cancel_futures=True)
    return results
