"""`eval`: accuracy of a checkpoint or an artifact with the protocol beside every figure, and what it would take."""

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsepack.calibrate.provenance import processor
from sparsepack.calibrate.threshold_table import Thresholds, read_thresholds
from sparsepack.errors import TextError, UserError
from sparsepack.eval.engine_subject import open_engine_subject
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.perplexity import POSITIONS, WORDS, rows_together, score_windows, summarise
from sparsepack.eval.protocols import CountingScorer, Subject, scored_from
from sparsepack.eval.scorer import HIDDEN_BYTES
from sparsepack.eval.subject import open_subject
from sparsepack.files.hashing import combine_digests, fingerprint, sha256_file
from sparsepack.files.tensors import arithmetic
from sparsepack.files.text import Text, read_text
from sparsepack.formats.open import is_artifact
from sparsepack.formats.table import FORMATS
from sparsepack.models.activity import skipped
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_model.forecast import (
    LIVE,
    activation_bytes,
    block_parameters,
    memory_so_far,
    model_parameters,
)
from sparsepack.models.sparse_attention import described
from sparsepack.models.tokenizer.windows import rolling_windows, window_length
from sparsepack.operation import Cost
from sparsepack.option import check_type, with_paths
from sparsepack.progress import activity
from sparsepack.version import __version__
from sparsepack.workers.forecast import PartsForecast
from sparsepack.workers.shard import ALONE, Shard


def evaluate(request: EvalRequest, read: Callable[[str], Text] = read_text, shard: Shard = ALONE) -> dict[str, Any]:
    """Measure what was asked; the result is JSON-able.

    `{"subject": {...}, "protocol", "perplexity": [row, ...], "tasks": {...}, "sparsity": {...}, "versions"}`
    A row's `windows_of` is how many windows the text has; None where it was not looked at to its end.

    read  -- opens a text by its name: for callers that have done so already
    shard -- this worker's of several, who measure together; all return the same, with the same bits as one alone

    Raises `UserError` subclasses, and `WorkerLost`.
    """
    check_type("request", request, EvalRequest, UserError)
    request.check()
    request.check_workers(shard.world_size)
    with activity(f"opening {request.subject}"):
        request, texts, subject, context, protocol, reference = open_evaluation(request, read)
    shard.agree(lambda: _facts(request, subject, texts, context, protocol))
    scorer = subject.scorer()
    rows = []
    for text in texts:
        scorer.reset()
        inputs, targets = rolling_windows(subject.tokenizer, text, context, request.windows, scorer.vocabulary)
        scores = score_windows(
            scorer, inputs, targets, protocol, reference, request.windows_at_once, request.second_half, shard
        )
        scorer.share(shard.all_gather)
        scored = targets[:, scored_from(protocol, targets.shape[1], request.second_half) :]
        rows.append(
            {
                "text": text.name,
                "text_sha256": text.sha256,
                "protocol": protocol,
                "held": request.engine.hold,
                "scored": "second half" if protocol == "decode" or request.second_half else "all",
                "context": context,
                "windows_of": len(inputs) if request.windows is None or len(inputs) < request.windows else None,
                **summarise(scores, _bytes_of(subject.tokenizer, scored)),
                **_counted(scorer, subject),
            }
        )
    del scorer, reference  # tasks may need the memory
    result: dict[str, Any] = {
        "kind": "evaluation",
        "subject": {
            "name": subject.name,
            "kind": subject.kind,
            "source_sha256": subject.source_sha256,
            "thresholds": str(request.thresholds) if request.thresholds else None,
            "target_sparsity": subject.sparsity,
            "attention": None if subject.attention is None else described(subject.attention),
        },
        "protocol": protocol,
        "against": request.against,
        "perplexity": rows,
        "tasks": None,
        "compute": {
            "batch": request.windows_at_once,
            "runtime": request.runtime,
            "device": torch.device(request.device).type,  # on which card of several does not matter
            **subject.precision,
        },
        "versions": {
            "sparsepack": __version__,
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
    }
    if request.tasks:
        result["tasks"] = _tasks(request, subject, protocol, shard)
    return result


class Evaluation(NamedTuple):
    """What a request is about: its texts, the subject, tokens in a window, the protocol, the source's scorer if that is
    compared with."""

    request: EvalRequest
    texts: list[Text]
    subject: Subject
    context: int
    protocol: str
    reference: CountingScorer | None


def open_evaluation(request: EvalRequest, read: Callable[[str], Text] = read_text) -> Evaluation:
    """Open what a request, which was checked, is about. Raises `UserError` subclasses for what cannot be measured."""
    request = with_paths(request)
    texts = [read(name) for name in request.perplexity]
    table = read_thresholds(request.thresholds) if request.thresholds else None
    subject = subject_of(request, table)
    context = window_length(request.context, subject.context)
    if texts and context > subject.context:
        raise TextError(f"context {context}: {subject.name} was made for at most {subject.context}")
    protocol = protocol_of(request, subject)
    return Evaluation(request, texts, subject, context, protocol, _reference(request, subject))


def _facts(
    request: EvalRequest, subject: Subject, texts: Sequence[Text], context: int, protocol: str
) -> dict[str, Any]:
    """What workers must agree on before they measure together; paths may differ from one machine to another."""
    here = ("subject", "thresholds", "perplexity", "against", "task_path", "device", "engine")
    asked = {name: value for name, value in asdict(request).items() if name not in here}
    return {
        "model": _identity(request.subject, subject),
        "thresholds": sha256_file(request.thresholds) if request.thresholds else None,
        "text": [text.sha256 for text in texts],
        "processor": processor(request.device),
        "command": fingerprint({**asked, "against": request.against is not None, "context": context, "as": protocol}),
    }


def _identity(name: str, subject: Subject) -> str:
    path = Path(name)
    if not is_artifact(path):
        return subject.source_sha256
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return combine_digests(map(sha256_file, files))


def _bytes_of(tokenizer: Any, scored: torch.Tensor) -> int:
    """The bytes of the text of token ids [windows, positions]; a window at a time, since all of them may be a long
    text."""
    windows = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in scored)
    return sum(len(text.encode()) for text in windows)


def subject_of(request: EvalRequest, table: Thresholds | None = None) -> Subject:
    """What a request is about, opened to be measured. Raises `UserError` subclasses for what cannot be."""
    if request.runtime == "transformers":
        return open_subject(request.subject, table, request.device, request.dtype)
    return open_engine_subject(request.subject, request.engine_options)


def protocol_of(request: EvalRequest, subject: Subject) -> str:
    """The protocol asked for; by itself, decode for what is sparse, else dense."""
    return request.protocol or ("decode" if subject.sparse else "dense")


def _reference(request: EvalRequest, subject: Subject) -> CountingScorer | None:
    if request.against is None:
        return None
    source = open_subject(request.against, None, request.device, request.dtype)
    if source.source_sha256 not in (subject.source_sha256, *subject.made_from):
        raise UserError(
            f"{request.against}: not the model that {subject.name} was made from "
            f"({source.source_sha256[:12]}, expected {subject.source_sha256[:12]})"
        )
    return source.scorer()


def _tasks(request: EvalRequest, subject: Subject, protocol: str, shard: Shard) -> dict[str, Any]:
    from sparsepack.eval.tasks import run_tasks

    scorer = subject.task_scorer()
    known = scorer.vocabulary, subject.end_tokens
    result = run_tasks(scorer, subject.tokenizer, request, protocol, shard.each, *known)
    scorer.share(shard.all_gather)
    return {**result, "held": request.engine.hold, "batch": request.requests_at_once, **_counted(scorer, subject)}


def _counted(scorer: CountingScorer, subject: Subject) -> dict[str, Any]:
    """What the sparse positions so far skipped and read, and the hits of slots; None where there are no slots."""
    return {
        "realised_sparsity": realised_sparsity(scorer, subject),
        "tokens_read": scorer.tokens_read.result(),
        "served": None if scorer.hit_counts is None else scorer.hit_counts.to_json(),
    }


def realised_sparsity(scorer: CountingScorer, subject: Subject) -> Mapping[str, Any]:
    """Realised sparsity: `overall` and `of_sparse_sites` as `Skipped`, and that of every sparse site.

    `target` is of the sparse sites, `target_overall` the same of all block weights. `neurons_counted`: whether inactive
    neurons are in these, which transformers computes like all others; None for a model that is not stored by neurons.
    `bits`: those that a weight has in all of its planes; `bits_read`: those that are read of it; None without planes.
    """
    shares = subject.parameter_shares()
    realised = scorer.realised()
    sparse = sum(share for key, share in shares.items() if key in subject.sparse_sites)
    format = FORMATS.get(subject.kind)
    by_neurons = format is not None and format.mlp.exact
    found = skipped(shares, realised, subject.sparse_sites)
    bits = format.bits if format is not None and format.levels else None
    return {
        "neurons_counted": subject.skips_neurons if by_neurons else None,
        "bits_read": bits and bits * (1 - found.overall),
        "bits": bits,
        "target": subject.sparsity,
        "target_overall": subject.sparsity * sparse,
        **asdict(found),
        "sites": {f"blk.{layer}.{site}": value for (layer, site), value in realised.items()},
    }


def cost(checkpoint: Checkpoint, request: EvalRequest, windows: int) -> Cost:
    """What scoring so many windows takes, ours and of the source model; what lm-eval tasks take is not known.

    checkpoint -- the source model
    """
    context = window_length(request.context, checkpoint.config.max_position_embeddings)
    size = arithmetic(request.dtype, checkpoint.dtype, request.device).itemsize
    config, whole, batch = checkpoint.config, model_parameters(checkpoint) * size, request.windows_at_once
    activations, logits = activation_bytes(checkpoint, batch * context), POSITIONS * WORDS * 4 * LIVE
    if not request.perplexity or request.device != "cpu":
        return Cost(2 * windows * context, (2 if request.perplexity else 1) * whole + logits + activations)
    window = context * int(config.hidden_size) * size
    waiting = 2 * max(batch * window, min(HIDDEN_BYTES, (request.windows or HIDDEN_BYTES) * window))
    # The artifact's output matrix is decoded to float32, the source model's stays as it is stored.
    heads = int(config.vocab_size) * int(config.hidden_size) * (4 + checkpoint.dtype.itemsize)
    streamed = waiting + max(block_parameters(checkpoint) * size + activations, heads + logits)
    return Cost(2 * windows * context, max(streamed, whole if request.tasks else 0))


def forecast(request: EvalRequest, workers: int = 1) -> PartsForecast:
    """What `eval` would take with so many workers like this process, from one batch of windows and two, which are
    scored here.

    Raises as `eval` does, and `UserError` for tasks: their requests are known when lm-eval has made them.
    """
    request.check()
    request.check_workers(workers)
    if request.tasks:
        raise UserError("--dry-run: how many requests tasks make is not known before; leave --tasks out")
    request, texts, subject, context, protocol, reference = open_evaluation(request)
    scorer, batch = subject.scorer(), request.windows_at_once
    found = [rolling_windows(subject.tokenizer, text, context, request.windows, scorer.vocabulary) for text in texts]
    shards = [Shard(world_size=workers).split(len(inputs), batch) for inputs, _ in found]
    for each in shards:
        each.check("--windows")

    def seconds(batches: int) -> float:
        inputs, targets = (ids[:batch].repeat(batches, 1) for ids in found[0])
        began = time.perf_counter()
        score_windows(scorer, inputs, targets, protocol, reference, batch, request.second_half)
        return time.perf_counter() - began

    first, one, two = seconds(1), seconds(1), seconds(2)
    batch_seconds = min(max(two - one, 0.0), one)
    together = rows_together([scorer, *([] if reference is None else [reference])], context, batch)
    rounds = sum(each.rounds for each in shards)
    # What windows that wait together take beside their batches: on a CPU, blocks are read for them.
    passes = sum(-(-each.rounds * batch // together) for each in shards)
    windows = sum(len(inputs) for inputs, _ in found)
    return PartsForecast(
        measured=f"a batch of {batch} window{'s' if batch > 1 else ''} in {batch_seconds:.2f} s, all else in "
        f"{one - batch_seconds:.2f} s, and the first time {max(first - one, 0.0):.2f} s more",
        device=request.device,
        workers=workers,
        parts=f"{windows} windows of {context} tokens, {rounds} of {sum(each.parts for each in shards)} batches at "
        "most each",
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
