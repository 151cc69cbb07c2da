"""The model `sparsepack` of lm-eval's own command line, which measures what sparsepack runs.

The entry point `lm_eval.models` names this class, and releases of lm-eval that read the group find the class by it; for
those that do not, `python -m sparsepack.integration.lm_eval` registers the class.
"""

from pathlib import Path
from typing import Any

import torch

from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.errors import UserError
from sparsepack.eval.lm_eval_model import SparseLM
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import protocol_of, subject_of
from sparsepack.progress import say

_ITS_DEFAULT = "cuda:0"
"""lm-eval's command line hands over this device where none was asked for."""


class SparsepackLM(SparseLM):
    """A checkpoint or an artifact, as `sparsepack eval` opens it, for lm-eval.

    path       -- an artifact, or a checkpoint
    thresholds -- a table, to run a checkpoint with
    protocol, runtime, dtype -- as in `EvalRequest`
    device     -- cpu, cuda, ...; lm-eval's own default, cuda:0, becomes the CPU where there is none, and that is said
    batch_size -- requests at a time; None, "auto", or lm-eval's default of 1: what `sparsepack eval` takes

    Raises `UserError` for an argument that is unknown or out of range, and as `eval.run.subject_of`.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        thresholds: str | None = None,
        protocol: str | None = EvalRequest.protocol,
        runtime: str = EvalRequest.runtime,
        dtype: str = EvalRequest.dtype,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **unknown: Any,
    ) -> None:
        if path is None:
            raise UserError("no model named; give --model_args path=FILE, an artifact or a checkpoint")
        if unknown:
            known = "path, thresholds, protocol, runtime, dtype"
            raise UserError(f"--model_args {', '.join(sorted(unknown))}: not known; expected {known}")
        request = EvalRequest(
            subject=str(path),
            thresholds=Path(thresholds) if thresholds else None,
            protocol=protocol,
            runtime=runtime,
            dtype=dtype,
            device=_usable(device or EvalRequest.device),
            batch=_batch(batch_size),
            tasks=("those that lm-eval is given",),
        )
        request.check()
        subject = subject_of(request, read_thresholds(request.thresholds) if request.thresholds else None)
        scorer = subject.task_scorer()
        super().__init__(
            scorer,
            subject.tokenizer,
            protocol=protocol_of(request, subject),
            batch_size=request.requests_at_once,
            vocabulary=scorer.vocabulary,
            end_tokens=subject.end_tokens,
        )
        say(f"sparsepack: {subject.name}, runtime {runtime}, protocol {self.protocol}")


def _usable(device: str) -> str:
    if device == _ITS_DEFAULT and not torch.cuda.is_available():
        say("sparsepack: no CUDA device here; on the CPU instead")
        return "cpu"
    return device


def _batch(asked: int | str | None) -> int | None:
    """The requests at a time, None for the usual number; results do not depend on the number."""
    if asked is None or str(asked).startswith("auto"):
        return None
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"batch_size {asked}: expected a number, at least 1, or auto")
    return None if count == 1 else count
