"""Train the tiny Llama that sparsepack ships: `shipped:tiny`.

python3 tools/train_tiny_model.py --device cuda -o sparsepack/data/tiny
"""

import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_model_run import Kind, Settings, config_values
from tiny_model_training import main


def build(settings: Settings) -> LlamaForCausalLM:
    """A Llama with random weights."""
    return LlamaForCausalLM(LlamaConfig(**config_values(settings, 64)))


def about(settings: Settings, parameters: int) -> str:
    """What the card says."""
    shape = settings.shape
    return f"""A Llama of {parameters:,} parameters, small enough to ship, trained well enough to measure on:
sparsepack's quickstart and tests calibrate, pack and evaluate it. It writes text that looks like the Python manual and
knows nothing.

{shape.layers} blocks, hidden 256, FFN {shape.ffn} (SiLU), 4 heads and 2 KV heads of 64, tied embeddings, context
{settings.context}, byte-level BPE of {shape.vocabulary} tokens, bfloat16."""


LLAMA = Kind("sparsepack's tiny model", about, 256, build, lambda model, output: 0.0)

if __name__ == "__main__":
    main(obj=LLAMA)
