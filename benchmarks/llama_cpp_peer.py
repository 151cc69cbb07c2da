"""llama.cpp as the peer of our engine: its C interface through llama-cpp-python, with llama.cpp's own defaults.

`llama_cpp.Llama` is not used: it turns flash attention off and copies logits about, which llama.cpp by itself does not.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import click
import llama_cpp
import numpy as np
import torch
from nearness import expect_near, relative_error

from sparsepack.files.gguf import read_gguf

LARGEST_ERROR = 0.02
"""The largest relative error of llama.cpp's logits: it rounds activations to 8 bits."""


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Drops the log."""


@cache
def expect_runs(path: Path) -> None:
    """Run a file's first products in a process of its own, which may crash. Raises `click.ClickException`, one line,
    where a signal ends it."""
    done = subprocess.run([sys.executable, __file__, str(path)], capture_output=True)
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


def check(peer: LlamaCpp, prompt: Sequence[int], later: Sequence[int], expected: torch.Tensor) -> float:
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
    return expect_near("llama.cpp, logits", relative_error(torch.stack(found), expected), LARGEST_ERROR)


def bytes_per_token(path: Path) -> float:
    """Stored bytes that llama.cpp needs for a token: everything but the embedding, of which one row."""
    tensors = read_gguf(path).tensors
    embedding = tensors["token_embd.weight"]
    return sum(t.nbytes for t in tensors.values()) - embedding.nbytes * (1 - 1 / embedding.shape[0])


def _first_products(path: Path) -> None:
    peer = LlamaCpp.__new__(LlamaCpp)
    peer._open(path, 64, 64, repacked=True)
    for ids in (list(range(32)), [1]):  # of a matrix and of a vector
        peer.decode(ids)


if __name__ == "__main__":
    _first_products(Path(sys.argv[1]))
