"""What llama.cpp and transformers compute with the same plain GGUF."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from models_for_tests import TEXT

from sparsepack.formats.open import open_artifact
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_model.model import build_model

TOKENS = 128


def load_llama(path: Path, **options: Any) -> Any:
    """Stock llama.cpp with logits of every position; rotary scaling as the file says, not as the binding defaults.

    Weights stay as the file has them: repacked for AMX, some builds of llama.cpp crash on small matrices.
    """
    import llama_cpp

    def default_params() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    defaults = llama_cpp.llama_cpp.llama_model_default_params
    from_model = dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0)
    with patch("llama_cpp.llama_cpp.llama_model_default_params", default_params):
        return llama_cpp.Llama(
            str(path), n_ctx=256, n_threads=2, logits_all=True, verbose=False, **from_model, **options
        )


def both_logits(path: Path, checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher-forced logits [TOKENS, vocabulary] of llama.cpp and of the stock model on the file's own weights."""
    ids = checkpoint.tokenizer.encode(TEXT[3000:6000])[:TOKENS]
    llama = load_llama(path)
    llama.eval(ids)
    found = torch.from_numpy(np.array(llama.scores[:TOKENS]))
    model = build_model(checkpoint.config, open_artifact(path).stock().tensor)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    return found, expected


def disagreement(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """Relative L2 distance; share of positions with the same top token; and that share where the lead is clear.

    The lead of the top token is clear where it exceeds six times the typical difference of a logit: between closer
    ones the rounding of activations to 8 bits decides.
    """
    difference = found - expected
    same = found.argmax(1) == expected.argmax(1)
    top = expected.topk(2, 1).values
    clear = top[:, 0] - top[:, 1] > 6 * difference.square().mean(1).sqrt()
    relative = float(difference.norm() / expected.norm())
    return relative, float(same.float().mean()), float(same[clear].float().mean())
