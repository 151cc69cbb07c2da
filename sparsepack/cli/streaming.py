"""Generated text on standard output, one line about the run on stderr."""

import sys
import time
from collections.abc import Sequence

from sparsepack.bench.traffic import skipped_weights
from sparsepack.load import Model, ModelOfSeveral, what_runs
from sparsepack.models.skipped import shown
from sparsepack.progress import say
from sparsepack.runtime.options import GenerateOptions


def stream(model: Model, prompt: str, options: GenerateOptions) -> None:
    """Write a prompt and its continuation as it comes."""
    say(*what_runs(model.engine))
    pieces = model.generate(prompt, options)
    began, first = time.perf_counter(), 0.0
    sys.stdout.write(prompt)
    for piece in pieces:
        first = first or time.perf_counter()
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    spent = time.perf_counter() - (first or began)
    say(
        f"{model.engine.position} tokens in the context, decoded in {spent:.2f} s after the prefill; "
        f"{_skipped(model)} of the block weights skipped"
    )


def print_together(model: ModelOfSeveral, prompts: Sequence[str], options: GenerateOptions) -> None:
    """Write the continuations of several prompts when all are made."""
    say(*what_runs(model.engine))
    began = time.perf_counter()
    texts = model.generate(prompts, options)
    spent = time.perf_counter() - began
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        sys.stdout.write(f"--- prompt {number}: {' '.join(prompt.split())}\n{text}\n")
    sys.stdout.flush()
    say(
        f"{len(prompts)} texts in {spent:.2f} s, prefill included; "
        f"{_skipped(model)} of the block weights skipped, in all of them"
    )


def _skipped(model: Model | ModelOfSeveral) -> str:
    found = skipped_weights(model.packed, model.engine.activity())
    return shown(found.overall, found.of_sparse_sites)
