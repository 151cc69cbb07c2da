"""ik_llama.cpp as a peer: its C interface through ik-llama-cpp-python, with its own defaults."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


class IkLlamaCpp:
    """A GGUF in ik_llama.cpp: flash attention, f16 cache."""

    def __init__(self, path: Path, context: int, batch: int = 512) -> None:
        from ik_llama_cpp import _ctypes_api as api

        self._api = api
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = batch
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"{path}: ik_llama.cpp does not open it")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(batch, 0, 1)
        self._position = 0

    def threads(self, count: int) -> None:
        """Set how many threads decoding and prefill take."""
        self._api._lib.llama_set_n_threads(ctypes.c_void_p(self._context), count, count)

    def reset(self) -> None:
        """Forget the text."""
        self._api.llama_kv_cache_clear(self._context)
        self._position = 0

    def decode(self, ids: Sequence[int]) -> None:
        """Append tokens and compute the logits after the last."""
        self._batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            self._batch.token[i], self._batch.pos[i] = id, self._position + i
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
            self._batch.logits[i] = i == len(ids) - 1
        self._last = len(ids) - 1
        self._position += len(ids)
        if self._api.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")

    def choose(self) -> int:
        """The likeliest next token."""
        return int(self.logits().argmax())

    def logits(self) -> torch.Tensor:
        """After the last token: float32 [vocabulary]."""
        values = self._api.llama_get_logits_ith(self._context, self._last)
        return torch.from_numpy(np.ctypeslib.as_array(values, (self._vocabulary,)).copy())
