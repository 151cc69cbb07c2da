"""Train the tiny mixture of experts that sparsepack ships: `shipped:tiny-mixture`.

    python3 tools/train_tiny_mixture.py -o sparsepack/data/tiny-mixture

On one core of a CPU it takes some minutes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_model_run import Kind, Settings, config_values
from tiny_model_training import main

EXPERTS, USED = 16, 2
BALANCE = 0.01


def build(settings: Settings) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with random weights."""
    config = Qwen3MoeConfig(
        **config_values(settings, 32),
        moe_intermediate_size=settings.shape.ffn,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config)


def balance(model: PreTrainedModel, output: Any) -> torch.Tensor:
    """The load-balancing loss, as the stock model adds it where it is given labels."""
    return model.router_aux_loss_coef * output.aux_loss


def about(settings: Settings, parameters: int) -> str:
    """What the card says."""
    shape = settings.shape
    return f"""A mixture of experts (Qwen3-MoE) of {parameters:,} parameters, small enough to ship, for tests and for
trying what sparsepack does with experts. It writes text that looks like the Python manual and knows nothing.

{shape.layers} blocks, hidden 128, {EXPERTS} experts of width {shape.ffn} (SiLU), of which a token has {USED}, 4 heads
and 2 KV heads of 32, tied embeddings, context {settings.context}, byte-level BPE of {shape.vocabulary} tokens,
bfloat16. Its router was balanced by {BALANCE:g} times the stock model's loss for that, which is of all blocks
together."""


MIXTURE = Kind("sparsepack's tiny mixture of experts", about, 32, build, balance)
DEFAULTS = {
    "shapes": ["4x64x768"],
    "dropouts": [0.0],
    "step_counts": [500],
    "context": 512,
    "batch": 8,
    "lr": 3e-3,
    "seconds": 3600.0,
}

if __name__ == "__main__":
    main(obj=MIXTURE, default_map=DEFAULTS)
