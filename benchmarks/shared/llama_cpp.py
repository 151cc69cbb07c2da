"""llama.cpp as the peer of our engine: its C interface through llama-cpp-python, with llama.cpp's own defaults.

`llama_cpp.Llama` is not used: it turns flash attention off and copies logits about, which llama.cpp by itself does not.
"""

import ctypes
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import click
import llama_cpp
import numpy as np
import torch

from benchmarks.shared.timing import check_close, relative_error
from sparsepack.files.gguf import read_gguf

ROOT = Path(__file__).parents[2]
LARGEST_ERROR = 0.02
"""The largest relative error of llama.cpp's logits: it rounds activations to 8 bits."""


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Drops the log."""


@cache
def expect_runs(path: Path) -> None:
    """Run a file's first products in a process of its own, which may crash. Raises `click.ClickException`, one line,
    where a signal ends it."""
    command = [sys.executable, "-m", "benchmarks.shared.llama_cpp", str(path.absolute())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode < 0:
        raise click.ClickException(
            f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}) was ended by "
            f"{signal.Signals(-done.returncode).name} in its first product on this machine, as builds by gcc 12 for "
            "processors with AMX are; build it without: CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON' (no AVX512 "
            "where /proc/cpuinfo has no avx512f) pip install --force-reinstall --no-deps --no-cache-dir --no-binary "
            "llama-cpp-python llama-cpp-python"
        )


class LlamaCpp:
    """A GGUF in llama.cpp: flash attention as it chooses, f16 cache.

    repacked -- whether weights are repacked for the processor as llama.cpp does by default. It is tried first whether
                that runs here (`expect_runs`)
    """

    def __init__(self, path: Path, context: int, batch: int = 512, repacked: bool = True) -> None:
        if repacked:
            expect_runs(path)
        self._open(path, context, batch, repacked)

    def _open(self, path: Path, context: int, batch: int, repacked: bool) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = repacked
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = batch
        self._model = model
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(f"{path}: llama.cpp does not open it")
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def close(self) -> None:
        """Give its memory back."""
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def threads(self, count: int) -> None:
        """Set how many threads decoding and prefill take."""
        llama_cpp.llama_set_n_threads(self._context, count, count)

    def reset(self) -> None:
        """Forget the text."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def decode(self, ids: Sequence[int]) -> None:
        """Append tokens and compute the logits after the last."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self._context)

    def choose(self) -> int:
        """The likeliest next token."""
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, -1))

    def logits(self) -> torch.Tensor:
        """After the last token: float32 [vocabulary]."""
        values = llama_cpp.llama_get_logits_ith(self._context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(values, (self._vocabulary,)).copy())


class Peer(Protocol):
    """What `check_logits` drives."""

    def reset(self) -> None: ...
    def decode(self, ids: Sequence[int]) -> None: ...
    def choose(self) -> int: ...
    def logits(self) -> torch.Tensor: ...


def check_logits(peer: Peer, prompt: Sequence[int], later: Sequence[int], expected: torch.Tensor) -> float:
    """The relative error of its logits after a prompt and after each later token: expected is [1 + later, vocabulary].

    Raises `RuntimeError` where it exceeds `LARGEST_ERROR`, or another than the likeliest token is chosen.
    """
    peer.reset()
    found = []
    for piece in [prompt, *([id] for id in later)]:
        peer.decode(piece)
        found.append(peer.logits())
        if peer.choose() != int(found[-1].argmax()):
            raise RuntimeError("llama.cpp: does not choose the likeliest token; nothing is timed")
    return check_close("llama.cpp, logits", relative_error(torch.stack(found), expected), LARGEST_ERROR)


def bytes_per_token(path: Path) -> float:
    """Stored bytes that llama.cpp needs for a token: everything but the embedding, of which one row."""
    tensors = read_gguf(path).tensors
    embedding = tensors["token_embd.weight"]
    return sum(t.nbytes for t in tensors.values()) - embedding.nbytes * (1 - 1 / embedding.shape[0])


@dataclass(eq=False)
class SequenceRequest:
    """A sequence to write.

    tell      -- takes each token, from the loop's thread, and None after the last
    cancelled -- set by whoever does not want it any more
    """

    ids: Sequence[int]
    tokens: int
    tell: Callable[[int | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    position: int = 0
    made: int = 0
    next: int = -1


class LlamaCppBatch:
    """A GGUF in llama.cpp, some sequences of a context each, driven by a thread of its own; greedy."""

    def __init__(self, path: Path, context: int, sequences: int, threads: int, batch: int = 512) -> None:
        expect_runs(path)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = context * sequences, sequences
        settings.n_batch = settings.n_ubatch = batch
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"{path}: llama.cpp does not open it")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary, self._eos = llama_cpp.llama_vocab_n_tokens(vocab), llama_cpp.llama_vocab_eos(vocab)
        self._most, self._batch = batch, llama_cpp.llama_batch_init(batch, 0, 1)
        self._free, self._here = [*range(sequences)], dict[int, SequenceRequest]()
        self._waiting: queue.SimpleQueue[SequenceRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def submit(self, request: SequenceRequest) -> None:
        """Let a text be made."""
        self._waiting.put(request)

    def close(self) -> None:
        """End the thread, once nobody waits, and give the memory back."""
        self._waiting.put(None)
        self._thread.join()
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _work(self) -> None:
        ended = False
        while self._here or not ended:
            while self._free and not ended and (not self._here or not self._waiting.empty()):
                request = self._waiting.get()
                if request is None:
                    ended = True
                else:
                    self._here[self._free.pop()] = request
            if self._here:
                self._turn()

    def _turn(self) -> None:
        for sequence in [n for n, request in self._here.items() if request.cancelled.is_set()]:
            self._leave(sequence)
        rows = list[tuple[int, int, int, bool]]()  # sequence, token, position, whether its logits are wanted
        order = sorted(self._here.items(), key=lambda item: item[1].position < len(item[1].ids))
        for sequence, request in order:
            if request.position >= len(request.ids):
                rows.append((sequence, request.next, request.position, True))
                request.position += 1
                continue
            for id in request.ids[request.position : request.position + self._most - len(rows)]:
                request.position += 1
                rows.append((sequence, id, request.position - 1, request.position == len(request.ids)))
        if not rows:
            return
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, token, position, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for i, (sequence, _, _, wanted) in enumerate(rows):
            if wanted:
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, i), (self._vocabulary,))
                self._take(sequence, int(logits.argmax()))

    def _take(self, sequence: int, id: int) -> None:
        request = self._here[sequence]
        request.next = id
        if id != self._eos:
            request.made += 1
            request.tell(id)
        if id == self._eos or request.made == request.tokens:
            request.tell(None)
            self._leave(sequence)

    def _leave(self, sequence: int) -> None:
        del self._here[sequence]
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence, -1, -1)
        self._free.append(sequence)


def _first_products(path: Path) -> None:
    peer = LlamaCpp.__new__(LlamaCpp)
    peer._open(path, 64, 64, repacked=True)
    for ids in (list(range(32)), [1]):  # of a matrix and of a vector
        peer.decode(ids)


if __name__ == "__main__":
    _first_products(Path(sys.argv[1]))
