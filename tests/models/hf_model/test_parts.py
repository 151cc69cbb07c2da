"""Parts of stock blocks that are done at once give what the stock code gives, to the last bit, and others are left."""

import pytest
import torch
from tiny_sizes import SIZE
from torch import nn
from transformers import (
    AutoModel,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    StableLmConfig,
)

from sparsepack.models.hf_model.fused import OWN_CODE, Parts, apply_rope_by_torch, norms_by_one_kernel, parts_by

NORMS = {"input_layernorm", "post_attention_layernorm"}
USUAL = {"self_attn", "mlp", *NORMS}


class Told:
    """Parts by plain torch, that tell when they run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def parts(self) -> Parts:
        return Parts(self.apply_rope, self.silu_times, self.norm_rows)

    def apply_rope(self, query, key, cosine, sine):
        if cosine.shape[-1] != query.shape[-1]:
            return None
        self.ran.append("apply_rope")
        return apply_rope_by_torch(query, cosine, sine), apply_rope_by_torch(key, cosine, sine)

    def silu_times(self, gate, up):
        self.ran.append("silu_times")
        return nn.functional.silu(gate) * up

    def norm_rows(self, x, eps, weight):
        self.ran.append("norm_rows")
        return weight * nn.functional.rms_norm(x, x.shape[-1:], eps=eps)


def made(config_of, **more) -> nn.Module:
    torch.manual_seed(0)
    backbone = AutoModel.from_config(config_of(**{**SIZE, **more})).bfloat16().eval().requires_grad_(False)
    for parameter in backbone.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 4)
    norms_by_one_kernel(backbone.layers[0])
    return backbone


@pytest.mark.parametrize(
    ("config_of", "more", "names", "ran"),
    [
        (LlamaConfig, {}, USUAL, {"apply_rope", "silu_times", "norm_rows"}),
        (MistralConfig, {"sliding_window": 4}, USUAL, {"apply_rope", "silu_times", "norm_rows"}),
        (Qwen3Config, {"head_dim": 32}, {*USUAL, "self_attn.q_norm", "self_attn.k_norm"}, {"apply_rope", "silu_times"}),
        (LlamaConfig, {"hidden_act": "gelu"}, USUAL - {"mlp"}, {"apply_rope", "norm_rows"}),
        (Gemma2Config, {"head_dim": 16}, {"self_attn"}, {"apply_rope"}),
        (Phi3Config, {}, USUAL - {"mlp"}, {"apply_rope", "norm_rows"}),
        (CohereConfig, {}, {"mlp"}, {"silu_times"}),  # turns neighbours
        (StableLmConfig, {"partial_rotary_factor": 0.5}, {"self_attn", "mlp"}, {"apply_rope", "silu_times"}),
        (GPTNeoXConfig, {}, {"attention"}, set()),  # a part of each head, with one more argument
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_parts_give_what_the_stock_code_gives(config_of, more, names, ran):
    backbone, told = made(config_of, **more), Told()
    block = backbone.layers[0]
    x = torch.randn(2, 7, 64).bfloat16()
    expected = backbone(inputs_embeds=x, use_cache=False).last_hidden_state
    before = {name: vars(module).get("forward") for name, module in block.named_modules()}
    with parts_by(block, told.parts()) as changed:
        assert set(changed) == names
        assert torch.equal(backbone(inputs_embeds=x, use_cache=False).last_hidden_state, expected)
    assert ran <= set(told.ran)
    assert {name: vars(module).get("forward") for name, module in block.named_modules()} == before
    count = len(told.ran)
    assert torch.equal(backbone(inputs_embeds=x, use_cache=False).last_hidden_state, expected)
    assert len(told.ran) == count


def test_hooks_see_what_enters_the_modules():
    backbone = made(LlamaConfig)
    block, seen = backbone.layers[0], []
    block.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 7, 64).bfloat16()
    for parts in (OWN_CODE, Told().parts()):
        with parts_by(block, parts):
            backbone(inputs_embeds=x, use_cache=False)
    assert seen[0].abs().max() > 0
    assert torch.equal(*seen)


def test_what_parts_do_not_take_is_left_to_the_stock_code():
    backbone = made(LlamaConfig)
    x = torch.randn(2, 7, 64).bfloat16()
    expected = backbone(inputs_embeds=x, use_cache=False).last_hidden_state
    with parts_by(backbone.layers[0], OWN_CODE) as changed:
        assert set(changed) == USUAL
        assert torch.equal(backbone(inputs_embeds=x, use_cache=False).last_hidden_state, expected)


def test_a_block_that_fails_is_put_back():
    backbone = made(LlamaConfig)
    with pytest.raises(ZeroDivisionError), parts_by(backbone.layers[0], OWN_CODE):
        raise ZeroDivisionError
    assert "forward" not in vars(backbone.layers[0].mlp)
