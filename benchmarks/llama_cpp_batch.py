"""llama.cpp with continuous batching, as its server has it, without HTTP: its server's program is not on PyPI, and the
server of llama-cpp-python makes one text at a time.

Each turn is one `llama_decode` of a token of each text and, in what is left of the batch, of prompts.
"""

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp_peer import expect_runs, silent


@dataclass(eq=False)
class Asked:
    """A text that somebody wants.

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
        self._free, self._here = [*range(sequences)], dict[int, Asked]()
        self._waiting: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def submit(self, asked: Asked) -> None:
        """Let a text be made."""
        self._waiting.put(asked)

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
                asked = self._waiting.get()
                if asked is None:
                    ended = True
                else:
                    self._here[self._free.pop()] = asked
            if self._here:
                self._turn()

    def _turn(self) -> None:
        for sequence in [n for n, asked in self._here.items() if asked.cancelled.is_set()]:
            self._leave(sequence)
        rows = list[tuple[int, int, int, bool]]()  # sequence, token, position, whether its logits are wanted
        order = sorted(self._here.items(), key=lambda item: item[1].position < len(item[1].ids))
        for sequence, asked in order:
            if asked.position >= len(asked.ids):
                rows.append((sequence, asked.next, asked.position, True))
                asked.position += 1
                continue
            for id in asked.ids[asked.position : asked.position + self._most - len(rows)]:
                asked.position += 1
                rows.append((sequence, id, asked.position - 1, asked.position == len(asked.ids)))
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
        asked = self._here[sequence]
        asked.next = id
        if id != self._eos:
            asked.made += 1
            asked.tell(id)
        if id == self._eos or asked.made == asked.tokens:
            asked.tell(None)
            self._leave(sequence)

    def _leave(self, sequence: int) -> None:
        del self._here[sequence]
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), sequence, -1, -1)
        self._free.append(sequence)
