"""Train the tiny Llama that sparsepack ships: `shipped:tiny`.

python3 tools/train_tiny_model.py --device cuda -o sparsepack/data/tiny
"""

import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_model_run import BOS, Kind, Settings
from tiny_model_training import main


def build(settings: Settings) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=settings.shape.vocabulary,
        hidden_size=256,
        intermediate_size=settings.shape.ffn,
        num_hidden_layers=settings.shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="silu",
        max_position_embeddings=settings.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=settings.dropout,
        bos_token_id=BOS,
        eos_token_id=BOS,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


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
