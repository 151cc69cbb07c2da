"""The seconds that packing spends in each of its stages, counted from outside."""

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from sparsepack.files import hashing, transfer
from sparsepack.formats.containers import write_tensors as placing

STAGES = ("hash of the source", "read, to the device", "encode", "from the device", "hash", "write", "fsync")


class Stages:
    """Seconds by stage, summed over threads. Waiting for the device, or for another thread's use of it, counts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] += time.perf_counter() - start

    def timed(self, stage: str, function: Callable[..., Any], wait: bool = False) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            with self(stage):
                result = function(*values)
                if wait and torch.cuda.is_initialized():
                    torch.cuda.current_stream().synchronize()
                return result

        return run

    def pieces(self, data: torch.Tensor) -> Iterator[memoryview]:
        pieces = transfer.host_pieces(data)
        while True:
            with self("from the device"):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def digest(self) -> Any:
        digest = hashlib.sha256()
        return SimpleNamespace(update=self.timed("hash", digest.update), hexdigest=digest.hexdigest)

    @contextmanager
    def counted(self, reader: ModuleType, encoders: Iterable[tuple[ModuleType, str]]) -> Iterator[None]:
        """Within the context, `pack` adds to the seconds.

        reader   -- the module whose `stacked_on` brings weights to the device
        encoders -- module and name of the functions that encode them
        """
        jobs = self.timed("jobs", placing._write)
        with (
            ExitStack() as timed,
            patch.object(hashing, "_sha256_file", self.timed(STAGES[0], hashing._sha256_file)),
            patch.object(reader, "stacked_on", self.timed(STAGES[1], transfer.stacked_on)),
            patch.object(placing, "host_pieces", self.pieces),
            patch.object(placing, "hashlib", SimpleNamespace(sha256=self.digest)),
            patch.object(placing, "_write", jobs),
            patch.object(os, "fsync", self.timed("fsync", os.fsync)),
        ):
            for module, name in encoders:
                counting = self.timed("encode", getattr(module, name), wait=True)
                timed.enter_context(patch.object(module, name, counting))
            yield
        # Arguments are evaluated before the call that they are for: reading stands beside encoding, not within.
        self.seconds["write"] = self.seconds.pop("jobs") - sum(self.seconds[stage] for stage in STAGES[1:5])
