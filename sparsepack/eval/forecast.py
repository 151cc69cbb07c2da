"""`eval --dry-run`: what measuring perplexity by some workers would take."""

import time
from pathlib import Path

import torch

from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.perplexity import rows_together, score_windows
from sparsepack.eval.run import opened
from sparsepack.formats.open import is_artifact
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.stock.forecast import memory_so_far
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.workers import Workers


def forecast(request: EvalRequest, workers: int = 1) -> PartsForecast:
    """What `eval` would take with so many workers like this process, from one batch of windows and two, which are
    scored here.

    Raises as `eval` does, and `UserError` for tasks: their requests are known when lm-eval has made them.
    """
    request.check()
    request.check_workers(workers)
    if request.tasks:
        raise UserError("--dry-run: how many requests tasks make is not known before; leave --tasks out")
    request, texts, subject, context, protocol, reference = opened(request)
    scorer, batch = subject.scorer(), request.windows_at_once
    found = [rolling_windows(subject.tokenizer, text, context, request.windows, scorer.vocabulary) for text in texts]
    dealt = [Dealt(Workers(0, workers), len(inputs), batch) for inputs, _ in found]
    for each in dealt:
        each.check("--windows")

    def seconds(batches: int) -> float:
        inputs, targets = (ids[:batch].repeat(batches, 1) for ids in found[0])
        began = time.perf_counter()
        score_windows(scorer, inputs, targets, protocol, reference, batch, request.second_half)
        return time.perf_counter() - began

    first, one, two = seconds(1), seconds(1), seconds(2)
    batch_seconds = min(max(two - one, 0.0), one)
    together = rows_together([scorer, *([] if reference is None else [reference])], context, batch)
    rounds = sum(each.rounds for each in dealt)
    # What windows that wait together take beside their batches: on a CPU, blocks are read for them.
    passes = sum(-(-each.rounds * batch // together) for each in dealt)
    windows = sum(len(inputs) for inputs, _ in found)
    return PartsForecast(
        measured=f"a batch of {batch} window{'s' if batch > 1 else ''} in {batch_seconds:.2f} s, all else in "
        f"{one - batch_seconds:.2f} s, and the first time {max(first - one, 0.0):.2f} s more",
        device=request.device,
        workers=workers,
        parts=f"{windows} windows of {context} tokens, {rounds} of {sum(each.parts for each in dealt)} batches at most "
        "each",
        dealt_seconds=rounds * workers * batch_seconds,
        alone_seconds=max(first - one, 0.0) + passes * (one - batch_seconds),
        bytes_read=sum(_stored_bytes(name) for name in (request.subject, request.against) if name is not None),
        bytes_written=0,
        memory_bytes=memory_so_far(torch.device(request.device)),
        uncounted="hashing the model's files and exchanging",
    )


def _stored_bytes(name: str) -> int:
    """The bytes of a model's files, as far as weights lie in them."""
    path = Path(name) if is_artifact(Path(name)) else open_checkpoint(name).path
    files = [path] if path.is_file() else [*path.rglob("*.safetensors"), *path.rglob("*.gguf")]
    return sum(file.stat().st_size for file in files)
