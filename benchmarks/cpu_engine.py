"""Our engine on a CPU as the benchmarks time it."""

import time

import torch

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

CONTEXT = 1024


def open_engine(packed: PackedModel, backend: str, threads: int) -> Engine:
    """An engine with so many threads."""
    torch.set_num_threads(threads)
    return Engine(packed, context=CONTEXT, backend=backend, threads=threads)


def decode_ours(engine: Engine, dense: bool, prompt: list[int], count: int) -> float:
    """Tokens a second of ours."""
    engine.reset()
    engine.dense = dense
    sampler = Sampler(Sampling(temperature=0.0))
    id = sampler.choose(engine.prefill(prompt))
    start = time.perf_counter()
    for _ in range(count):
        id = engine.decode_next(id, sampler)
    return count / (time.perf_counter() - start)
