"""Several ways of doing the same in turns, so that what slows the machine for a while slows all of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def in_turns(runs: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """What each way returns in each of the rounds; `warm_up` rounds before them are not kept."""
    samples: dict[Name, list[Result]] = {name: [] for name in runs}
    for round in range(-warm_up, rounds):
        for name, run in runs.items():
            result = run()
            if round >= 0:
                samples[name].append(result)
    return samples


def medians(samples: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    """The median of each."""
    return {name: statistics.median(taken) for name, taken in samples.items()}


def interleaved(runs: Mapping[Name, Callable[[], float]], rounds: int, warm_up: int = 0) -> dict[Name, float]:
    """The median of what each way returns, such as its seconds, all of them in turns."""
    return medians(in_turns(runs, rounds, warm_up))
