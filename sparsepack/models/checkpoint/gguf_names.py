"""llama.cpp's tensor names and rotary row order, beside Hugging Face's."""

import torch

ROUTER = "ffn_gate_inp"
"""llama.cpp's name of what chooses among experts, which it never quantises."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    ROUTER: "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def gguf_names(layers: int) -> dict[str, str]:
    """llama.cpp name -> Hugging Face name, of every tensor that a supported family may have; those of experts are the
    parts that `checkpoint.experts` has."""
    names = dict(_OUTSIDE)
    for layer in range(layers):
        for ours, theirs in _IN_BLOCK.items():
            for part in ("weight", "bias"):
                names[f"blk.{layer}.{ours}.{part}"] = f"model.layers.{layer}.{theirs}.{part}"
    return names


def permute_rotary(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Hugging Face's row order (halves of a rotary pair apart) to llama.cpp's (pairs adjacent).

    rows: [heads * head_dim, ...], a weight or a bias of a q or k projection.
    """
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def unpermute_rotary(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `permute_rotary`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
